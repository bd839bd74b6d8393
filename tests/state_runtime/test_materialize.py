"""Folding the changelog into tables: the same state, fewer files, and no failure that reaches the job."""

from __future__ import annotations

import logging
import random
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import (
    ALL_HASHES,
    ALL_KEYS,
    OPERATOR,
    SCHEMA,
    STATE,
    Changes,
    CountingIds,
    DictStore,
    HashOf,
    StateWriter,
    after,
    epochs,
    examples,
    hash_functions,
    rows_of,
    seeds,
)

from state_runtime import materialize as module
from state_runtime.changelog.reader import read_source_log, read_states
from state_runtime.changelog.writer import source_log_changes, write_segment
from state_runtime.errors import CorruptData, CorruptSegment
from state_runtime.materialize import BackgroundMaterializer, MaterializationPlan, apply, materialize, plan
from state_runtime.settings import JobSettings
from state_runtime.snapshot.manifest import LayerEntry, Manifest, SegmentEntry, SourcePosition, TableEntry
from state_runtime.state.table import hash_range_of_shard
from state_runtime.store import Store

MAJOR = MaterializationPlan("major", 0)


def state_of(root: Store, manifest: Manifest, low: int = ALL_HASHES[0], high: int = ALL_HASHES[1]) -> Any:
    return rows_of(read_states(root, manifest, OPERATOR, {STATE: SCHEMA}, low, high)[STATE])


def minor(manifest: Manifest) -> MaterializationPlan:
    return MaterializationPlan("minor", len(manifest.layers))


folds = st.sampled_from(["none", "minor", "minor from 1", "major"])


@given(st.lists(st.tuples(epochs.map(lambda e: e[0]), folds), min_size=1, max_size=8), hash_functions)
@examples(30)
def test_any_sequence_of_folds_keeps_the_dictionary(steps: list[tuple[Changes, str]], hash_of: HashOf) -> None:
    """Deltas keep tombstones over the base; the base has none."""
    writer = StateWriter(hash_of=hash_of, parallelism=3)
    done: list[Changes] = []
    for changed, how in steps:
        writer.epoch(changed)
        done.append(changed)
        if how == "none" or not writer.manifest.segments:
            continue
        layers = len(writer.manifest.layers)
        what = {
            "minor": minor(writer.manifest) if layers else MAJOR,
            "minor from 1": MaterializationPlan("minor", min(1, layers)) if layers else MAJOR,
            "major": MAJOR,
        }[how]
        result = materialize(writer.root, writer.manifest, what, ids=writer.ids)
        before = state_of(writer.root, writer.manifest)
        writer.manifest = apply(writer.manifest, result)
        assert writer.manifest.segments == ()
        assert state_of(writer.root, writer.manifest) == before == after(done)
        if what.first_layer == 0:
            assert len(writer.manifest.layers) == 1
            rows = sum(t.rows for t in writer.manifest.layers[0].tables)
            assert rows == len(after(done)), "a base holds no tombstones"
    for shard in range(5):
        low, high = hash_range_of_shard(shard, 5)
        expected = {k: v for k, v in after(done).items() if low <= hash_of(k) <= high}
        assert state_of(writer.root, writer.manifest, low, high) == expected


@pytest.mark.parametrize("range_bytes", [60, 300])
def test_folding_range_by_range_is_folding_at_once(monkeypatch: pytest.MonkeyPatch, range_bytes: int) -> None:
    """Only one range is in memory at a time; the ranges together are the state."""
    monkeypatch.setattr(module, "_RANGE_BYTES", range_bytes)
    writer = StateWriter(parallelism=3)
    writer.epoch(dict.fromkeys(ALL_KEYS, (1, "x")))
    writer.epoch(dict.fromkeys(ALL_KEYS[::3]))
    expected = state_of(writer.root, writer.manifest)
    writer.manifest = apply(writer.manifest, materialize(writer.root, writer.manifest, MAJOR, ids=writer.ids))
    assert len(writer.manifest.layers[0].tables) > 1
    assert state_of(writer.root, writer.manifest) == expected


def test_segments_written_meanwhile_stay() -> None:
    """The job goes on while the fold runs; what it wrote lies on top of the new layer."""
    writer = StateWriter()
    writer.epoch({ALL_KEYS[0]: (1, "a"), ALL_KEYS[1]: (1, "b")})
    result = materialize(writer.root, writer.manifest, MAJOR, ids=writer.ids)
    writer.epoch({ALL_KEYS[0]: None})
    writer.epoch({ALL_KEYS[2]: (3, "c")})
    draft = apply(writer.manifest, result)
    assert [s.snapshot_id for s in draft.segments] == [2, 3]
    assert state_of(writer.root, draft) == {ALL_KEYS[1]: (1, "b"), ALL_KEYS[2]: (3, "c")}


