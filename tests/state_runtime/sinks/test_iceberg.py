"""An Iceberg table gets each epoch once: beside other writers, after crashes, from drivers that were thought dead."""

from __future__ import annotations

import datetime as dt
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException, NoSuchTableError
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import LongType, NestedField, StringType
from tenacity import wait_none

from state_runtime.base import faults
from state_runtime.base.errors import InvalidConfiguration, InvalidPipeline, MissingFile, StoreUnavailable
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.sinks.iceberg import IcebergSink
from state_runtime.sinks.iceberg_catalog import CatalogAddress
from state_runtime.snapshot.manifest import StagedOutput
from state_runtime.store import Created
from stillstate.testing import check_sink

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])
UID = "0123456789abcdef"
TABLE = "shop.orders"


def options(place: Path) -> dict[str, str]:
    return {"type": "sql", "uri": f"sqlite:///{place}/catalog.db", "warehouse": f"file://{place}/warehouse"}


def catalog(place: Path) -> Catalog:
    return load_catalog("lake", **options(place))


def table_of(place: Path) -> Table:
    return catalog(place).load_table(TABLE)


def rows_of(place: Path) -> list[dict[str, Any]]:
    try:
        return list(table_of(place).scan().to_arrow().to_pylist())
    except NoSuchTableError:
        return []


def made(place: Path, **how: Any) -> IcebergSink:
    sink = IcebergSink(TABLE, catalog="lake", catalog_options=options(place), **how)
    sink._log._wait = wait_none()
    return sink


def sink_of(place: Path, schema: pa.Schema = SCHEMA, uid: str = UID, **how: Any) -> tuple[IcebergSink, SinkSpec]:
    sink = made(place, **how)
    sink.check(schema, "sink 'out'")
    sink.check_place(sink.layout(schema), (), "sink 'out'")
    return sink, sink.spec("orders", uid, "out", (str(place / "root"), {}))


def staged(spec: SinkSpec, epoch: int, rows: list[dict[str, Any]], schema: pa.Schema = SCHEMA) -> StagedOutput:
    staging = spec.open(1, epoch, 0, "attempt")
    staging.write(pa.RecordBatch.from_pylist(rows, schema=schema))
    return StagedOutput(spec.name, epoch, staging.finish().files)


BOTH = pytest.mark.parametrize("merge_on", [None, ["k"]], ids=["append", "merge"])


@BOTH
def test_iceberg_keeps_the_contract_of_sinks(tmp_path: Path, merge_on: Any) -> None:
    check_sink(lambda: made(tmp_path, merge_on=merge_on), lambda: rows_of(tmp_path), str(tmp_path / "root"))


class Crash(BaseException):
    """The end of a process."""


@BOTH
@pytest.mark.parametrize("point", ["iceberg-written", "iceberg-committed"])
def test_a_crash_anywhere_in_publishing_is_repaired_by_the_next_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, merge_on: Any
) -> None:
    sink, spec = sink_of(tmp_path, merge_on=merge_on)
    output = staged(spec, 1, [{"k": "a", "n": 1}])

    def reach(name: str) -> None:
        if name == point:
            raise Crash

    monkeypatch.setattr(faults, "reach", reach)
    with pytest.raises(Crash):
        sink.publish(spec, output, None)
    monkeypatch.undo()
    assert len(rows_of(tmp_path)) == (1 if point == "iceberg-committed" else 0)
    again, spec = sink_of(tmp_path, merge_on=merge_on)
    again.publish_again(spec, output, None)
    assert rows_of(tmp_path) == [{"k": "a", "n": 1}]
    assert len(table_of(tmp_path).snapshots()) == 1


