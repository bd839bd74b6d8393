"""A Delta table gets each epoch once: beside other writers, after crashes, from drivers that were thought dead."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError
from tenacity import wait_none

from state_runtime.base import faults
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import InvalidConfiguration, InvalidPipeline, MissingFile, StoreUnavailable
from state_runtime.pipeline.sinks import ParquetSink
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.sinks.delta import DeltaSink
from state_runtime.sinks.delta_log import DataFile, DeltaLog, statistics_of
from state_runtime.sinks.merge_rows import last_of_each
from state_runtime.snapshot.manifest import StagedOutput
from stillstate.testing import check_sink

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])
UID = "0123456789abcdef"


def rows_of(place: Path) -> list[dict[str, Any]]:
    if not DeltaTable.is_deltatable(str(place)):
        return []
    return list(DeltaTable(str(place)).to_pyarrow_table().to_pylist())


def sink_of(place: Path, schema: pa.Schema = SCHEMA, uid: str = UID, **how: Any) -> tuple[DeltaSink, SinkSpec]:
    sink = DeltaSink(str(place), **how)
    sink.check(schema, "sink 'out'")
    sink.check_place(sink.layout(schema), (), "sink 'out'")
    return sink, sink.spec("orders", uid, "out", ("", {}))


def staged(spec: SinkSpec, epoch: int, rows: list[dict[str, Any]], schema: pa.Schema = SCHEMA) -> StagedOutput:
    staging = spec.open(1, epoch, 0, "attempt")
    staging.write(pa.RecordBatch.from_pylist(rows, schema=schema))
    return StagedOutput(spec.name, epoch, staging.finish().files)


@pytest.mark.parametrize("on_rollback", ["continue", "replace"])
@pytest.mark.parametrize("merge_on", [None, ["k"]], ids=["append", "merge"])
def test_delta_keeps_the_contract_of_sinks(tmp_path: Path, merge_on: Any, on_rollback: Any) -> None:
    table = tmp_path / "table"

    def made() -> DeltaSink:
        return DeltaSink(str(table), merge_on=merge_on, on_rollback=on_rollback)

    check_sink(made, lambda: rows_of(table), str(tmp_path / "root"))


@pytest.mark.parametrize("on_rollback", ["continue", "replace"])
def test_parquet_keeps_the_contract_of_sinks(tmp_path: Path, on_rollback: Any) -> None:
    """The contract is no stricter than what we had."""
    out = tmp_path / "out"

    def read() -> list[dict[str, Any]]:
        files = list(out.glob("*.parquet")) if out.exists() else []
        return [row for file in files for row in pq.read_table(file).to_pylist()]

    check_sink(lambda: ParquetSink(str(out), on_rollback=on_rollback), read, str(tmp_path / "root"))


def test_the_contract_finds_a_sink_that_forgets_who_writes(tmp_path: Path) -> None:
    """A test that cannot fail protects nothing: one id for all roots, as the epoch alone would be."""

    class Forgets(DeltaSink):
        def spec(self, job_name: str, job_uid: str, name: str, root: Any) -> SinkSpec:
            return super().spec(job_name, "0" * 32, name, root)

    table = tmp_path / "table"
    with pytest.raises(AssertionError, match="a root that was made anew has published nothing here"):
        check_sink(lambda: Forgets(str(table)), lambda: rows_of(table), str(tmp_path / "root"))


class Crash(BaseException):
    """The end of a process."""


@pytest.mark.parametrize("merge_on", [None, ["k"]], ids=["append", "merge"])
@pytest.mark.parametrize("point", ["one-file-published", "delta-moved", "delta-committed"])
def test_a_crash_anywhere_in_publishing_is_repaired_by_the_next_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, merge_on: Any
) -> None:
    sink, spec = sink_of(tmp_path, merge_on=merge_on)
    output = staged(spec, 1, [{"k": "a", "n": 1}])

    def reach(name: str) -> None:
        if name == point:
            raise Crash

    monkeypatch.setattr(faults, "reach", reach)
    crashed = merge_on is None or point == "delta-committed"
    if crashed:
        with pytest.raises(Crash):
            sink.publish(spec, output, None)
    monkeypatch.undo()
    again, spec = sink_of(tmp_path, merge_on=merge_on)
    again.publish_again(spec, output, None)
    assert rows_of(tmp_path) == [{"k": "a", "n": 1}]


def test_other_writers_in_between_cost_an_attempt_and_no_row(tmp_path: Path) -> None:
    """Each commit is made at the version that was looked at; the one that was not is made at the next."""
    sink, spec = sink_of(tmp_path)
    sink.publish(spec, staged(spec, 1, [{"k": "a", "n": 1}]), None)
    log = DeltaLog(str(tmp_path), None, SYSTEM_CLOCK, wait=wait_none())
    sink._log, taken = log, []
    opened = log._opened

    def look() -> Any:
        table = opened()
        if len(taken) < 3:  # somebody else is faster, three times
            taken.append(write_deltalake(str(tmp_path), pa.table({"k": ["x"], "n": [0]}), mode="append"))
        return table

    log._opened = look  # type: ignore[method-assign]
    sink.publish(spec, staged(spec, 2, [{"k": "b", "n": 2}]), None)
    assert sorted(row["k"] for row in rows_of(tmp_path)) == ["a", "b", "x", "x", "x"]


@pytest.mark.parametrize("merge_on", [None, ["n"]], ids=["append", "merge"])
def test_two_drivers_that_commit_at_the_same_moment_make_one_commit(tmp_path: Path, merge_on: Any) -> None:
    """Both have looked, and the table has the epoch of neither. A merge by other columns than these would show both."""
    sink, spec = sink_of(tmp_path, merge_on=merge_on)
    sink.publish(spec, staged(spec, 1, [{"k": "a", "n": 1}]), None)
    output, (other, _) = staged(spec, 2, [{"k": "b", "n": 2}]), sink_of(tmp_path, merge_on=merge_on)
    log = DeltaLog(str(tmp_path), None, SYSTEM_CLOCK, wait=wait_none())
    sink._log, looks = log, []
    opened = log._opened

    def look() -> Any:
        table = opened()
        looks.append(1)
        if len(looks) == 1:
            other.publish(spec, output, None)
        return table

    log._opened = look  # type: ignore[method-assign]
    sink.publish(spec, output, None)
    assert len(looks) == 2, "it has looked again, and an epoch that nobody disturbs takes one look"
    assert sorted(row["k"] for row in rows_of(tmp_path)) == ["a", "b"]
    assert len(DeltaTable(str(tmp_path)).history()) == 3, "the table was made, and two epochs are two commits"


def test_a_table_that_takes_no_commit_says_so_and_keeps_what_is_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, spec = sink_of(tmp_path)
    sink.publish(spec, staged(spec, 1, [{"k": "a", "n": 1}]), None)
    sink._log = DeltaLog(str(tmp_path), None, SYSTEM_CLOCK, wait=wait_none())

    def refuse(*_: Any, **__: Any) -> None:
        raise CommitFailedError("no")

    output = staged(spec, 2, [{"k": "b", "n": 2}])
    monkeypatch.setattr(DeltaTable, "create_write_transaction", refuse)
    with pytest.raises(StoreUnavailable, match=r"took no commit in 30 attempts: no. Nothing is lost"):
        sink.publish(spec, output, None)
    monkeypatch.undo()
    sink.publish_again(spec, output, None)
    assert len(rows_of(tmp_path)) == 2


def test_an_error_that_would_come_again_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried again for a minute, and then by every restart, it would be taken for a store that is away."""
    sink, spec = sink_of(tmp_path)
    sink.publish(spec, staged(spec, 1, [{"k": "a", "n": 1}]), None)
    asked: list[int] = []

    def refuse(*_: Any, **__: Any) -> None:
        asked.append(1)
        raise DeltaError("the table needs a writer feature\nand more")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", refuse)
    with pytest.raises(
        InvalidPipeline, match=r"does not take the rows: the table needs a writer feature. What is staged stays"
    ):
        sink.publish(spec, staged(spec, 2, [{"k": "b", "n": 2}]), None)
    assert len(asked) == 1