def test_a_fold_that_nobody_took_leaves_the_chain_valid() -> None:
    """A crash between the fold and the next manifest: the tables are garbage, the log is still there."""
    writer = StateWriter()
    writer.epoch({ALL_KEYS[0]: (1, "a")})
    materialize(writer.root, writer.manifest, MAJOR, ids=writer.ids)
    materialize(writer.root, writer.manifest, MAJOR, ids=writer.ids)
    assert state_of(writer.root, writer.manifest) == {ALL_KEYS[0]: (1, "a")}
    assert isinstance(writer.root, DictStore)
    assert len([p for p in writer.root.objects if p.endswith(".parquet")]) == 2, "each fold has names of its own"


def test_a_flipped_bit_anywhere_in_a_table_is_found() -> None:
    """By its digest, before it is decoded."""
    writer = StateWriter()
    writer.epoch({ALL_KEYS[0]: (1, "a")})
    folded = apply(writer.manifest, materialize(writer.root, writer.manifest, MAJOR, ids=writer.ids))
    assert isinstance(writer.root, DictStore)
    path = folded.layers[0].tables[0].path
    body = writer.root.objects[path]
    for position in range(0, len(body) * 8, 11):
        damaged = bytearray(body)
        damaged[position // 8] ^= 1 << position % 8
        writer.root.objects[path] = bytes(damaged)
        with pytest.raises(CorruptSegment):
            state_of(writer.root, folded)
    for length in range(0, len(body), 97):
        writer.root.objects[path] = body[:length]
        with pytest.raises(CorruptData):
            state_of(writer.root, folded)


source_lines = st.lists(st.sampled_from(['{"path":"a"}', '{"path":"\u2028b"}', '{"path":"c\u0085\u000bd"}', "x y"]), min_size=1, max_size=4)  # fmt: skip


@given(st.lists(st.tuples(source_lines, folds), min_size=1, max_size=6))
@examples(50)
def test_source_logs_survive_folding(steps: list[tuple[list[str], str]]) -> None:
    """The list of seen files grows with the input; losing a line would read a file twice. Names hold any character."""
    root, ids = DictStore(), CountingIds()
    manifest = replace(StateWriter().manifest, source=SourcePosition(0, "", "", "", "", (0,)))
    written: list[str] = []
    for number, (new, how) in enumerate(steps, 1):
        segment = write_segment(
            root, [source_log_changes(0, new)], job_uid="job-1", term=1, snapshot_id=number, ids=ids
        )
        assert segment is not None
        written += new
        manifest = replace(manifest, snapshot_id=number, segments=(*manifest.segments, segment))
        if how != "none":
            what = MAJOR if how == "major" or not manifest.layers else minor(manifest)
            manifest = apply(manifest, materialize(root, manifest, what, ids=ids))
        assert read_source_log(root, manifest, 0) == written


# --- policy ------------------------------------------------------------------------------------------------------


def chain(*, segments: int, segment_bytes: int, layers: tuple[int, ...] = ()) -> Manifest:
    """A manifest with a log and layers of so many bytes."""
    return replace(
        StateWriter().manifest,
        segments=tuple(SegmentEntry(f"s/{n}", segment_bytes, "d", 1, n + 1, 1) for n in range(segments)),
        layers=tuple(
            LayerEntry(n, n, (TableEntry(f"t/{n}", size, "d", 1, "o", "s", *ALL_HASHES),))
            for n, size in enumerate(layers)
        ),
    )


SETTINGS = JobSettings(materialize_min_bytes=1000, materialize_ratio=1.0, materialize_max_segments=10)


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        (chain(segments=0, segment_bytes=1), None),
        (chain(segments=9, segment_bytes=111), None),
        (chain(segments=9, segment_bytes=112), MAJOR),
        (chain(segments=10, segment_bytes=1), MAJOR),
        (chain(segments=2, segment_bytes=500, layers=(1001,)), MaterializationPlan("minor", 1)),
        (chain(segments=2, segment_bytes=500, layers=(1000,)), MAJOR),
        (chain(segments=2, segment_bytes=500, layers=(5000, 100)), MaterializationPlan("minor", 2)),
        (chain(segments=2, segment_bytes=500, layers=(5000, 4000)), MAJOR),
        (chain(segments=2, segment_bytes=500, layers=(50_000, *[10] * 8)), MaterializationPlan("minor", 1)),
    ],
)
def test_the_plan_follows_sizes_and_counts(manifest: Manifest, expected: MaterializationPlan | None) -> None:
    """Nothing below the limits; everything once log and deltas weigh as much as the base; deltas stay few."""
    assert plan(manifest, SETTINGS) == expected


FOLD_EPOCHS_MAX = 5