@BOTH
def test_other_writers_in_between_cost_an_attempt_and_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merge_on: Any
) -> None:
    """Each commit is made at the snapshot that was looked at; the one that was not is made at the next. So a merge sees
    the rows that came between."""
    sink, spec = sink_of(tmp_path, merge_on=merge_on)
    sink.publish(spec, staged(spec, 1, [{"k": "a", "n": 1}]), None)
    between: list[int] = []

    def reach(name: str) -> None:
        if name == "iceberg-written" and len(between) < 3:  # somebody else is faster, three times
            between.append(1)
            table_of(tmp_path).append(pa.table({"k": ["b"], "n": [0]}))

    monkeypatch.setattr(faults, "reach", reach)
    sink.publish(spec, staged(spec, 2, [{"k": "b", "n": 2}]), None)
    found = sorted((row["k"], row["n"]) for row in rows_of(tmp_path))
    assert found == [("a", 1), *([] if merge_on else [("b", 0)] * 3), ("b", 2)]


@pytest.mark.parametrize("merge_on", [None, ["n"]], ids=["append", "merge"])
def test_two_drivers_that_commit_at_the_same_moment_make_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merge_on: Any
) -> None:
    """Both have looked and written, and the table has the epoch of neither. By itself pyiceberg would put the second
    commit on top of the first one, also where the table's own property asks for it."""
    sink, spec = sink_of(tmp_path, merge_on=merge_on)
    sink.publish(spec, staged(spec, 1, [{"k": "a", "n": 1}]), None)
    with table_of(tmp_path).transaction() as transaction:
        transaction.set_properties({"commit.retry.num-retries": "7", "commit.retry.min-wait-ms": "1"})
    output, (other, _) = staged(spec, 2, [{"k": "b", "n": 2}]), sink_of(tmp_path, merge_on=merge_on)
    seen: list[int] = []

    def reach(name: str) -> None:
        if name == "iceberg-written":
            seen.append(1)
            if len(seen) == 1:
                other.publish(spec, output, None)

    monkeypatch.setattr(faults, "reach", reach)
    sink.publish(spec, output, None)
    assert len(seen) == 2, "it has looked again, and has not written again"
    assert sorted(row["k"] for row in rows_of(tmp_path)) == ["a", "b"]
    table = table_of(tmp_path)
    assert len(table.snapshots()) == 2
    assert table.properties["commit.retry.num-retries"] == "7", "the table's own settings stay"


def test_rows_are_written_once_however_many_attempts_a_commit_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, spec = sink_of(tmp_path)
    sink.publish(spec, staged(spec, 1, [{"k": "a", "n": 1}]), None)
    before, refused = len(list(tmp_path.rglob("warehouse/**/*.parquet"))), [1, 2, 3]
    commit = Table._do_commit

    def refuse(self: Any, *given: Any, **named: Any) -> None:
        if refused:
            refused.pop()
            raise CommitFailedException("somebody was faster")
        commit(self, *given, **named)

    monkeypatch.setattr(Table, "_do_commit", refuse)
    sink.publish(spec, staged(spec, 2, [{"k": "b", "n": 2}]), None)
    assert len(rows_of(tmp_path)) == 2
    assert len(list(tmp_path.rglob("warehouse/**/*.parquet"))) == before + 1


@BOTH
@pytest.mark.parametrize("error", [CommitStateUnknownException("gateway"), ConnectionError("reset")])
def test_an_unknown_outcome_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, merge_on: Any
) -> None:
    """The commit was made, and its answer was lost."""
    sink, spec = sink_of(tmp_path, merge_on=merge_on)
    sink.publish(spec, staged(spec, 1, [{"k": "a", "n": 1}]), None)
    commit, lost = Table._do_commit, []

    def made_and_lost(self: Any, *given: Any, **named: Any) -> None:
        commit(self, *given, **named)
        lost.append(1)
        raise error

    monkeypatch.setattr(Table, "_do_commit", made_and_lost)
    sink.publish(spec, staged(spec, 2, [{"k": "b", "n": 2}]), None)
    assert (len(lost), len(rows_of(tmp_path))) == (1, 2)


