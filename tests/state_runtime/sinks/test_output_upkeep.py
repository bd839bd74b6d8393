"""Upkeep of tables: fewer files and versions, and each epoch is there once, before, behind and beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.dataset
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import CommitFailedException
from tenacity import wait_none

from state_runtime.base.actor import Actor
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import StoreUnavailable
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.maintenance.output.upkeep import OutputPlace, keep_output
from state_runtime.pipeline.output_upkeep import OutputUpkeep, OutputWork
from state_runtime.pipeline.sinks import ParquetSink, Sink, foreach_epoch
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.sinks import delta_log
from state_runtime.sinks.delta import DeltaSink, small_files
from state_runtime.sinks.iceberg import IcebergSink
from state_runtime.snapshot.manifest import StagedOutput

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])
ACTOR = Actor(SYSTEM_CLOCK, SYSTEM_IDS)
NOW = OutputUpkeep(min_age_s=0, history_s=0)
ALL_KINDS = pytest.mark.parametrize("kind", ["parquet", "delta", "delta-merge", "iceberg", "iceberg-merge"])


def lake(place: Path) -> dict[str, str]:
    return {"type": "sql", "uri": f"sqlite:///{place}/catalog.db", "warehouse": f"file://{place}/warehouse"}


def made(kind: str, place: Path) -> Sink:
    merge_on = ["k"] if kind.endswith("merge") else None
    if kind == "parquet":
        return ParquetSink(str(place / "out"))
    if kind.startswith("delta"):
        return DeltaSink(str(place / "out"), merge_on=merge_on)
    sink = IcebergSink("shop.orders", catalog="lake", catalog_options=lake(place), merge_on=merge_on)
    sink._log._wait = wait_none()
    return sink


def started(kind: str, place: Path) -> OutputPlace:
    """A sink as a driver has it that has just started."""
    sink = made(kind, place)
    sink.check(SCHEMA, "sink 'out'")
    layout = sink.layout(SCHEMA)
    assert layout is not None
    sink.check_place(layout, (), "sink 'out'")
    return OutputPlace("out", sink, sink.spec("orders", "0123456789abcdef", "out", (str(place / "root"), {})))


def staged(spec: SinkSpec, epoch: int) -> StagedOutput:
    task = spec.open(1, epoch, 0, "attempt")
    task.write(pa.RecordBatch.from_pylist([{"k": f"k{epoch}", "n": epoch}], schema=SCHEMA))
    return StagedOutput(spec.name, epoch, task.finish().files)


def rows_of(kind: str, place: Path) -> list[int]:
    if kind == "parquet":
        found = pa.dataset.dataset(place / "out", format="parquet", exclude_invalid_files=False).to_table()
    elif kind.startswith("delta"):
        found = DeltaTable(str(place / "out")).to_pyarrow_table()
    else:
        found = load_catalog("lake", **lake(place)).load_table("shop.orders").scan().to_arrow()
    return sorted(found["n"].to_pylist())


@ALL_KINDS
def test_upkeep_between_epochs_leaves_each_epoch_once_and_known(kind: str, tmp_path: Path) -> None:
    place = started(kind, tmp_path)
    outputs = [staged(place.spec, epoch) for epoch in range(1, 9)]
    for number, output in enumerate(outputs, 1):
        place.sink.publish(place.spec, output, None)
        if number % 3 == 0:
            keeper = OutputPlace("out", made(kind, tmp_path), place.spec)  # another process
            work = keep_output(keeper, NOW, ACTOR)
            assert work is not None
            assert rows_of(kind, tmp_path) == list(range(1, number + 1))
        fresh = started(kind, tmp_path)
        assert fresh.sink.newest_published_epoch(fresh.spec) == number
        fresh.sink.publish_again(fresh.spec, output, None)
        fresh.sink.publish_again(fresh.spec, outputs[0], None)
    assert rows_of(kind, tmp_path) == list(range(1, 9))


@ALL_KINDS
def test_a_plan_changes_nothing(kind: str, tmp_path: Path) -> None:
    place = started(kind, tmp_path)
    for epoch in range(1, 6):
        place.sink.publish(place.spec, staged(place.spec, epoch), None)
    before = tree(tmp_path)
    plan = keep_output(place, NOW, ACTOR, dry_run=True)
    assert tree(tmp_path) == before
    done = keep_output(place, NOW, ACTOR)
    assert plan is not None
    assert done is not None
    assert (done.files, done.inputs, done.outputs, done.expired) == (
        plan.files,
        plan.inputs,
        plan.outputs,
        plan.expired,
    )
    assert done.inputs + done.expired >= 4, "it did something"


def tree(place: Path) -> dict[str, int]:
    return {
        str(p.relative_to(place)): p.stat().st_size
        for p in place.rglob("*")
        if p.is_file() and not p.name.endswith((".db-journal", ".crc"))
    }


def test_a_sink_without_a_place_of_ours_has_no_upkeep_and_a_table_that_is_not_there_has_none(tmp_path: Path) -> None:
    sink = foreach_epoch(lambda df, epoch: None)
    place = OutputPlace("f", sink, sink.spec("orders", "0" * 16, "f", (str(tmp_path), {})))
    assert keep_output(place, NOW, ACTOR, dry_run=True) is None
    assert keep_output(place, NOW, ACTOR) is None
    for kind in ("delta", "iceberg"):
        (tmp_path / kind).mkdir()
        assert keep_output(started(kind, tmp_path / kind), NOW, ACTOR) is None


# --- Delta -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def delta(tmp_path: Path) -> OutputPlace:
    place = started("delta", tmp_path)
    for epoch in range(1, 6):
        place.sink.publish(place.spec, staged(place.spec, epoch), None)
    return place


def test_delta_keeps_the_epochs_of_writers_when_its_log_is_cleaned(delta: OutputPlace, tmp_path: Path) -> None:
    """Also where the table says that transactions are to be forgotten: ours have no time, so none is too old."""
    table = DeltaTable(str(tmp_path / "out"))
    table.alter.set_table_properties(
        {"delta.logRetentionDuration": "interval 0 seconds", "delta.setTransactionRetentionDuration": "interval 0 days"}
    )
    keep_output(delta, NOW, ACTOR)
    table = DeltaTable(str(tmp_path / "out"))
    table.create_checkpoint()
    for file in (tmp_path / "out" / "_delta_log").iterdir():
        os.utime(file, (1, 1))
    table.cleanup_metadata()
    assert len(list((tmp_path / "out" / "_delta_log").glob("*.json"))) == 1
    fresh = started("delta", tmp_path)
    assert fresh.sink.newest_published_epoch(fresh.spec) == 5


def test_vacuum_deletes_nothing_within_the_tables_retention_and_nothing_that_waits_for_its_commit(
    delta: OutputPlace, tmp_path: Path
) -> None:
    """A driver may stand between the names of an epoch's files and their commit, however long."""
    waiting = staged(delta.spec, 6)
    store = delta.spec.store()
    for file in waiting.files:
        store.move(file.staged, file.final)
        os.utime(tmp_path / "out" / file.final, (1, 1))
    for path in (tmp_path / "out").glob("*.parquet"):
        os.utime(path, (1, 1))
    done = keep_output(delta, NOW, ACTOR)
    assert done is not None
    assert (done.inputs, done.outputs, done.removed) == (5, 1, 0)
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 7, "a week is not over"
    started("delta", tmp_path).sink.publish(delta.spec, waiting, None)
    assert rows_of("delta", tmp_path) == [1, 2, 3, 4, 5, 6]