def simulate(rng: random.Random, settings: JobSettings, epochs_run: int) -> tuple[int, int]:
    """Epochs with folds that take some epochs; the most segments and the most layers that a restart would read."""
    manifest = StateWriter().manifest
    running: tuple[int, Manifest, MaterializationPlan] | None = None
    most_segments = most_layers = 0
    for number in range(1, epochs_run + 1):
        if running is not None and running[0] <= number:
            _, base, what = running
            size = sum(s.bytes for s in base.segments) + sum(x.total_bytes for x in base.layers[what.first_layer :])
            layer = LayerEntry(0, base.snapshot_id, (TableEntry("t", size, "d", 1, "o", "s", *ALL_HASHES),))
            manifest = apply(manifest, module.Materialized(what, layer, 0))
            running = None
        entry = SegmentEntry("s", rng.randrange(1, 2000), "d", 1, number, 1)
        manifest = replace(manifest, snapshot_id=number, segments=(*manifest.segments, entry))
        if running is None:
            due = plan(manifest, settings)
            if due is not None:
                running = (number + rng.randrange(1, FOLD_EPOCHS_MAX + 1), manifest, due)
        most_segments = max(most_segments, len(manifest.segments))
        most_layers = max(most_layers, len(manifest.layers))
    return most_segments, most_layers


def test_segments_and_layers_of_a_restart_stay_bounded() -> None:
    """Whatever the epochs weigh: at most the limit (or what the fold before left over), and what comes during a fold."""
    for seed, rng in seeds(60):
        limit = rng.choice([2, 5, 40])
        settings = JobSettings(
            materialize_min_bytes=rng.choice([1, 1000, 1 << 40]),
            materialize_ratio=rng.choice([0.1, 1.0, 10.0]),
            materialize_max_segments=limit,
        )
        most_segments, most_layers = simulate(rng, settings, 400)
        assert most_segments <= max(limit, FOLD_EPOCHS_MAX) + FOLD_EPOCHS_MAX, f"STILLSTATE_TEST_SEED={seed}"
        assert most_layers <= module._DELTAS_MAX + 2, f"STILLSTATE_TEST_SEED={seed}"


# --- beside the driver -------------------------------------------------------------------------------------------

EAGER = JobSettings(materialize_min_bytes=1)


def test_a_finished_fold_goes_into_the_next_commit_and_is_then_forgotten() -> None:
    """A result is kept until a committed manifest holds it, however many commits fail in between."""
    writer = StateWriter()
    background = BackgroundMaterializer(writer.root, EAGER, writer.ids)
    committed = writer.epoch({ALL_KEYS[0]: (1, "a")})
    assert background.take(committed) is committed
    background.start_if_due(committed)
    background.join(30)
    draft = background.take(committed)
    assert (len(draft.layers), draft.segments) == (1, ())
    background.settled(committed)  # another manifest was committed, without the layer
    assert background.completed == 0
    assert background.take(committed) == draft
    background.settled(draft)
    assert background.completed == 1
    assert background.take(committed) is committed
    assert state_of(writer.root, draft) == {ALL_KEYS[0]: (1, "a")}


def test_only_one_fold_runs_and_none_while_a_result_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two results over one chain could not both be applied."""
    writer = StateWriter()
    committed = writer.epoch({ALL_KEYS[0]: (1, "a")})
    go, started = threading.Event(), []
    fold = module.materialize

    def slow(*args: Any, **kwargs: Any) -> Any:
        started.append(1)
        go.wait(30)
        return fold(*args, **kwargs)

    monkeypatch.setattr(module, "materialize", slow)
    background = BackgroundMaterializer(writer.root, EAGER, writer.ids)
    background.start_if_due(committed)
    background.start_if_due(committed)
    assert background.take(committed) is committed, "nothing is taken before the fold has ended"
    go.set()
    background.join(30)
    background.start_if_due(committed)
    background.join(30)
    assert len(started) == 1


def test_a_failed_fold_is_logged_counted_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed materialization never fails the job."""
    writer = StateWriter()
    committed = writer.epoch({ALL_KEYS[0]: (1, "a")})
    fold = module.materialize
    failures = iter([OSError("disk"), MemoryError("memory"), CorruptSegment("damaged")])

    def failing(*args: Any, **kwargs: Any) -> Any:
        error = next(failures, None)
        if error is not None:
            raise error
        return fold(*args, **kwargs)

    monkeypatch.setattr(module, "materialize", failing)
    background = BackgroundMaterializer(writer.root, EAGER, writer.ids)
    for count in (1, 2, 3):
        with caplog.at_level(logging.ERROR):
            background.start_if_due(committed)
            background.join(30)
        assert background.failures_in_a_row == count
        assert background.take(committed) is committed
    assert caplog.text.count("materialization (major) of snapshot 1 failed") == 3
    background.start_if_due(committed)
    background.join(30)
    assert background.failures_in_a_row == 0
    assert len(background.take(committed).layers) == 1


def test_a_thread_that_cannot_start_does_not_fail_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine at its limit of threads: the epoch is committed already, and the next one tries again."""
    writer = StateWriter()
    committed = writer.epoch({ALL_KEYS[0]: (1, "a")})
    background = BackgroundMaterializer(writer.root, EAGER, writer.ids)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    background.start_if_due(committed)
    monkeypatch.undo()
    background.start_if_due(committed)
    background.join(30)
    assert len(background.take(committed).layers) == 1