def test_a_table_that_takes_no_commit_says_so_and_keeps_what_is_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, spec = sink_of(tmp_path)
    sink.publish(spec, staged(spec, 1, [{"k": "a", "n": 1}]), None)
    output = staged(spec, 2, [{"k": "b", "n": 2}])

    def refuse(*_: Any, **__: Any) -> None:
        raise CommitFailedException("no")

    monkeypatch.setattr(Table, "_do_commit", refuse)
    with pytest.raises(StoreUnavailable, match=r"took no commit in 30 attempts: CommitFailedException: no. Nothing is"):
        sink.publish(spec, output, None)
    monkeypatch.undo()
    sink.publish_again(spec, output, None)
    assert len(rows_of(tmp_path)) == 2


def test_an_error_that_would_come_again_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, spec = sink_of(tmp_path)
    sink.publish(spec, staged(spec, 1, [{"k": "a", "n": 1}]), None)
    asked: list[int] = []

    def refuse(*_: Any, **__: Any) -> None:
        asked.append(1)
        raise NotImplementedError("a table of version 9\nand more")

    monkeypatch.setattr(Table, "_do_commit", refuse)
    with pytest.raises(
        InvalidPipeline, match=r"does not take the rows: NotImplementedError: a table of version 9. What"
    ):
        sink.publish(spec, staged(spec, 2, [{"k": "b", "n": 2}]), None)
    assert len(asked) == 1


def test_the_epoch_is_known_when_its_snapshot_has_expired(tmp_path: Path) -> None:
    sink, spec = sink_of(tmp_path)
    output = staged(spec, 1, [{"k": "a", "n": 1}])
    sink.publish(spec, output, None)
    table = table_of(tmp_path)
    first = table.current_snapshot()
    table.append(pa.table({"k": ["x"], "n": [0]}))
    assert first is not None
    table.maintenance.expire_snapshots().by_id(first.snapshot_id).commit()
    assert len(table_of(tmp_path).snapshots()) == 1
    again, spec = sink_of(tmp_path)
    assert again.newest_published_epoch(spec) == 1
    again.publish_again(spec, output, None)
    assert sorted(row["k"] for row in rows_of(tmp_path)) == ["a", "x"]


def test_the_newest_epoch_is_the_tables_word(tmp_path: Path) -> None:
    """A root that was put back from a backup goes on above it."""
    sink, spec = sink_of(tmp_path)
    assert sink.newest_published_epoch(spec) == 0
    sink.publish(spec, staged(spec, 41, [{"k": "a", "n": 1}]), None)
    fresh, spec = sink_of(tmp_path)
    assert fresh.newest_published_epoch(spec) == 41
    other, spec = sink_of(tmp_path, uid="fedcba9876543210")
    assert other.newest_published_epoch(spec) == 0


def test_rows_are_merged_and_removed_by_key(tmp_path: Path) -> None:
    """The last one of an epoch counts; null is a key like others; what is marked goes, also if it never was there."""
    schema = pa.schema([("k", pa.string()), ("n", pa.int64()), ("gone", pa.bool_())])
    sink, spec = sink_of(tmp_path, schema, merge_on=["k"], remove_where="gone")

    def epoch(number: int, *rows: tuple[Any, int, Any]) -> None:
        output = staged(spec, number, [{"k": k, "n": n, "gone": gone} for k, n, gone in rows], schema)
        sink.publish(spec, output, None)
        sink.settle(spec, output)

    def found() -> list[tuple[Any, int]]:
        return sorted(((row["k"], row["n"]) for row in rows_of(tmp_path)), key=str)

    epoch(1, ("a", 1, False), ("b", 1, None), (None, 1, False), ("a", 2, False))
    assert found() == sorted([("a", 2), ("b", 1), (None, 1)], key=str)
    epoch(2, ("a", 0, True), ("never", 0, True), (None, 7, False), ("c", 0, True), ("c", 3, False))
    assert found() == sorted([("b", 1), (None, 7), ("c", 3)], key=str)
    epoch(3, ("never", 0, True))
    assert sink.newest_published_epoch(spec) == 3, "an epoch that changes no row is in as well"
    epoch(4, ("b", 0, True), ("c", 0, True), (None, 0, True))
    assert found() == []
    assert not list((tmp_path / "root").rglob("*.parquet")), "what is in the table is not kept twice"


