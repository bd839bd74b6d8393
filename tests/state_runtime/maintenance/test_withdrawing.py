"""Output of epochs that a job went back behind is taken out of a folder, whatever was done with it, and by whom."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lake import SHARDS, UID, Crash, Lake, at_point, die
from model import examples

from state_runtime.base.errors import InvalidPipeline, MissingFile
from state_runtime.base.faults import COMPACTION_KILL_POINTS
from state_runtime.maintenance.output.withdraw import withdraw_output
from state_runtime.pipeline.compactions import numbers_of
from state_runtime.snapshot.manifest import StagedOutput

Left = Sequence[tuple[int, int]]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "out"))


def withdraw(lake: Lake, left: Left) -> int:
    """As a start of the job does it; then the epochs are no output any more."""
    removed = withdraw_output(lake.sink, lake.spec, left, lake.actor)
    for epoch in [epoch for epoch in lake.outputs if any(a <= epoch <= b for a, b in left)]:
        del lake.outputs[epoch]
    return removed


def test_files_of_left_epochs_go_and_no_others(lake: Lake) -> None:
    lake.publish(6)
    other = lake.sink.spec("other", UID, "legs", ("unused", {}))
    staging = other.open(1, 5, 0, "a" * 16)
    staging.write(pa.RecordBatch.from_pylist([{"k": "k0", "n": 1_000}]))
    lake.sink.publish(other, StagedOutput("legs", 5, staging.finish().files), None)
    assert withdraw(lake, [(4, 6)]) == 3 * SHARDS
    assert lake.numbers() == [*lake.expected(), 1_000], "that of another job in the folder stays"
    assert withdraw(lake, [(4, 6)]) == 0
    lake.publish(2)
    assert lake.numbers() == [*lake.expected(), 1_000]


steps = st.lists(st.one_of(st.integers(1, 4), st.just("compact"), st.integers(-5, -1)), max_size=10)


@examples(60)
@given(steps=steps, is_partitioned=st.booleans())
def test_whatever_was_published_compacted_and_left_the_folder_is_what_stays(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int | str], is_partitioned: bool
) -> None:
    """A positive number publishes epochs; a negative one goes back behind so many."""
    lake = Lake(str(tmp_path_factory.mktemp("lake") / "out"), partition_by=("k",) if is_partitioned else ())
    left: list[tuple[int, int]] = []
    for step in steps:
        if step == "compact":
            lake.compact()
        elif isinstance(step, int) and step > 0:
            lake.publish(step)
        elif isinstance(step, int) and lake.epoch:
            first = max(1, lake.epoch + step + 1)
            left = [(a, b) for a, b in left if a < first] + [(first, lake.epoch)]
            withdraw(lake, left)
        assert lake.numbers() == lake.expected()


def test_a_file_that_a_compaction_made_of_both_is_written_anew(lake: Lake) -> None:
    lake.publish(8)
    lake.compact()
    assert withdraw(lake, [(4, 5)]) == 1
    assert lake.numbers() == lake.expected()
    assert withdraw(lake, [(4, 5)]) == 0, "its name still says 1 to 7"


def test_without_a_column_that_says_the_epoch_such_a_file_is_refused(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "out"), epoch_column=None)
    lake.publish(8)
    lake.compact()
    before = lake.files()
    with pytest.raises(InvalidPipeline, match=r"rows of epochs 1 to 7, put together by a compaction"):
        withdraw_output(lake.sink, lake.spec, [(4, 8)], lake.actor)
    assert lake.files() == before
    assert withdraw(lake, [(1, 8)]) == 1 + SHARDS, "all of it may go"
    assert lake.numbers() == []


@pytest.mark.parametrize("point", sorted({*COMPACTION_KILL_POINTS} - {"compaction-staged", "compaction-agreed"}))
@pytest.mark.parametrize("is_compacted", [False, True])
def test_a_crash_anywhere_is_repaired_by_the_next_start(lake: Lake, point: str, is_compacted: bool) -> None:
    lake.publish(8)
    if is_compacted:
        lake.compact()
    with at_point(point, die), pytest.raises(Crash):
        withdraw_output(lake.sink, lake.spec, [(4, 8)], lake.actor)
    withdraw(lake, [(4, 8)])
    assert lake.numbers() == lake.expected()
    assert numbers_of(lake.store).open == ()


@pytest.mark.parametrize("point", ["compaction-staged", "compaction-agreed", "compaction-visible"])
def test_a_compaction_that_slept_brings_no_row_back(lake: Lake, point: str) -> None:
    """It had read the files before they went."""
    lake.publish(8)
    with at_point(point, lambda: withdraw(lake, [(4, 8)])):
        lake.compact()
    assert lake.numbers() == lake.expected()
    withdraw(lake, [(4, 8)])
    assert lake.numbers() == lake.expected()


def test_a_driver_that_slept_publishes_no_left_epoch(lake: Lake) -> None:
    """Its staged files went before: nothing has the new name yet, or all of it is taken out."""
    lake.publish(3)
    staged = lake.stage(4)
    lake.spec.remove_abandoned(term=2, named=frozenset())
    withdraw(lake, [(3, 4)])
    with pytest.raises(MissingFile):
        lake.sink.publish(lake.spec, staged, None)
    assert lake.numbers() == lake.expected()
