"""What is read of a native Spark query without Spark: where it stands, whether it can be taken over, and which operator is which."""

from __future__ import annotations

import base64
import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import DictStore, examples

from state_runtime.base.errors import CorruptData, InvalidConfiguration, InvalidData, MissingSnapshot, StillstateError
from state_runtime.importing.native_checkpoint import check_unmoved, read_checkpoint
from state_runtime.importing.native_operators import NativeOperator, NativeState, match_operators, parse_operators
from state_runtime.pipeline.source_position import write_source_log
from state_runtime.pipeline.watermark import Clocks, WatermarkColumn
from state_runtime.processors.user.stateful import StatefulProcessorOperator
from state_runtime.snapshot.manifest import SourceFile, StateKind, TimeEntry
from state_runtime.state.table import StateSchema

ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def offsets(batch: int, *sources: str, watermark_ms: int = 5, provider: str = ROCKSDB, version: str = "v1") -> bytes:
    header = {
        "batchWatermarkMs": watermark_ms,
        "batchTimestampMs": 1_000 + batch,
        "conf": {"spark.sql.streaming.stateStore.providerClass": provider},
    }
    return "\n".join([version, json.dumps(header), *(sources or ('{"logOffset":0}',))]).encode()


def query(batches: int, **changed: Any) -> DictStore:
    """A checkpoint after so many batches, as Spark leaves it."""
    store = DictStore()
    store.put("metadata", b'{"id":"query-1"}')
    for batch in range(batches):
        store.put(f"offsets/{batch}", offsets(batch, **changed))
        store.put(f"commits/{batch}", b'v1\n{"nextBatchWatermarkMs":70}')
        store.put(f"offsets/.{batch}.crc", b"\x00")
    return store


def test_a_stopped_query_stands_at_its_newest_commit() -> None:
    found = read_checkpoint(query(3))
    assert (found.query_id, found.batch_id, found.batch_time_ms, found.watermark_ms, found.sources) == (
        "query-1",
        2,
        1_002,
        5,
        1,
    )
    position = found.position
    assert (position.batch_id, position.metadata) == (2, '{"id":"query-1"}')
    assert (position.offsets, position.previous_offsets) == (offsets(2).decode(), offsets(1).decode())
    assert position.commit == 'v1\n{"nextBatchWatermarkMs":5}'
    assert position.logs == ()


def test_a_query_keeps_its_policy_of_several_watermarks() -> None:
    store = query(1)
    assert read_checkpoint(store).policy == "min"
    header = {"batchWatermarkMs": 5, "batchTimestampMs": 1_000}
    header["conf"] = {
        "spark.sql.streaming.stateStore.providerClass": ROCKSDB, "spark.sql.streaming.multipleWatermarkPolicy": "max"
    }  # type: ignore[assignment]  # fmt: skip
    store.put("offsets/0", "\n".join(["v1", json.dumps(header), '{"logOffset":0}']).encode())
    assert read_checkpoint(store).policy == "max"


def test_the_first_batch_has_none_before_it() -> None:
    assert read_checkpoint(query(1)).position.previous_offsets == ""


def test_the_clocks_are_those_that_the_next_batch_of_the_query_would_have() -> None:
    """The next watermark is the highest event time minus the delay; rows are late by the newest batch's."""
    found = read_checkpoint(query(2))
    clocks = Clocks((WatermarkColumn("ts", "ts", 30),))
    assert found.time(clocks) == TimeEntry(1_001, 5, {"ts": 100})
    assert found.time(Clocks()) == TimeEntry(1_001, 5, {})
    store = query(2)
    store.put("commits/1", b'v1\n{"nextBatchWatermarkMs":0}')
    assert read_checkpoint(store).time(clocks) == TimeEntry(1_001, 5, {}), "no row was seen yet"


def test_commits_that_name_state_files_are_understood() -> None:
    """Format 2 of the state's checkpoints; what runs here has no use for the names."""
    store = query(2)
    store.put("commits/1", b'v2\n{"nextBatchWatermarkMs":70,"stateUniqueIds":{"0":[["a"]]}}')
    assert read_checkpoint(store).position.commit == 'v1\n{"nextBatchWatermarkMs":5}'