def test_vacuum_deletes_what_the_table_keeps_no_longer(delta: OutputPlace, tmp_path: Path) -> None:
    table = DeltaTable(str(tmp_path / "out"))
    table.alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 0 seconds"})
    done = keep_output(delta, NOW, ACTOR)
    assert done is not None
    assert done.removed == 5
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 1
    assert rows_of("delta", tmp_path) == [1, 2, 3, 4, 5]


def test_an_epoch_that_is_committed_while_files_are_rewritten_is_not_lost(
    delta: OutputPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is second looks again: the job, and the upkeep too."""
    monkeypatch.setattr(delta_log.DeltaLog, "_opened", meanwhile(delta_log.DeltaLog._opened, delta, tmp_path, [2]))
    done = keep_output(OutputPlace("out", made("delta", tmp_path), delta.spec), NOW, ACTOR)
    assert done is not None
    assert done.inputs == 5
    assert rows_of("delta", tmp_path) == [1, 2, 3, 4, 5, 6]
    delta.sink.publish(delta.spec, staged(delta.spec, 7), None)
    assert rows_of("delta", tmp_path) == [1, 2, 3, 4, 5, 6, 7]


def meanwhile(opened: Any, place: OutputPlace, folder: Path, at: list[int]) -> Any:
    looks: list[int] = []

    def look(self: Any) -> Any:
        table = opened(self)
        looks.append(1)
        if len(looks) in at:
            at.clear()
            fresh = started("delta", folder)
            fresh.sink.publish(fresh.spec, staged(fresh.spec, 6), None)
        return table

    return look


def test_files_that_somebody_else_takes_out_each_time_end_the_upkeep_and_nothing_is_lost(
    delta: OutputPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = delta_log.DeltaLog._opened

    def look(self: Any) -> Any:
        table = opened(self)
        write_deltalake(str(tmp_path / "out"), pa.table({"k": ["a"], "n": [0]}), mode="overwrite")
        write_deltalake(str(tmp_path / "out"), pa.table({"k": ["b"], "n": [1]}), mode="append")
        return table

    monkeypatch.setattr(delta_log.DeltaLog, "_opened", look)
    sink = made("delta", tmp_path)
    assert isinstance(sink, DeltaSink)
    sink._log._wait = wait_none()
    with pytest.raises(StoreUnavailable, match="took no commit in 3 attempts"):
        sink.upkeep(NOW, now_ms=0, dry_run=False)
    assert rows_of("delta", tmp_path) == [0, 1]


def test_small_files_are_counted_by_folder() -> None:
    sizes = [("a.parquet", 5), ("b.parquet", 50), ("k=1/a.parquet", 5), ("k=1/b.parquet", 6), ("k=2/a.parquet", 5)]
    assert small_files(sizes, 50) == [[5, 6]]


# --- Iceberg ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def iceberg(tmp_path: Path) -> OutputPlace:
    place = started("iceberg-merge", tmp_path)
    for epoch in (1, 2, 3):
        output = staged(place.spec, epoch)
        place.sink.publish(place.spec, output, None)
        place.sink.settle(place.spec, output)
    task = place.spec.open(1, 4, 0, "attempt")
    rows = [{"k": f"k{n}", "n": 10 * n} for n in (1, 2)]
    task.write(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
    place.sink.publish(place.spec, StagedOutput("out", 4, task.finish().files), None)
    return place


def data_files(place: Path) -> set[str]:
    return {str(p) for p in (place / "warehouse").rglob("*.parquet")}


def table_of(place: Path) -> Any:
    return load_catalog("lake", **lake(place)).load_table("shop.orders")


def test_an_expired_snapshot_takes_the_files_along_that_only_it_had(iceberg: OutputPlace, tmp_path: Path) -> None:
    before = data_files(tmp_path)
    done = keep_output(iceberg, NOW, ACTOR)
    assert done is not None
    needed = {urlsplit(task.file.file_path).path for task in table_of(tmp_path).scan().plan_files()}
    assert data_files(tmp_path) == needed
    assert len(needed) < len(before)
    assert done.expired == 3
    assert len(table_of(tmp_path).snapshots()) == 1
    assert rows_of("iceberg", tmp_path) == [3, 10, 20]
    again = keep_output(iceberg, NOW, ACTOR)
    assert again == OutputWork(place=done.place, files=done.files, bytes=done.bytes)


def test_snapshots_that_are_young_or_have_a_name_stay_with_their_files(iceberg: OutputPlace, tmp_path: Path) -> None:
    first = table_of(tmp_path).snapshots()[1]
    table_of(tmp_path).manage_snapshots().create_tag(first.snapshot_id, "audit").commit()
    young = keep_output(iceberg, OutputUpkeep(history_s=3600), ACTOR)
    assert young is not None
    assert (young.expired, young.removed) == (0, 0)
    keep_output(iceberg, NOW, ACTOR)
    table = table_of(tmp_path)
    assert first.snapshot_id in {s.snapshot_id for s in table.snapshots()}
    assert table.scan(snapshot_id=first.snapshot_id).to_arrow().num_rows == 2
    assert rows_of("iceberg", tmp_path) == [3, 10, 20]


def test_an_epoch_that_is_committed_while_snapshots_expire_is_not_lost(
    iceberg: OutputPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit of the upkeep is refused, and it looks again."""
    from pyiceberg.table.update.snapshot import ExpireSnapshots

    commit, refused = ExpireSnapshots.commit, []

    def slow(self: Any) -> None:
        if not refused:
            refused.append(1)
            fresh = started("iceberg-merge", tmp_path)
            fresh.sink.publish(fresh.spec, staged(fresh.spec, 5), None)
            raise CommitFailedException("somebody was faster")
        commit(self)

    monkeypatch.setattr(ExpireSnapshots, "commit", slow)
    keep_output(iceberg, NOW, ACTOR)
    assert refused
    assert rows_of("iceberg", tmp_path) == [3, 5, 10, 20]
    fresh = started("iceberg-merge", tmp_path)
    assert fresh.sink.newest_published_epoch(fresh.spec) == 5


def test_a_file_that_is_back_in_the_table_is_not_deleted(
    iceberg: OutputPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody goes back to an old snapshot between the look and the deletion."""
    from pyiceberg.table.update.snapshot import ExpireSnapshots

    commit = ExpireSnapshots.commit
    old = table_of(tmp_path).snapshots()[-2]
    paths = [task.file.file_path for task in table_of(tmp_path).scan(snapshot_id=old.snapshot_id).plan_files()]

    def and_back(self: Any) -> None:
        commit(self)
        table_of(tmp_path).add_files(paths, check_duplicate_files=False)

    monkeypatch.setattr(ExpireSnapshots, "commit", and_back)
    keep_output(iceberg, NOW, ACTOR)
    monkeypatch.undo()
    assert {urlsplit(path).path for path in paths} <= data_files(tmp_path)
    assert rows_of("iceberg", tmp_path) == [1, 2, 3, 3, 10, 20]
