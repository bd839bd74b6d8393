"""Changes that are too many for memory: an operator gives them away as it goes on, and what comes of it is the same."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from model import SCHEMA, STATE, batch_of, examples, rows_of

from state_runtime.processors.slices import Changes
from state_runtime.state.changed_rows import batches_of
from state_runtime.state.table import concat, fold, hashes_of
from state_runtime.state.version import OpenVersion

KEYS = st.dictionaries(
    st.tuples(st.sampled_from([f"k{n}" for n in range(12)]), st.just(0.0)),
    st.none() | st.tuples(st.integers(0, 9), st.just("x")),
    min_size=1,
    max_size=8,
)


@given(st.lists(st.lists(KEYS, min_size=1, max_size=4), min_size=1, max_size=3), st.integers(1, 2_000))
@examples(150)
def test_what_is_held_elsewhere_and_what_is_not_are_the_same_changes(
    passes: list[list[dict[tuple[str, float], tuple[int, str] | None]]], held_min: int
) -> None:
    """Each identity once, the newest of all passes, sorted; and no more is held here than the bound and one slice."""
    given_away: list[int] = []

    def hold(name: str, batch: pa.RecordBatch) -> pa.RecordBatch:
        given_away.append(batch.nbytes)
        return batch

    held, plain = Changes({STATE: SCHEMA}, hold, held_min), Changes({STATE: SCHEMA})
    below = OpenVersion.of_batches("v", {STATE: SCHEMA.empty()}, {STATE: SCHEMA}, 0)
    for slices in passes:
        # Within a pass slices have different keys, in order of their hashes.
        whole = batch_of({key: value for piece in slices for key, value in piece.items()})
        step = max(1, whole.num_rows // len(slices))
        for at in range(0, whole.num_rows, step):
            for changes in (held, plain):
                changes.add([(STATE, whole.slice(at, step))], 0)
        for changes in (held, plain):
            changes.seal()
            seen = changes.on_top(below).whole(STATE)
            assert hashes_of(seen).tolist() == sorted(hashes_of(seen).tolist())
    (one,), (other,) = ([changes.folded()[STATE]] for changes in (held, plain))
    together = concat(list(batches_of(one)), SCHEMA.arrow)
    assert together.to_pylist() == concat(list(batches_of(other)), SCHEMA.arrow).to_pylist()
    assert fold([together], SCHEMA, drop_deleted=False).to_pylist() == together.to_pylist()
    ends = [(int(hashes_of(b)[0]), int(hashes_of(b)[-1])) for b in batches_of(one) if b.num_rows]
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ends))


def test_a_key_with_a_thousand_passes_is_looked_up_in_a_few_layers() -> None:
    """A key of many rows comes in pieces, each a pass: what they changed may not be held once for each of them."""
    passes = 1_000
    layers: list[int] = []

    class Counting:
        depth = 0

        def overlaid(self, *_: Any) -> Counting:
            self.depth += 1
            return self

    changes = Changes({STATE: SCHEMA})
    for number in range(passes):
        changes.add([(STATE, batch_of({("hot", 0.0): (number, "x"), (f"k{number}", 0.0): (1, "y")}))], 0)
        assert changes.seal()
        seen: Any = Counting()
        layers.append(changes.on_top(seen).depth)
    assert max(layers) <= 11  # log2(1,000) and one
    (newest,) = batches_of(changes.folded()[STATE])
    below = OpenVersion.of_batches("v", {STATE: SCHEMA.empty()}, {STATE: SCHEMA}, 0)
    assert rows_of(newest) == rows_of(changes.on_top(below).whole(STATE))
    assert rows_of(newest)["hot", 0.0] == (passes - 1, "x")
    assert newest.num_rows == passes + 1


def test_large_passes_are_not_merged_in_memory() -> None:
    changes = Changes({STATE: SCHEMA}, lambda _, batch: batch, held_bytes_min=1)
    for number in range(3):
        changes.add([(STATE, batch_of({("hot", 0.0): (number, "x")}))], 0)
        changes.seal()
    assert [len(batches) for batches in changes._newest_first[STATE]] == [1, 1, 1]