def break_it(what: str) -> DictStore:
    store = query(2)
    if what == "a batch under way":
        store.put("offsets/2", offsets(2))
    elif what == "no metadata":
        store.delete("metadata")
    elif what == "no commit":
        store.delete("commits/0")
        store.delete("commits/1")
    elif what == "a commit without its offsets":
        store.delete("offsets/1")
    elif what == "the batch before is gone":
        store.delete("offsets/0")
    elif what == "another provider":
        store = query(2, provider="org.example.OwnStateStoreProvider")
    elif what == "a newer log":
        store = query(2, version="v2")
    elif what == "a log that is cut off":
        store.put("offsets/1", offsets(1)[:30])
    elif what == "a commit of another version":
        store.put("commits/1", b"v9\n{}")
    return store


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("a batch under way", InvalidData, "batch 2 .* is not committed .* Trigger.AvailableNow"),
        ("no metadata", MissingSnapshot, "no checkpoint of a Spark query"),
        ("no commit", MissingSnapshot, "no checkpoint of a Spark query"),
        ("a commit without its offsets", CorruptData, "commits/1 without offsets/1"),
        ("the batch before is gone", CorruptData, "has no offsets/0"),
        ("another provider", InvalidData, "OwnStateStoreProvider; only RocksDBStateStoreProvider and HDFSBacked"),
        ("a newer log", InvalidData, "'v2' of Spark's offset log"),
        ("a log that is cut off", CorruptData, "cannot be read"),
        ("a commit of another version", InvalidData, "'v9' of Spark's commit log"),
    ],
)
def test_what_cannot_be_taken_over_is_refused_with_the_reason(
    what: str, error: type[StillstateError], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_checkpoint(break_it(what))


@given(st.binary(max_size=120), st.sampled_from(["metadata", "offsets/1", "offsets/0", "commits/1", "sources/0/0"]))
@examples(150)
def test_any_bytes_in_a_log_give_a_typed_error_or_a_position(body: bytes, path: str) -> None:
    store = query(2)
    store.put("sources/0/0", b"v1\n{}")
    store.put(path, body)
    with contextlib.suppress(StillstateError):
        read_checkpoint(store)


def test_a_query_that_goes_on_meanwhile_is_found_out() -> None:
    store = query(2)
    found = read_checkpoint(store)
    check_unmoved(store, found)
    store.put("offsets/2", offsets(2))
    with pytest.raises(InvalidData, match="went on to batch 2 while its state was read at batch 1"):
        check_unmoved(store, found)


# --- files that were seen ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entries", [1, 9, 10, 11, 25, 40])
@pytest.mark.parametrize("cleaned", [False, True])
def test_the_log_of_seen_files_is_whole_however_spark_has_compacted_it(
    tmp_path: Path, entries: int, cleaned: bool
) -> None:
    """Spark removes plain entries some time after it has compacted them."""
    lines = [f'{{"path":"file:///in/{n}-{k}","timestamp":1,"batchId":{n}}}' for n in range(entries) for k in range(2)]
    store = query(1)
    store.put("offsets/0", offsets(0, f'{{"logOffset":{entries - 1}}}'))
    write_source_log(tmp_path, lines, entries - 1, 10)
    for file in tmp_path.iterdir():
        store.put(f"sources/0/{file.name}", file.read_bytes())
    if not cleaned:
        for n in range(entries):
            body = "\n".join(["v1", *(line for line in lines if f'"batchId":{n}}}' in line)])
            store.put(f"sources/0/{n}", body.encode())
    found = read_checkpoint(store)
    assert list(found.seen_files[0]) == lines
    assert found.position.logs == (0,)


def test_entries_that_were_logged_after_the_batch_are_not_seen_yet() -> None:
    """Spark logs files before it plans their batch; the next batch reads them."""
    store = query(1)
    for n in range(2):
        store.put(f"sources/0/{n}", f'v1\n{{"path":"{n}","batchId":{n}}}'.encode())
    assert list(read_checkpoint(store).seen_files[0]) == ['{"path":"0","batchId":0}']


def test_a_log_with_a_gap_is_refused() -> None:
    """A file that is forgotten would be read twice."""
    store = query(1)
    store.put("offsets/0", offsets(0, '{"logOffset":2}'))
    store.put("sources/0/0", b"v1\n{}")
    store.put("sources/0/2", b"v1\n{}")
    with pytest.raises(CorruptData, match="no entry 1 of the log of seen files, whose last is 2"):
        read_checkpoint(store)


def test_sources_that_keep_something_else_have_no_log() -> None:
    """Kafka keeps its first offsets there."""
    store = query(1)
    store.put("offsets/0", offsets(0, '{"topic":{"0":12}}', "-"))
    store.put("sources/0/0", b'v1\n{"topic":{"0":0}}')
    found = read_checkpoint(store)
    assert (found.seen_files, found.position.logs, found.sources) == ({}, (), 2)
    assert found.position.files == (SourceFile("0/0", base64.b64encode(b'v1\n{"topic":{"0":0}}').decode()),)


def test_a_rate_source_is_taken_over_with_its_time_of_creation() -> None:
    """Its offset is a number, of seconds since then."""
    store = query(1)
    store.put("offsets/0", offsets(0, "17", '{"logOffset":{"0":1}}'))
    store.put("sources/0/0", b"v1\n1795385325406")
    store.put("sources/0/.0.crc", b"sum")
    store.put("sources/1/0", b"v1\n{}")
    found = read_checkpoint(store)
    assert (found.seen_files, [f.path for f in found.position.files]) == ({}, ["0/0", "1/0"])


# --- operators -----------------------------------------------------------------------------------------------------


def row(number: int = 0, name: str = "transformWithStateInPySparkExec", **changed: Any) -> dict[str, Any]:
    """A row of Spark's `state-metadata`."""
    variables = [
        {"stateName": "seen", "stateVariableType": "ValueState", "ttlEnabled": False},
        {"stateName": "log", "stateVariableType": "ListState", "ttlEnabled": True},
    ]
    properties = {"timeMode": "ProcessingTime", "outputMode": "Update", "stateVariables": json.dumps(variables)}
    return {
        "operatorId": number,
        "operatorName": name,
        "stateStoreName": "default",
        "numPartitions": 4,
        "operatorProperties": json.dumps({**properties, **changed}),
    }


SEEN_AND_LOG = (NativeState("seen", "value", False), NativeState("log", "list", True))


def test_an_operator_is_read_with_its_modes_and_states() -> None:
    (found,) = parse_operators([row()], "x")
    assert found == replace(NATIVE, operator=row()["operatorName"])


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([], InvalidData, "no stateful operator"),
        ([row(), row(1, "globalLimit")], InvalidData, r"operator 1 .* is a limit\(\), which cannot be imported"),
        ([row(1, "somethingNew")], InvalidData, "is of kind 'somethingNew', which cannot be imported"),
        ([row(stateVariables="{")], CorruptData, "cannot be read"),
        ([row(timeMode="Sometimes")], CorruptData, "cannot be read"),
        ([row(stateVariables='[{"stateName":"s","stateVariableType":"SetState","ttlEnabled":false}]')], CorruptData, "SetState"),
        ([{**row(), "operatorProperties": "no JSON"}], CorruptData, "cannot be read"),
    ],
)  # fmt: skip
def test_a_query_with_anything_else_is_refused(
    rows: list[dict[str, Any]], error: type[StillstateError], message: str
) -> None:
    with pytest.raises(error, match=message):
        parse_operators(rows, "x")