def test_keys_of_several_columns_are_merged_one_by_one_with_nulls(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.float64()), ("b", pa.bool_()), ("n", pa.int64())])
    sink, spec = sink_of(tmp_path, schema, merge_on=["a", "b"])
    keys = [(1.0, True), (1.0, False), (1.0, None), (None, True), (None, None)]
    for epoch in (1, 2):
        rows = [{"a": a, "b": b, "n": epoch} for a, b in keys[epoch - 1 :]]
        sink.publish(spec, staged(spec, epoch, rows, schema), None)
    found = {(row["a"], row["b"]): row["n"] for row in rows_of(tmp_path)}
    assert found == {key: 1 if key == (1.0, True) else 2 for key in keys}
    assert len(rows_of(tmp_path)) == len(keys)


def test_a_merge_leaves_files_without_its_keys_as_they_are(tmp_path: Path) -> None:
    """In partitions as well, whose rows may move from one to the other."""
    schema = pa.schema([("k", pa.int64()), ("day", pa.date32())])
    sink, spec = sink_of(tmp_path, schema, merge_on=["k"], partition_by=["day"])
    days = [dt.date(2026, 1, day) for day in (1, 2, 3)]
    for epoch, day in enumerate(days, 1):
        rows = [{"k": 10 * epoch + n, "day": day} for n in range(3)]
        sink.publish(spec, staged(spec, epoch, rows, schema), None)
    before = {task.file.file_path for task in table_of(tmp_path).scan().plan_files()}
    sink.publish(spec, staged(spec, 4, [{"k": 20, "day": days[2]}], schema), None)
    after = {task.file.file_path for task in table_of(tmp_path).scan().plan_files()}
    assert (len(before), len(before & after)) == (3, 2)
    assert {(row["k"], row["day"]) for row in rows_of(tmp_path)} == {
        (k, days[2] if k == 20 else days[k // 10 - 1]) for k in (10, 11, 12, 20, 21, 22, 30, 31, 32)
    }
    assert len(rows_of(tmp_path)) == 9


def test_a_null_key_is_found_in_a_file_that_has_no_other(tmp_path: Path) -> None:
    """Such a file has no least and no greatest key."""
    sink, spec = sink_of(tmp_path, merge_on=["k"])
    sink.publish(spec, staged(spec, 1, [{"k": None, "n": 1}]), None)
    sink.publish(spec, staged(spec, 2, [{"k": None, "n": 2}, {"k": "z", "n": 2}]), None)
    assert sorted(rows_of(tmp_path), key=str) == [{"k": "z", "n": 2}, {"k": None, "n": 2}]


def test_two_drivers_that_both_make_the_table_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have looked, and there is none."""
    (sink, spec), (other, _) = sink_of(tmp_path), sink_of(tmp_path)
    output, first = staged(spec, 1, [{"k": "a", "n": 1}]), [1]
    make = sink._log._make

    def late(*given: Any) -> None:
        if first:
            exists = sink._log._catalog.namespace_exists

            def look(namespace: Any) -> bool:
                if first:
                    first.pop()
                    other.publish(spec, output, None)
                return bool(exists(namespace))

            sink._log._catalog.namespace_exists = look
        make(*given)

    monkeypatch.setattr(sink._log, "_make", late)
    sink.publish(spec, output, None)
    assert (first, rows_of(tmp_path)) == ([], [{"k": "a", "n": 1}])


VALUES: list[tuple[pa.DataType, Any]] = [
    (pa.bool_(), True),
    (pa.int8(), -3),
    (pa.int16(), 300),
    (pa.int32(), 1 << 30),
    (pa.float32(), 0.5),
    (pa.date32(), dt.date(1, 1, 1)),
    (pa.timestamp("us"), dt.datetime(2026, 1, 2, 3, 4, 5, 678)),  # noqa: DTZ001
    (pa.timestamp("us", "Europe/Berlin"), dt.datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=dt.UTC)),
    (pa.binary(), b"\x00\xff"),
    (pa.decimal128(38, 10), Decimal("1.5000000000")),
    (pa.list_(pa.int16()), [1, None]),
    (pa.map_(pa.string(), pa.int32()), [("a", 1)]),
    (pa.struct([("x", pa.int8()), ("y", pa.list_(pa.string()))]), {"x": 1, "y": ["z"]}),
]


@BOTH
def test_each_type_of_a_stream_comes_back_and_fits_the_table_that_was_made(tmp_path: Path, merge_on: Any) -> None:
    schema = pa.schema([("k", pa.string()), *((f"c{n}", kind) for n, (kind, _) in enumerate(VALUES))])
    full = {"k": "full", **{f"c{n}": value for n, (_, value) in enumerate(VALUES)}}
    for epoch in (1, 2):
        sink, spec = sink_of(tmp_path, schema, merge_on=merge_on)
        rows = [{**full, "k": f"full{epoch}"}, {"k": f"null{epoch}"}]
        sink.publish(spec, staged(spec, epoch, rows, schema), None)
    found = {row["k"]: row for row in rows_of(tmp_path)}
    assert len(found) == 4
    assert found["full1"] == {**full, "k": "full1"}
    assert found["null2"] == {"k": "null2", **{f"c{n}": None for n in range(len(VALUES))}}


@pytest.mark.parametrize(
    "kind", [pa.duration("us"), pa.null(), pa.uint64(), pa.timestamp("ns"), pa.list_(pa.duration("s")), pa.struct([])]
)
def test_types_that_a_table_cannot_have_are_refused_when_the_job_is_built(tmp_path: Path, kind: pa.DataType) -> None:
    with pytest.raises(InvalidPipeline, match=r"cannot have 'odd.* cast it in a transform"):
        sink_of(tmp_path, pa.schema([("k", pa.string()), ("odd", kind)]))


@pytest.mark.parametrize("new_columns", ["refuse", "add"])
def test_columns_that_the_table_lacks_are_refused_or_added(tmp_path: Path, new_columns: Any) -> None:
    sink, spec = sink_of(tmp_path)
    sink.publish(spec, staged(spec, 1, [{"k": "a", "n": 1}]), None)
    wider = SCHEMA.append(pa.field("more", pa.string()))
    if new_columns == "refuse":
        with pytest.raises(
            InvalidPipeline, match='no column more; let the sink add what is missing with new_columns="'
        ):
            sink_of(tmp_path, wider)
        return
    sink, spec = sink_of(tmp_path, wider, new_columns="add")
    sink.publish(spec, staged(spec, 2, [{"k": "b", "n": 2, "more": "m"}], wider), None)
    assert sorted(rows_of(tmp_path), key=str) == [{"k": "a", "n": 1, "more": None}, {"k": "b", "n": 2, "more": "m"}]
    narrow, spec = sink_of(tmp_path)
    narrow.publish(spec, staged(spec, 3, [{"k": "c", "n": 3}]), None)
    assert {"k": "c", "n": 3, "more": None} in rows_of(tmp_path)


def test_what_does_not_fit_the_table_is_refused_before_a_row(tmp_path: Path) -> None:
    sink, spec = sink_of(tmp_path)
    sink.publish(spec, staged(spec, 1, [{"k": "a", "n": 1}]), None)
    with pytest.raises(InvalidPipeline, match="column n is int64 there and string in the new ones"):
        sink_of(tmp_path, pa.schema([("k", pa.string()), ("n", pa.string())]))
    with pytest.raises(InvalidPipeline, match="partitioned by no column, and the new ones by k"):
        sink_of(tmp_path, partition_by=["k"])
    with pytest.raises(InvalidPipeline, match="there is no column 'id'"):
        sink_of(tmp_path, merge_on=["id"])
    with pytest.raises(InvalidPipeline, match="there is no column 'id' to partition by"):
        sink_of(tmp_path, partition_by=["id"])
    with pytest.raises(InvalidPipeline, match="keys and partitions are plain values"):
        sink_of(tmp_path, pa.schema([("k", pa.list_(pa.string()))]), merge_on=["k"])
    with pytest.raises(InvalidPipeline, match="remove_where needs a boolean column, and 'n' is int64"):
        sink_of(tmp_path, merge_on=["k"], remove_where="n")
    with pytest.raises(InvalidPipeline, match="the rows have a column 'n', and the sink adds one of that name"):
        sink_of(tmp_path, epoch_column="n")
    lake = catalog(tmp_path)
    lake.drop_table(TABLE)
    lake.create_table(
        TABLE, Schema(NestedField(1, "k", StringType(), required=True), NestedField(2, "n", LongType(), required=False))
    )
    with pytest.raises(InvalidPipeline, match="column k takes no null there"):
        sink_of(tmp_path)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"table": "orders"}, "must be namespace.table"),
        ({"table": "shop..orders"}, "must be namespace.table"),
        ({"catalog": ""}, "needs a catalog"),
        ({"new_columns": "drop"}, "must be refuse or add"),
        ({"remove_where": "n"}, "needs merge_on"),
        ({"remove_where": "k", "merge_on": ["k"]}, "is no key"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(how: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfiguration, match=said):
        IcebergSink(**{"table": TABLE, "catalog": "lake", **how})


@BOTH
def test_a_staged_file_that_was_lost_is_named(tmp_path: Path, merge_on: Any) -> None:
    sink, spec = sink_of(tmp_path, merge_on=merge_on)
    output = staged(spec, 5, [{"k": "a", "n": 1}])
    (tmp_path / "root" / output.files[0].staged).unlink()
    with pytest.raises(MissingFile, match="does not have epoch 5"):
        sink.publish(spec, output, None)


def test_of_two_that_claim_a_table_at_the_same_moment_one_owns_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have looked, and there is no owner: the documents of owners are made once, as those of a folder."""
    (mine, _), (other, _) = sink_of(tmp_path), sink_of(tmp_path)
    mine._make_table()
    assert mine._log.list_names("owners/a") == []
    looked: list[Created] = []
    needed = mine._log._needed

    def look() -> Any:
        table = needed()
        if not looked:
            looked.append(other._log.create("owners/a/1.json", b"{2}"))
        return table

    monkeypatch.setattr(mine._log, "_needed", look)
    assert mine._log.create("owners/a/1.json", b"{1}") is Created.LOST
    assert looked == [Created.MINE]
    assert mine._log.read("owners/a/1.json", 100) == b"{2}"
    assert mine._log.list_names("owners/a") == ["1.json"]
    with pytest.raises(FileNotFoundError):
        mine._log.read("owners/a/2.json", 100)


def test_no_secret_of_a_catalog_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAKE_TOKEN", "s3cr3t-token")
    secret = {"uri": "postgresql://me:pa55@nowhere/db", "s3.secret-access-key": "hush-hush"}
    address = CatalogAddress("lake", secret, {"token": "LAKE_TOKEN"})
    said = address.redact("s3cr3t-token hush-hush postgresql://me:pa55@nowhere/db")
    assert said == "*** *** postgresql://me:***@nowhere/db"
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(address)
    sink, spec = sink_of(tmp_path, options_env={"token": "LAKE_TOKEN"})
    assert "s3cr3t" not in repr(sink) + repr(vars(sink)) + repr(address) + repr(spec) + pickle.dumps(spec).decode(
        "latin1"
    )

    def refuse(*_: Any, **__: Any) -> None:
        raise CommitFailedException("refused for s3cr3t-token")

    monkeypatch.setattr(Table, "_do_commit", refuse)
    with pytest.raises(StoreUnavailable, match=r"refused for \*\*\*") as caught:
        sink.publish(spec, staged(spec, 1, [{"k": "a", "n": 1}]), None)
    assert caught.value.__suppress_context__


def test_a_catalog_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAKE_TOKEN", raising=False)
    with pytest.raises(InvalidConfiguration, match="catalog 'lake': the environment variable LAKE_TOKEN is not set"):
        CatalogAddress("lake", {}, {"token": "LAKE_TOKEN"}).load()
    with pytest.raises(InvalidConfiguration, match=r"the catalog 'nowhere' cannot be opened: .*catalog_options"):
        CatalogAddress("nowhere", {"type": "odd"}, None).load()