def test_a_store_that_is_away_is_tried_again_whatever_the_library_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, spec = sink_of(tmp_path)
    sink.publish(spec, staged(spec, 1, [{"k": "a", "n": 1}]), None)
    sink._log = DeltaLog(str(tmp_path), None, SYSTEM_CLOCK, wait=wait_none())
    commit, away = DeltaTable.create_write_transaction, ["Kernel error: Generic S3 error: error sending request"]

    def once(self: Any, *given: Any, **named: Any) -> None:
        if away:
            raise DeltaError(away.pop())
        commit(self, *given, **named)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", once)
    sink.publish(spec, staged(spec, 2, [{"k": "b", "n": 2}]), None)
    assert len(rows_of(tmp_path)) == 2


@pytest.mark.parametrize("kind", [pa.duration("us"), pa.null(), pa.time64("us")])
def test_types_that_a_table_cannot_have_are_refused_when_the_job_is_built(tmp_path: Path, kind: pa.DataType) -> None:
    with pytest.raises(InvalidPipeline, match=r"'odd'.* cast it in a transform"):
        sink_of(tmp_path, pa.schema([("k", pa.string()), ("odd", kind)]))


def test_an_unknown_outcome_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit was made, and its answer was lost."""
    sink, spec = sink_of(tmp_path)
    sink.publish(spec, staged(spec, 1, [{"k": "a", "n": 1}]), None)
    sink._log = DeltaLog(str(tmp_path), None, SYSTEM_CLOCK, wait=wait_none())
    commit, lost = DeltaTable.create_write_transaction, []

    def made_and_lost(self: Any, *given: Any, **named: Any) -> None:
        commit(self, *given, **named)
        lost.append(1)
        raise OSError("connection reset")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", made_and_lost)
    sink.publish(spec, staged(spec, 2, [{"k": "b", "n": 2}]), None)
    assert (len(lost), len(rows_of(tmp_path))) == (1, 2)


def test_rows_are_merged_and_removed_by_key(tmp_path: Path) -> None:
    """The last one of an epoch counts; null is a key like others; what is marked goes, also if it never was there."""
    schema = pa.schema([("k", pa.string()), ("n", pa.int64()), ("gone", pa.bool_())])
    sink, spec = sink_of(tmp_path, schema, merge_on=["k"], remove_where="gone")

    def epoch(number: int, *rows: tuple[Any, int, Any]) -> None:
        given = [{"k": k, "n": n, "gone": gone} for k, n, gone in rows]
        output = staged(spec, number, given, schema)
        sink.publish(spec, output, None)
        sink.settle(spec, output)

    epoch(1, ("a", 1, False), ("b", 1, None), (None, 1, False), ("a", 2, False))
    assert sorted(map(str, rows_of(tmp_path))) == sorted(
        map(str, [{"k": "a", "n": 2}, {"k": "b", "n": 1}, {"k": None, "n": 1}])
    )
    epoch(2, ("a", 0, True), ("never", 0, True), (None, 7, False), ("c", 0, True), ("c", 3, False))
    assert sorted(map(str, rows_of(tmp_path))) == sorted(
        map(str, [{"k": "b", "n": 1}, {"k": None, "n": 7}, {"k": "c", "n": 3}])
    )
    assert not list((tmp_path / "_stillstate/staging").rglob("*.parquet")), "merged rows are not kept twice"


def test_partitions_and_statistics_are_those_of_delta(tmp_path: Path) -> None:
    """Values with signs, and none; readers pass over files by partition, and by the least and greatest value."""
    schema = pa.schema(
        [("day", pa.date32()), ("shop", pa.string()), ("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))]
    )
    sink, spec = sink_of(tmp_path, schema, partition_by=["day", "shop"])
    at = dt.datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=dt.UTC)
    rows = [
        {"day": dt.date(2026, 1, 1), "shop": shop, "n": n, "at": at} for n, shop in enumerate(["a b/ü=%", None, "c"])
    ]
    sink.publish(spec, staged(spec, 1, rows, schema), None)
    found = DeltaTable(str(tmp_path)).to_pyarrow_table().to_pylist()
    assert sorted(found, key=lambda row: row["n"]) == rows
    narrow = DeltaTable(str(tmp_path)).to_pyarrow_table(filters=[("shop", "=", "a b/ü=%")])
    assert narrow.column("n").to_pylist() == [0]
    actions = pa.table(DeltaTable(str(tmp_path)).get_add_actions(flatten=True)).to_pylist()
    assert [(a["num_records"], a["min.n"], a["max.n"], a["null_count.n"]) for a in actions].count((1, 1, 1, 0)) == 1
    assert all(a["min.at"] == at for a in actions)


def test_statistics_leave_out_what_has_no_form_there(tmp_path: Path) -> None:
    table = pa.table(
        {"f": [1.5, float("nan")], "long": ["x" * 40, "y"], "b": [True, False], "s": [{"x": 1}, None], "t": ["a", None]}
    )
    pq.write_table(table, tmp_path / "f.parquet")
    found = json.loads(statistics_of(pq.read_metadata(tmp_path / "f.parquet")))
    assert found["numRecords"] == 2
    assert (found["minValues"].get("t"), found["nullCount"]["t"]) == ("a", 1)
    assert not {"b", "long", "s"} & set(found["maxValues"])


@pytest.mark.parametrize("new_columns", ["refuse", "add"])
def test_columns_that_the_table_lacks_are_refused_or_added(tmp_path: Path, new_columns: Any) -> None:
    sink, spec = sink_of(tmp_path)
    sink.publish(spec, staged(spec, 1, [{"k": "a", "n": 1}]), None)
    wider = SCHEMA.append(pa.field("more", pa.string()))
    if new_columns == "refuse":
        with pytest.raises(
            InvalidPipeline, match='no column more; let the sink add what is missing with new_columns="add"'
        ):
            sink_of(tmp_path, wider)
        return
    sink, spec = sink_of(tmp_path, wider, new_columns="add")
    sink.publish(spec, staged(spec, 2, [{"k": "b", "n": 2, "more": "m"}], wider), None)
    assert sorted(rows_of(tmp_path), key=str) == [{"k": "a", "n": 1, "more": None}, {"k": "b", "n": 2, "more": "m"}]


def test_what_does_not_fit_the_table_is_refused_before_a_row(tmp_path: Path) -> None:
    table = tmp_path / "table"
    sink, spec = sink_of(table)
    sink.publish(spec, staged(spec, 1, [{"k": "a", "n": 1}]), None)
    other = pa.schema([("k", pa.string()), ("n", pa.string())])
    with pytest.raises(InvalidPipeline, match="column n is int64 there and string in the new ones"):
        sink_of(table, other)
    with pytest.raises(InvalidPipeline, match="partitioned by no column, and the new ones by k"):
        sink_of(table, partition_by=["k"])
    with pytest.raises(InvalidPipeline, match="there is no column 'id'"):
        sink_of(table, merge_on=["id"])
    with pytest.raises(InvalidPipeline, match="remove_where needs a boolean column, and 'n' is int64"):
        sink_of(table, merge_on=["k"], remove_where="n")
    with pytest.raises(InvalidConfiguration, match="needs merge_on"):
        DeltaSink(str(table), remove_where="n")
    (tmp_path / "files").mkdir()
    pq.write_table(pa.table({"k": ["a"]}), tmp_path / "files" / "part-0.parquet")
    with pytest.raises(InvalidPipeline, match="has Parquet files and is no Delta table"):
        sink_of(tmp_path / "files")


def test_a_staged_file_that_was_lost_is_named(tmp_path: Path) -> None:
    for merge_on in (None, ["k"]):
        sink, spec = sink_of(tmp_path, merge_on=merge_on)
        output = staged(spec, 5, [{"k": "a", "n": 1}])
        (tmp_path / output.files[0].staged).unlink()
        with pytest.raises(MissingFile, match="does not have epoch 5"):
            sink.publish(spec, output, None)


def test_the_newest_epoch_is_the_tables_word(tmp_path: Path) -> None:
    """A root that was put back from a backup goes on above it."""
    sink, spec = sink_of(tmp_path)
    assert sink.newest_published_epoch(spec) == 0
    sink.publish(spec, staged(spec, 41, [{"k": "a", "n": 1}]), None)
    fresh, spec = sink_of(tmp_path)
    assert fresh.newest_published_epoch(spec) == 41
    other, spec = sink_of(tmp_path, uid="fedcba9876543210")
    assert other.newest_published_epoch(spec) == 0


def test_the_last_of_equal_keys_counts() -> None:
    rows = pa.table({"k": ["a", "b", "a", None, None], "n": [1, 2, 3, 4, 5]})
    assert last_of_each(rows, ["k"]).to_pylist() == [{"k": "b", "n": 2}, {"k": "a", "n": 3}, {"k": None, "n": 5}]
    assert last_of_each(rows.slice(0, 0), ["k"]).num_rows == 0


def test_partition_values_come_from_folders() -> None:
    file = DataFile("day=2026-01-01/shop=__HIVE_DEFAULT_PARTITION__/part-1.parquet", 1, "{}")
    assert file.partition_values == {"day": "2026-01-01", "shop": None}


def test_commits_of_others_with_our_words_do_not_count(tmp_path: Path) -> None:
    """Only the application transaction says that an epoch is in; the custom metadata of a commit is anybody's."""
    sink, spec = sink_of(tmp_path)
    sink.publish(spec, staged(spec, 1, [{"k": "a", "n": 1}]), None)
    properties = CommitProperties(custom_metadata={"txnAppId": "stillstate/orders-01234567-out", "txnVersion": "9"})
    write_deltalake(str(tmp_path), pa.table({"k": ["x"], "n": [0]}), mode="append", commit_properties=properties)
    assert sink.newest_published_epoch(spec) == 1


def test_keys_of_several_columns_are_merged_one_by_one_with_nulls(tmp_path: Path) -> None:
    """Of different types, each of them null somewhere: two columns are equal in themselves, and not as one condition."""
    schema = pa.schema([("a", pa.int64()), ("b", pa.bool_()), ("n", pa.int64())])
    sink, spec = sink_of(tmp_path, schema, merge_on=["a", "b"])
    keys = [(1, True), (1, False), (1, None), (None, True), (None, None)]
    for epoch in (1, 2):
        rows = [{"a": a, "b": b, "n": epoch} for a, b in keys[epoch - 1 :]]
        sink.publish(spec, staged(spec, epoch, rows, schema), None)
    found = {(row["a"], row["b"]): row["n"] for row in rows_of(tmp_path)}
    assert found == {key: 1 if key == (1, True) else 2 for key in keys}
    assert len(rows_of(tmp_path)) == len(keys)