def own(uid: str, **states: tuple[StateKind, int]) -> StatefulProcessorOperator:
    """An operator of a job: kind and TTL of each state."""
    keys, values = pa.schema([("k", pa.string())]), pa.schema([("n", pa.int64())])
    return StatefulProcessorOperator(
        uid=uid,
        key_columns=("k",),
        key_ddl="`k` string",
        key_schema=keys,
        output_schema=keys,
        state_schemas={name: StateSchema(keys, values) for name in states},
        state_ddl=dict.fromkeys(states, "`n` bigint"),
        processor=None,
        pandas=False,
        output_rows_per_batch=1,
        state_kinds={name: kind for name, (kind, _) in states.items()},
        ttls_ms={name: ttl for name, (_, ttl) in states.items() if ttl},
        time_mode="processing",
    )


FITS = own("fits", seen=("value", 0), log=("list", 9))
NATIVE = NativeOperator(0, 4, "processing", "update", SEEN_AND_LOG)


def test_operators_find_each_other_by_their_states() -> None:
    other = NativeOperator(1, 4, "processing", "update", (NativeState("m", "map", False),))
    third = own("third", m=("map", 0))
    assert match_operators([NATIVE, other], [third, object(), FITS]) == [(NATIVE, FITS), (other, third)]


def test_twins_must_be_named() -> None:
    twin = own("twin", seen=("value", 0), log=("list", 9))
    with pytest.raises(InvalidConfiguration, match=r"may be any of .* --operator 0=UID"):
        match_operators([NATIVE], [FITS, twin])
    assert match_operators([NATIVE], [FITS, twin], {0: "twin"}) == [(NATIVE, twin)]
    second = NativeOperator(1, 4, "processing", "update", SEEN_AND_LOG)
    with pytest.raises(InvalidConfiguration, match="two operators of the query would become one"):
        match_operators([NATIVE, second], [FITS, twin], {0: "twin", 1: "twin"})


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        (own("x", seen=("list", 0), log=("list", 9)), "list 'seen'.*value 'seen'"),
        (own("x", seen=("value", 0), log=("list", 0)), "list 'log',.* list 'log' with TTL"),
        (own("x", seen=("value", 0)), "does not fit operator 0"),
    ],
)
def test_what_does_not_fit_is_said(operator: StatefulProcessorOperator, message: str) -> None:
    with pytest.raises(InvalidConfiguration, match=message):
        match_operators([NATIVE], [operator])


def test_an_operator_that_the_job_does_not_have_is_said() -> None:
    with pytest.raises(InvalidConfiguration, match="no transform_with_state operator 'gone'; 'fits': "):
        match_operators([NATIVE], [FITS], {0: "gone"})
