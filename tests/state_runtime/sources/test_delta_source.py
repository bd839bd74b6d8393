"""The source on real tables, without Spark: what a batch is planned as, and what its tasks read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from tenacity import wait_none

from state_runtime.base.errors import (
    CorruptData,
    InvalidConfiguration,
    InvalidData,
    InvalidPipeline,
    StillstateError,
    Unavailable,
)
from state_runtime.sources import delta as delta_source
from state_runtime.sources.delta import DeltaDataSource, _log_of
from state_runtime.sources.delta_commits import (
    Metadata,
    Protocol,
    TableFile,
    check_columns,
    check_files,
    check_readable,
    parse_commit,
)
from state_runtime.sources.delta_position import DeltaPosition
from state_runtime.sources.delta_table import TableLog

CHANGE_DATA = {"delta.enableChangeDataFeed": "true"}


class Reading:
    """What Spark does with the source: plans batches, and has their parts read."""

    def __init__(self, table: Path, **how: Any) -> None:
        config = dict(delta_source(str(table), **how)._config)
        opened = _log_of(config).opened()
        config |= {"schema": opened.metadata.schema, "partition_by": list(opened.metadata.partition_by)}
        self.source = DeltaDataSource({"config": json.dumps(config)})
        self.reader: Any = self.source.streamReader(None)

    def begin(self) -> Any:
        return json.loads(json.dumps(self.reader.initialOffset()))

    def batch(self, start: Any) -> tuple[Any, list[dict[str, Any]]]:
        """The end of the next batch, and its rows."""
        end = json.loads(json.dumps(self.reader.latestOffset(start, self.reader.getDefaultReadLimit())))
        return end, self.rows(start, end)

    def rows(self, start: Any, end: Any) -> list[dict[str, Any]]:
        parts = self.reader.partitions(start, end)
        return [row for part in parts for batch in self.reader.read(part) for row in batch.to_pylist()]

    def all(self, position: Any) -> tuple[Any, list[list[dict[str, Any]]]]:
        batches: list[list[dict[str, Any]]] = []
        while True:
            end, rows = self.batch(position)
            if end == position:
                return position, batches
            position = end
            batches.append(rows)


def add(table: Path, ids: range, **how: Any) -> None:
    write_deltalake(str(table), pa.table({"id": pa.array(list(ids), pa.int64())}), mode="append", **how)


def flat(batches: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [row for rows in batches for row in rows]


def ids(rows: list[dict[str, Any]]) -> list[int]:
    return sorted(row["id"] for row in rows)


def test_each_row_comes_once_over_batches_that_end_within_the_table_and_within_versions(tmp_path: Path) -> None:
    table = tmp_path / "t"
    for first in range(0, 50, 10):
        add(table, range(first, first + 10))
    reading = Reading(table, max_files_per_trigger=2)
    begin = reading.begin()
    assert begin["delta"]["whole"] is True
    position, batches = reading.all(begin)
    assert [len(rows) for rows in batches] == [20, 20, 10], "the table's first files come in parts"
    assert ids(flat(batches)) == list(range(50))
    assert reading.batch(position) == (position, [])
    keyed = pa.table({"id": pa.array(range(50, 53), pa.int64())})
    write_deltalake(str(table), keyed, mode="append", target_file_size=1)
    add(table, range(53, 60))
    position, later = reading.all(position)
    assert ids(flat(later)) == list(range(50, 60))
    again = Reading(table)
    assert ids(again.rows(begin, position)) == list(range(60)), "a batch that is read again has the same rows"


def test_a_version_of_many_files_is_read_in_parts(tmp_path: Path) -> None:
    table = tmp_path / "t"
    rows = pa.table({"id": pa.array(range(6), pa.int64()), "part": pa.array(range(6), pa.int32())})
    write_deltalake(str(table), rows.slice(0, 0), partition_by=["part"])
    reading = Reading(table, max_files_per_trigger=4)
    position, _ = reading.all(reading.begin())
    write_deltalake(str(table), rows, mode="append")
    within, first = reading.batch(position)
    assert (within["delta"]["next"], within["delta"]["files"]) == (1, 4)
    end, second = Reading(table, max_files_per_trigger=4).batch(within)
    assert sorted(ids(first) + ids(second)) == list(range(6))
    assert end["delta"] == {"table": position["delta"]["table"], "next": 2, "files": 0}


def test_values_of_partitions_and_all_types_are_those_that_the_table_has(tmp_path: Path) -> None:
    """Also where folders have them in another writing, and for null."""
    table = tmp_path / "t"
    moment = datetime(2026, 1, 2, 3, 4, 5, 678, UTC)
    rows = pa.table(
        {
            "id": pa.array([1, 2, 3], pa.int64()),
            "text": ["a b/%é=", None, "x"],
            "day": [date(2026, 1, 2), date(2026, 1, 3), None],
            "at": pa.array([moment, moment, None], pa.timestamp("us", "UTC")),
            "price": pa.array([Decimal("1.20"), None, Decimal("-3.00")], pa.decimal128(10, 2)),
            "is_good": [True, False, None],
            "small": pa.array([1, None, 3], pa.int16()),
            "inner": pa.array([{"x": 1}, None, {"x": None}], pa.struct([("x", pa.int64())])),
            "many": pa.array([["a"], [], None], pa.list_(pa.string())),
        }
    )
    expected = sorted(rows.to_pylist(), key=lambda row: row["id"])
    write_deltalake(str(table), rows, partition_by=["text", "day", "at", "price", "is_good", "small"])
    reading = Reading(table)
    assert sorted(reading.all(reading.begin())[1][0], key=lambda row: row["id"]) == expected, "from the table"
    write_deltalake(str(table), rows, mode="append")
    version_1 = DeltaPosition(reading.begin()["delta"]["table"], 1).to_json()
    assert sorted(reading.all(version_1)[1][0], key=lambda row: row["id"]) == expected, "from the log's text"


def test_a_job_begins_with_all_rows_with_what_is_added_or_at_a_version(tmp_path: Path) -> None:
    table = tmp_path / "t"
    for first in range(3):
        add(table, range(first, first + 1))

    def first_rows(starting: Any) -> list[int]:
        reading = Reading(table, starting=starting)
        position = reading.begin()
        add(table, range(100, 101))
        found = ids(flat(reading.all(position)[1]))
        shutil.rmtree(table)
        for number in range(3):
            add(table, range(number, number + 1))
        return found

    assert first_rows("all") == [0, 1, 2, 100]
    assert first_rows("latest") == [100]
    assert first_rows(1) == [1, 2, 100]
    with pytest.raises(StillstateError, match="starting names a version that is not there yet"):
        Reading(table, starting=9).batch(Reading(table, starting=9).begin())


def test_optimize_and_vacuum_give_no_row_twice_and_take_none(tmp_path: Path) -> None:
    table = tmp_path / "t"
    for number in range(4):
        add(table, range(number, number + 1))
    reading = Reading(table, max_files_per_trigger=2)
    position, first = reading.batch(reading.begin())
    DeltaTable(str(table)).optimize.compact()
    add(table, range(4, 5))
    DeltaTable(str(table)).vacuum(dry_run=False)
    _, more = reading.all(position)
    assert ids([*first, *flat(more)]) == [0, 1, 2, 3, 4]


def test_files_that_a_vacuum_took_before_they_were_read_are_named(tmp_path: Path) -> None:
    table = tmp_path / "t"
    for first in range(4):
        add(table, range(first, first + 1))
    reading = Reading(table, max_files_per_trigger=2)
    position, _ = reading.batch(reading.begin())
    DeltaTable(str(table)).optimize.compact()
    DeltaTable(str(table)).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(StillstateError, match=r"MissingSource\].*version 3 is gone: a vacuum"):
        reading.all(position)


def test_versions_that_the_log_does_not_have_any_more_are_named_with_those_that_it_has(tmp_path: Path) -> None:
    table = tmp_path / "t"
    add(table, range(1))
    reading = Reading(table)
    position, _ = reading.all(reading.begin())
    for first in range(1, 5):
        add(table, range(first, first + 1))
    DeltaTable(str(table)).create_checkpoint()
    for version in range(3):
        (table / "_delta_log" / f"{version:020}.json").unlink()
    with pytest.raises(StillstateError, match=r"MissingSource\].*version 1 of the table is wanted.*versions from 3 on"):
        Reading(table).batch(position)


@pytest.mark.parametrize("how", ["delete", "update", "merge", "overwrite"])
def test_a_version_that_changes_rows_ends_the_run_by_name_or_is_passed_over(tmp_path: Path, how: str) -> None:
    table = tmp_path / "t"
    add(table, range(5))
    reading = Reading(table)
    position, _ = reading.all(reading.begin())
    change(table, how)
    add(table, range(50, 51))
    with pytest.raises(
        StillstateError, match=r"InvalidConfiguration\].*version 1 of the table removes or changes rows"
    ):
        reading.batch(position)
    passing = Reading(table, skip_changes=True)
    assert ids(flat(passing.all(position)[1])) == [50]


def change(table: Path, how: str) -> None:
    opened, one = DeltaTable(str(table)), pa.table({"id": pa.array([1], pa.int64())})
    if how == "delete":
        opened.delete("id = 3")
    elif how == "update":
        opened.update({"id": "30"}, predicate="id = 3")
    elif how == "merge":
        merging = opened.merge(one, "t.id = s.id", source_alias="s", target_alias="t")
        merging.when_matched_update_all().when_not_matched_insert_all().execute()
    else:
        write_deltalake(str(table), one, mode="overwrite")


def test_changes_applied_in_order_give_the_table(tmp_path: Path) -> None:
    """The oracle is the table itself, behind all kinds of changes."""
    table = tmp_path / "t"
    add(table, range(10), configuration=CHANGE_DATA)
    reading = Reading(table, changes=True, max_files_per_trigger=1)
    position, batches = reading.all(reading.begin())
    assert {row["_change_type"] for row in batches[0]} == {"insert"}
    change(table, "delete")
    change(table, "update")
    change(table, "merge")
    add(table, range(20, 25))
    DeltaTable(str(table)).update({"id": "id + 100"}, predicate="id < 3")
    DeltaTable(str(table)).optimize.compact()
    DeltaTable(str(table)).delete("id > 22 AND id < 100")
    _, later = reading.all(position)
    held: dict[int, int] = {}
    for rows in [*batches, *later]:
        assert len({row["_commit_version"] for row in rows}) <= 1, "a batch ends with a version"
        for row in rows:
            is_in = row["_change_type"] in ("insert", "update_postimage")
            held[row["id"]] = held.get(row["id"], 0) + (1 if is_in else -1)
            assert isinstance(row["_commit_timestamp"], datetime)
    there = DeltaTable(str(table)).to_pyarrow_table().column("id").to_pylist()
    assert sorted(there) == sorted(number for number, count in held.items() for _ in range(count))
    assert min(held.values()) == 0
    kinds = {row["_change_type"] for rows in later for row in rows}
    assert kinds == {"insert", "delete", "update_preimage", "update_postimage"}


def test_an_overwrite_is_read_as_rows_that_go_and_rows_that_come(tmp_path: Path) -> None:
    table = tmp_path / "t"
    add(table, range(2), configuration=CHANGE_DATA)
    reading = Reading(table, changes=True)
    position, _ = reading.all(reading.begin())
    change(table, "overwrite")
    _, [rows] = reading.all(position)
    assert sorted((row["id"], row["_change_type"]) for row in rows) == [(0, "delete"), (1, "delete"), (1, "insert")]


def test_a_table_without_change_data_is_refused(tmp_path: Path) -> None:
    add(tmp_path / "t", range(2))
    reading = Reading(tmp_path / "t", changes=True)
    with pytest.raises(StillstateError, match=r"InvalidConfiguration\].*delta.enableChangeDataFeed=true"):
        reading.batch(reading.begin())


def test_a_table_that_was_replaced_or_put_back_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    """With more versions than before, with fewer, and a copy of itself with fewer."""
    table = tmp_path / "t"
    add(table, range(1))
    shutil.copytree(table, tmp_path / "old")
    add(table, range(1, 2))
    reading = Reading(table)
    position, _ = reading.all(reading.begin())
    for versions in (3, 1):
        shutil.rmtree(table)
        for number in range(versions):
            add(table, range(number, number + 1))
        for anew in (reading, Reading(table)):
            with pytest.raises(StillstateError, match=r"MissingSource\].*replaced by another one since the job read"):
                anew.batch(position)
    shutil.rmtree(table)
    shutil.copytree(tmp_path / "old", table)
    with pytest.raises(StillstateError, match=r"MissingSource\].*put back from an older copy"):
        Reading(table).batch(position)
    shutil.rmtree(table)
    with pytest.raises(StillstateError, match=r"MissingSource\].*there is no Delta table"):
        reading.batch(position)


def test_new_columns_end_the_run_and_the_next_one_reads_them(tmp_path: Path) -> None:
    table = tmp_path / "t"
    add(table, range(1))
    reading = Reading(table)
    position, _ = reading.all(reading.begin())
    more = pa.table({"id": pa.array([1], pa.int64()), "name": ["a"]})
    write_deltalake(str(table), more, mode="append", schema_mode="merge")
    with pytest.raises(StillstateError, match=r"Unavailable\].*new columns \(name\) since the run began. Start again"):
        reading.batch(position)
    again = Reading(table)
    assert flat(again.all(position)[1]) == [{"id": 1, "name": "a"}]
    whole = flat(again.all(again.begin())[1])
    assert sorted(whole, key=lambda row: row["id"]) == [{"id": 0, "name": None}, {"id": 1, "name": "a"}]


def schema_of(**columns: Any) -> str:
    return json.dumps({"type": "struct", "fields": [{"name": n, "type": t} for n, t in columns.items()]})


def of(schema: str, **settings: str) -> Metadata:
    return Metadata("id", schema, (), settings)


def test_columns_fit_if_a_version_has_no_other_ones_than_the_run() -> None:
    inner = json.loads(schema_of(x="long"))
    more = json.loads(schema_of(x="long", y="string"))
    run = schema_of(a="long", b=more)
    for then in (schema_of(a="long"), schema_of(b=inner), run):
        check_columns(run, of(then), of(run), "source")
    with pytest.raises(Unavailable, match=r"new columns \(c\)"):
        check_columns(run, of(schema_of(c="long")), of(schema_of(a="long", b=more, c="long")), "source")
    with pytest.raises(InvalidPipeline, match="column 'a' with another type, and the table does not have it now"):
        check_columns(run, of(schema_of(a="string")), of(run), "source")


def test_a_table_that_would_be_read_wrong_is_refused() -> None:
    def check(metadata: Metadata | None = None, protocol: Protocol | None = None) -> None:
        check_readable(metadata or of("{}"), protocol or Protocol(1), "source", changes=False)

    check(protocol=Protocol(3, frozenset({"deletionVectors", "columnMapping", "timestampNtz"})))
    with pytest.raises(InvalidConfiguration, match="asks readers for typeWidening, which is not supported"):
        check(protocol=Protocol(3, frozenset({"typeWidening"})))
    with pytest.raises(InvalidConfiguration, match="asks readers for version 4"):
        check(protocol=Protocol(4))
    with pytest.raises(InvalidConfiguration, match="maps its columns"):
        check(of("{}", **{"delta.columnMapping.mode": "name"}))


def test_a_file_whose_rows_cannot_be_told_exactly_is_refused() -> None:
    plain = TableFile("a.parquet", 1, {"day": None})
    check_files([plain], ["day"], "source")
    with pytest.raises(InvalidConfiguration, match="deletion vector"):
        check_files([replace(plain, has_vector=True)], ["day"], "source")
    with pytest.raises(InvalidConfiguration, match="shallow clone"):
        check_files([replace(plain, path="s3://other/a.parquet")], ["day"], "source")
    with pytest.raises(InvalidConfiguration, match="lies outside of the table"):
        check_files([replace(plain, path="day=1/../../other/a.parquet")], ["day"], "source")
    with pytest.raises(InvalidData, match="no value of partition column 'day'"):
        check_files([replace(plain, partition={})], ["day"], "source")


def test_a_deletion_vector_in_the_log_is_seen() -> None:
    add_ = {"path": "a%20b.parquet", "size": 1, "dataChange": True, "deletionVector": {"storageType": "u"}}
    commit = parse_commit(3, json.dumps({"add": {**add_, "partitionValues": {}, "stats": None}}))
    assert [(file.path, file.has_vector, file.version) for file in commit.added] == [("a b.parquet", True, 3)]


@pytest.mark.parametrize("text", ["{", "[1]", '{"add": 3}', '{"add": {"path": "a"}}', '{"remove": null}'])
def test_a_damaged_log_is_refused(text: str) -> None:
    with pytest.raises(CorruptData, match="version 4 of the Delta table's log cannot be read"):
        parse_commit(4, text)


@pytest.mark.parametrize(
    "document",
    [
        None,
        3,
        {"version": 2, "delta": {"table": "a", "next": 1, "files": 0}},
        {"version": 1, "delta": {"table": "", "next": 1, "files": 0}},
        {"version": 1, "delta": {"table": "a", "next": -1, "files": 0}},
        {"version": 1, "delta": {"table": "a", "next": True, "files": 0}},
        {"version": 1, "delta": {"table": "a", "next": 1}},
        {"version": 1, "delta": {"table": "a", "next": 1, "files": 0, "whole": 1}},
        {"version": 1, "topics": {}},
    ],
)
def test_what_is_no_position_is_refused(document: Any) -> None:
    with pytest.raises(CorruptData, match="position of a Delta table cannot be read"):
        DeltaPosition.from_json(document)


@pytest.mark.parametrize(
    "position", [DeltaPosition("a", 3), DeltaPosition("a", 3, 2), DeltaPosition("a", 3, 2, is_whole=True)]
)
def test_a_position_is_read_as_it_was_written(position: DeltaPosition) -> None:
    assert DeltaPosition.from_json(json.loads(json.dumps(position.to_json()))) == position


def test_a_position_behind_more_files_than_there_are_is_refused(tmp_path: Path) -> None:
    add(tmp_path / "t", range(1))
    reading = Reading(tmp_path / "t")
    begin = DeltaPosition.from_json(reading.begin())
    with pytest.raises(StillstateError, match=r"CorruptData\].*behind file 7 of version 0"):
        reading.batch(begin.within(7).to_json())


def test_available_now_goes_no_further_than_what_there_was(tmp_path: Path) -> None:
    add(tmp_path / "t", range(1))
    reading = Reading(tmp_path / "t")
    reading.reader.prepareForTriggerAvailableNow()
    add(tmp_path / "t", range(1, 2))
    position = DeltaPosition(reading.begin()["delta"]["table"], 0).to_json()
    end, rows = reading.batch(position)
    assert ids(rows) == [0]
    assert reading.batch(end) == (end, [])


def test_a_store_that_is_away_ends_the_run_as_something_that_passes_and_no_secret_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAKE_SECRET", "hunter2")
    log = TableLog("s3://nowhere/t", {}, "source 't'", secrets=["hunter2"], away_s=0, wait=wait_none())

    def ask() -> None:
        raise OSError("GET https://store/?sig=hunter2: connection refused")

    with pytest.raises(
        Unavailable, match=r"the store does not answer: GET https://store/\?sig=\*\*\*: connection refused"
    ):
        log.asked(ask)


def test_no_part_of_a_secret_is_in_a_message_that_is_cut() -> None:
    """A text of a library may be long; a secret at the place where it is cut would not be found afterwards."""
    log = TableLog("s3://nowhere/t", {}, "source 't'", secrets=["hunter2"], away_s=0, wait=wait_none())

    def ask() -> None:
        raise OSError(f"{'x' * 496}hunter2")

    with pytest.raises(Unavailable) as caught:
        log.asked(ask)
    assert "x" * 496 in str(caught.value)
    assert "hunt" not in str(caught.value)


def test_a_secret_is_read_from_the_environment_of_each_process_and_is_in_no_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = delta_source("s3://lake/t", storage_options_env={"AWS_SECRET_ACCESS_KEY": "LAKE_SECRET"})
    monkeypatch.setenv("LAKE_SECRET", "hunter2")
    assert "hunter2" not in json.dumps(source._config) + repr(source)
    monkeypatch.delenv("LAKE_SECRET")
    with pytest.raises(InvalidConfiguration, match="LAKE_SECRET is not set"):
        _log_of(source._config)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"uri": ""}, "needs a table"),
        ({"uri": "s3://key:secret@lake/t"}, "holds a password"),
        ({"starting": "earliest"}, '"all", "latest" or a version'),
        ({"starting": -1}, "or a version"),
        ({"changes": True, "skip_changes": True}, "give sources.delta one of them"),
        ({"max_files_per_trigger": 0}, r"at least 1 \(got 0\)"),
        ({"storage_options": {"AWS_SECRET_ACCESS_KEY": "x"}}, "name an environment variable"),
        ({"storage_options": {"azure_storage_sas_token": "x"}}, "name an environment variable"),
    ],
)
def test_what_cannot_be_is_refused_when_the_source_is_made(how: Mapping[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfiguration, match=said):
        delta_source(**{"uri": "/lake/t", **how})
