"""Between two checkpoints: when one is due, folding of what waits, and what is known of the shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import CountingIds, empty_manifest, examples

from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import CorruptSegment
from state_runtime.base.limits import PENDING_FILES_MAX, PENDING_SEGMENTS_MAX
from state_runtime.base.progress import Progress, together, with_times
from state_runtime.base.settings import CheckpointSettings, JobSettings
from state_runtime.changelog.changes import TaskChanges
from state_runtime.changelog.merge_changes import fold_changes
from state_runtime.changelog.parts import PartEntry, decode_lines, decode_part, sha256
from state_runtime.changelog.writer import source_log_changes
from state_runtime.driver.driver_state import DriverState
from state_runtime.driver.interval import Interval, first_head, is_checkpoint_due
from state_runtime.driver.numbers import checkpoint_ms
from state_runtime.driver.shard_index import ShardIndex, ShardStep
from state_runtime.snapshot.manifest import (
    Manifest,
    OperatorEntry,
    SegmentEntry,
    StagedFile,
    StagedOutput,
    StateEntry,
    TimeEntry,
)
from state_runtime.snapshot.shard_versions import NO_VERSION, ShardVersions
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.keyhash import hash_rows
from state_runtime.state.table import CLEAR_MARKER, StateSchema, fold
from state_runtime.store import open_store
from tests.job_settings import job_settings
from tests.stored import read_states, write_segment, write_task_changes

SCHEMA = StateSchema(pa.schema([("k", pa.string())]), pa.schema([("n", pa.int64())]))
LISTS = StateSchema(pa.schema([("k", pa.string())]), pa.schema([("n", pa.int64())]), pa.schema([]))


IDS = CountingIds()


def batch(rows: dict[str, int | None]) -> pa.RecordBatch:
    """A batch of the value layout; None is a tombstone."""
    keys = pa.array(list(rows), pa.string())
    hashes = hash_rows([keys])
    order = np.argsort(hashes, kind="stable")
    gone = np.array([value is None for value in rows.values()], dtype=np.bool_)
    values = pa.array(list(rows.values()), pa.int64())
    return SCHEMA.batch(hashes[order], gone[order], [keys.take(pa.array(order))], [values.take(pa.array(order))])


def appended(key: str, place: int, value: int | None) -> pa.RecordBatch:
    """One element of a list; None clears the list."""
    keys = pa.array([key], pa.string())
    entries = np.array([place if value is not None else CLEAR_MARKER], dtype=np.uint64)
    return LISTS.batch(
        hash_rows([keys]), np.array([value is None]), [keys], [pa.array([value], pa.int64())], entries=entries
    )


def changes_of(
    tmp: str, states: dict[str, pa.RecordBatch], *, shard: int = 0, operator: str = "op", inline_max: int = 1 << 20
) -> TaskChanges:
    return write_task_changes(
        open_store(tmp),
        term=1,
        operator=operator,
        hash_range=hash_range_of_shard(shard, 2),
        changes=states,
        inline_bytes_max=inline_max,
        ids=IDS,
    )


def read(tmp: str, task: TaskChanges, state: str, shard: int = 0) -> list[pa.RecordBatch]:
    """The parts of a state, oldest first."""
    low = hash_range_of_shard(shard, 2)[0]
    store = open_store(tmp)
    return [
        decode_part(store.read_range(p.path, p.offset, p.length) if p.path else body, p, "here")
        for p, body in zip(task.parts, task.inline, strict=True)
        if p.state == state and p.hash_low == low
    ]


# --- folding -------------------------------------------------------------------------------------------------------

EPOCHS = st.lists(
    st.dictionaries(st.sampled_from("abcdefgh"), st.none() | st.integers(0, 9), max_size=6), min_size=1, max_size=6
)


@examples(60)
@given(EPOCHS, st.sets(st.integers(0, 5)))
def test_what_is_folded_before_it_is_written_reads_as_if_each_epoch_had_been_written(
    tmp_path_factory: pytest.TempPathFactory, epochs: list[dict[str, int | None]], uploaded: set[int]
) -> None:
    """Inline and uploaded parts in any order: the same rows, tombstones included."""
    tmp = str(tmp_path_factory.mktemp("store"))
    tasks = [
        changes_of(tmp, {"s": batch(rows)}, inline_max=0 if number in uploaded else 1 << 20)
        for number, rows in enumerate(epochs)
    ]
    plain = [b for task in tasks for b in read(tmp, task, "s")]
    folded = [b for task in fold_changes(tasks) for b in read(tmp, task, "s")]
    expected = fold(list(reversed(plain)) or [SCHEMA.empty()], SCHEMA, drop_deleted=False)
    assert fold(list(reversed(folded)) or [SCHEMA.empty()], SCHEMA, drop_deleted=False).equals(expected)


def test_a_key_that_changed_in_every_epoch_is_written_once(tmp_path: Path) -> None:
    tasks = [changes_of(str(tmp_path), {"s": batch({"a": n, "b": n})}) for n in range(50)]
    (folded,) = fold_changes(tasks)
    assert [p.rows for p in folded.parts] == [2]
    assert folded.bytes < 2 * tasks[0].bytes


def test_a_clear_marker_hides_what_was_appended_before_it_and_nothing_after(tmp_path: Path) -> None:
    tmp = str(tmp_path)
    tasks = [
        changes_of(tmp, {"l": appended("a", 1, 10)}),
        changes_of(tmp, {"l": appended("a", 0, None)}),
        changes_of(tmp, {"l": appended("a", 3, 30)}),
    ]
    (folded,) = fold_changes(tasks)
    (rows,) = read(tmp, folded, "l")
    assert [(r["entry"], r["deleted"], r["value.n"]) for r in rows.to_pylist()] == [(0, True, None), (3, False, 30)]


def test_nothing_is_moved_across_an_uploaded_part(tmp_path: Path) -> None:
    tmp = str(tmp_path)
    tasks = [
        changes_of(tmp, {"s": batch({"a": 1})}),
        changes_of(tmp, {"s": batch({"a": 2})}, inline_max=0),
        changes_of(tmp, {"s": batch({"b": 3})}),
    ]
    (folded,) = fold_changes(tasks)
    assert [bool(p.path) for p in folded.parts] == [False, True, False]
    newest = [r["value.n"] for b in reversed(read(tmp, folded, "s")) for r in b.to_pylist() if r["key.k"] == "a"]
    assert newest == [2, 1]


def test_shards_states_and_operators_stay_apart(tmp_path: Path) -> None:
    tmp = str(tmp_path)
    one_epoch = [
        changes_of(tmp, {"s": batch({"a": 1}), "t": batch({"a": 2})}),
        changes_of(tmp, {"s": batch({"b": 3})}, shard=1),
        changes_of(tmp, {"s": batch({"a": 4})}, operator="other"),
    ]
    (folded,) = fold_changes(one_epoch * 3)
    assert [(p.operator, p.state, p.hash_low, p.rows) for p in folded.parts] == [
        (p.operator, p.state, p.hash_low, 1) for task in one_epoch for p in task.parts
    ]


def test_the_lines_of_a_sources_log_stay_in_order() -> None:
    (folded,) = fold_changes([source_log_changes(0, [f"line {n}"]) for n in range(4)])
    (part,) = folded.parts
    assert decode_lines(folded.inline[0], part, "here") == ["line 0", "line 1", "line 2", "line 3"]


def test_one_epoch_is_passed_on_unread() -> None:
    """The default makes no detour: bytes go from the acknowledgements of all shards into the segment."""
    parts = [
        PartEntry("state", "op", state, "", 0, 3, sha256(b"abc"), 1, 3, *hash_range_of_shard(shard, 3))
        for shard in range(3)
        for state in ("s", "t")
    ]
    tasks = [TaskChanges((part,), (b"abc",)) for part in parts]
    assert fold_changes(tasks[:1]) == tasks[:1]
    (folded,) = fold_changes(tasks)
    assert (folded.parts, folded.inline) == (tuple(parts), (b"abc",) * 6)


def test_a_part_that_was_altered_in_memory_is_not_folded(tmp_path: Path) -> None:
    task = changes_of(str(tmp_path), {"s": batch({"a": 1})})
    broken = replace(task, inline=(task.inline[0][:-1] + b"?",))
    with pytest.raises(CorruptSegment):
        fold_changes([task, broken])


def test_the_later_part_of_a_segment_hides_the_earlier(tmp_path: Path) -> None:
    """Uploaded parts are not folded, so a segment of several epochs may hold a key more than once."""
    tmp = str(tmp_path)
    tasks = [changes_of(tmp, {"s": batch({"a": n, "b": None if n == 2 else n})}, inline_max=0) for n in range(3)]
    root = open_store(tmp)
    segment = write_segment(root, fold_changes(tasks), job_uid="u", term=1, snapshot_id=8, ids=IDS)
    assert segment is not None
    operator = OperatorEntry("op", "aggregate", "`k` string", (StateEntry("s", "value", "`n` bigint"),))
    manifest = replace(LAST, segments=(segment,), operators=(operator,), snapshot_id=8)
    whole = (0, (1 << 64) - 1)
    read_back = read_states(root, manifest, "op", {"s": SCHEMA}, *whole)["s"]
    assert [(r["key.k"], r["value.n"]) for r in read_back.to_pylist()] == [("a", 2)]


# --- when ----------------------------------------------------------------------------------------------------------

LAST = Manifest(3, "u", 7, 1, "c", "fencing", 0, 2, epoch=12)


def due(epochs: int, now_s: float, **settings: float) -> bool:
    return is_checkpoint_due(Interval(first_head(LAST), 100.0, epochs), job_settings(**settings), now_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "epochs", "elapsed_s", "expected"),
    [
        ({}, 1, 0.0, True),
        ({}, 0, 1e6, False),
        ({"checkpoint_batches": 3}, 2, 1e6, False),
        ({"checkpoint_batches": 3}, 3, 0.0, True),
        ({"checkpoint_interval_s": 10.0}, 1000, 9.9, False),
        ({"checkpoint_interval_s": 10.0}, 1, 10.0, True),
        ({"checkpoint_interval_s": 10.0}, 0, 10.0, False),
        ({"checkpoint_interval_s": 10.0, "checkpoint_batches": 3}, 2, 9.9, False),
        ({"checkpoint_interval_s": 10.0, "checkpoint_batches": 3}, 3, 0.0, True),
        ({"checkpoint_interval_s": 10.0, "checkpoint_batches": 3}, 1, 10.0, True),
    ],
)
def test_a_checkpoint_is_due_as_the_settings_say(
    settings: dict[str, float], epochs: int, elapsed_s: float, expected: bool
) -> None:
    assert due(epochs, 100.0 + elapsed_s, **settings) is expected


def test_a_manifest_does_not_grow_with_the_interval() -> None:
    """Neither staged files nor segments without end: then a checkpoint comes early."""
    settings = JobSettings(checkpoint=CheckpointSettings(interval_s=86_400))
    file = StagedFile("a", "b", 1, 1)
    files = Interval(first_head(LAST), 0.0, 1, outputs=(StagedOutput("s", 1, (file,) * (PENDING_FILES_MAX + 1)),))
    segment = SegmentEntry("p", 1, "d", 1, 8, 1)
    segments = Interval(first_head(LAST), 0.0, 1, segments=(segment,) * (PENDING_SEGMENTS_MAX + 1))
    assert is_checkpoint_due(files, settings, 1.0)
    assert is_checkpoint_due(segments, settings, 1.0)
    assert not is_checkpoint_due(replace(segments, segments=(segment,)), settings, 1.0)


@pytest.mark.parametrize(("epoch", "snapshot_id", "expected"), [(12, 7, 12), (0, 7, 7), (3, 7, 7)])
def test_epochs_count_on_over_runs_and_over_formats(epoch: int, snapshot_id: int, expected: int) -> None:
    """Of older formats the id is the epoch; fencing snapshots may overtake it."""
    assert first_head(replace(LAST, epoch=epoch, snapshot_id=snapshot_id)).epoch == expected


# --- shards --------------------------------------------------------------------------------------------------------


def shards() -> ShardIndex:
    return ShardIndex.at_start(3, {"a": "x" * 48, "b": "x" * 16}, {"a": 5}, ["a", "b"])


def test_versions_of_another_parallelism_are_not_believed() -> None:
    assert shards().versions == {"a": ShardVersions.of(["x" * 16] * 3), "b": ShardVersions.none(3)}


def test_the_version_of_the_checkpoint_stays_known_while_epochs_go_on() -> None:
    after = shards().after([ShardStep("a", 1, "y" * 16, None, True)])
    assert list(after.versions["a"]) == ["x" * 16, "y" * 16, "x" * 16]
    assert list(after.committed["a"]) == ["x" * 16] * 3
    assert (after.trusted["a"], after.pending["a"]) == ({1}, {1})
    assert after.checkpointed().committed == after.versions
    assert after.flushed().pending["a"] == set()


def test_changes_stay_pending_when_a_later_epoch_changes_nothing() -> None:
    after = shards().after([ShardStep("a", 1, "y" * 16, None, True)]).after([ShardStep("a", 1, "y" * 16, None, False)])
    assert after.pending["a"] == {1}
    assert not after.any_stranded


def test_a_shard_without_a_local_version_is_stranded_while_the_driver_holds_its_changes() -> None:
    after = shards().after([ShardStep("a", 2, NO_VERSION, None, True)])
    assert after.any_stranded
    assert not after.flushed().any_stranded
    assert not shards().any_stranded, "nothing is held of shards that were never visited"


def test_a_shard_to_be_visited_is_visited_once() -> None:
    asked = shards().visiting({"a": frozenset({0, 2})})
    after = asked.after([ShardStep("a", 2, "y" * 16, 9, False)])
    assert after.unvisited["a"] == {0}
    assert after.due("a", 5) == [0, 1]
    assert after.earliest_due_ms("a") == 5


# --- numbers -------------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_checkpoint_are_those_of_its_epochs_together() -> None:
    first = with_times(Progress(input_rows=10, epoch=4, state_rows=3, restore_ms=9.0), 100.0, {"plan": 1.0})
    second = with_times(Progress(input_rows=20, epoch=5, state_rows=8, restore_ms=2.0), 200.0, {"plan": 2.0, "x": 1.0})
    both = together(first, second)
    assert (both.input_rows, both.duration_ms, both.epochs, both.rows_per_s) == (30, 300.0, 2, 100.0)
    assert (both.epoch, both.state_rows, both.restore_ms) == (5, 8, 9.0)
    assert both.phases_ms == {"plan": 3.0, "x": 1.0}
    assert together(None, first) is first


@pytest.mark.parametrize(
    ("processed_at_ms", "durable_at_ms", "expected"),
    [
        (1_000, 1_080, 80.0),
        (1_000, 1_010, 50.0),  # less than the driver itself took: the task's clock is ahead
        (1_000, 9_000, 300.0),  # more than the whole epoch: it is behind
        (0, 9_000, 50.0),  # no task ran
    ],
)
def test_clocks_of_two_hosts_cannot_bend_the_duration_of_a_checkpoint(
    processed_at_ms: int, durable_at_ms: int, expected: float
) -> None:
    assert checkpoint_ms(processed_at_ms, durable_at_ms, own_ms=50.0, epoch_ms=300.0) == expected


def test_epochs_of_a_restored_job_go_on_above_those_that_are_published_already() -> None:
    """An older backup in the root's place: with a number that the output has, every start would end at its first checkpoint."""
    assert first_head(replace(LAST, epoch=6, snapshot_id=4), 12).epoch == 12
    assert first_head(replace(LAST, epoch=6, snapshot_id=4), 5).epoch == 6


def test_no_source_is_idle_while_no_run_could_read_it() -> None:
    """A job that was down for a day would begin with all of its sources idle, and take what the slower ones bring for late."""
    time = TimeEntry(5, 7, {"a.at": 9}, {"w": 8}, {"a": 1}, ("a",))
    context: Any = SimpleNamespace(
        parallelism=1,
        pipeline=SimpleNamespace(operators=()),
        settings=JobSettings(),
        entries=(),
        clock=SYSTEM_CLOCK,
        on_trial=False,
        drop_inflight=False,
        root=None,
    )
    head = DriverState.open(context, replace(empty_manifest(), time=time)).interval.head
    assert head.time == replace(time, seen_ms={}, idle=())
