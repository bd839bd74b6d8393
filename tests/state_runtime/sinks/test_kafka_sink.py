"""What a Kafka sink takes and refuses, without a broker."""

from __future__ import annotations

import datetime as dt
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException

from state_runtime.base.errors import Fenced, InvalidConfiguration, InvalidPipeline, StoreRefused, StoreUnavailable
from state_runtime.sinks.kafka import KafkaSink
from state_runtime.sinks.kafka_access import FencedOut, KafkaAccess, Passing
from state_runtime.sinks.kafka_log import KafkaLog
from state_runtime.sinks.kafka_records import RecordFormat

NOBODY = "127.0.0.1:1"
"""Nothing listens there."""


def records(form: RecordFormat, batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
    form.check(batch.schema, "sink 'out'")
    return list(form.records(batch))


def test_rows_become_json_with_a_key_of_one_column_or_of_several() -> None:
    batch = pa.record_batch({"k": ["a", None], "n": [1, 2]})
    assert [r[:3] for r in records(RecordFormat(), batch)] == [
        (None, b'{"k":"a","n":1}', -1),
        (None, b'{"k":null,"n":2}', -1),
    ]
    assert [r[0] for r in records(RecordFormat(key=("k",)), batch)] == [b"a", None]
    assert [r[0] for r in records(RecordFormat(key=("n",)), batch)] == [b"1", b"2"]
    assert records(RecordFormat(key=("k", "n")), batch)[0][0] == b'{"k":"a","n":1}'
    raw = pa.record_batch({"k": [b"\xff", None]})
    assert [r[0] for r in records(RecordFormat(key=("k",)), raw)] == [b"\xff", None]


def test_a_row_that_is_removed_has_a_key_and_no_value() -> None:
    batch = pa.record_batch({"k": ["a", "b", "c"], "gone": [True, False, None]})
    found = records(RecordFormat(key=("k",), remove_where="gone"), batch)
    assert [r[:2] for r in found] == [(b"a", None), (b"b", b'{"k":"b"}'), (b"c", b'{"k":"c"}')]
    columns = pa.record_batch({"key": ["a", "b"], "value": ["v", "w"], "gone": [True, False]})
    found = records(RecordFormat("columns", remove_where="gone"), columns)
    assert [r[:2] for r in found] == [(b"a", None), (b"b", b"w")]


def test_columns_of_records_are_taken_as_they_are() -> None:
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    batch = pa.record_batch(
        {
            "value": pa.array([b"\xff", None], pa.binary()),
            "key": ["k", None],
            "partition": pa.array([2, None], pa.int32()),
            "timestamp": pa.array([dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC), None], pa.timestamp("us", "UTC")),
            "headers": pa.array([[{"key": "h", "value": b"x"}, {"key": "h", "value": None}], None], headers),
        }
    )
    assert records(RecordFormat("columns"), batch) == [
        (b"k", b"\xff", 2, 1000, [("h", b"x"), ("h", None)]),
        (None, None, -1, 0, None),
    ]


@pytest.mark.parametrize(
    ("form", "schema", "words"),
    [
        (RecordFormat(key=("id",)), {"k": pa.string()}, "there is no column 'id'; it has k"),
        (RecordFormat(), {"d": pa.duration("us")}, "'d' has the type duration.*cast it in a transform"),
        (RecordFormat(key=("k",), remove_where="k"), {"k": pa.string()}, "remove_where needs a boolean column"),
        (RecordFormat("columns"), {"k": pa.string()}, 'needs a column "value"; it has k'),
        (RecordFormat("columns"), {"value": pa.int64()}, "'value' of a record must be text or binary, and is int64"),
        (RecordFormat("columns"), {"value": pa.string(), "more": pa.string()}, "the rows have 'more'. Drop it"),
        (RecordFormat("columns"), {"value": pa.string(), "topic": pa.string()}, "a sink writes to one topic"),
        (
            RecordFormat("columns"),
            {"value": pa.string(), "headers": pa.list_(pa.string())},
            "must be an array of struct",
        ),
        (RecordFormat("columns"), {"value": pa.string(), "partition": pa.string()}, "must be an integer"),
        (RecordFormat("columns"), {"value": pa.string(), "timestamp": pa.int64()}, "must be a timestamp"),
    ],
)
def test_rows_that_cannot_be_records_are_refused_when_the_job_is_built(
    form: RecordFormat, schema: dict[str, pa.DataType], words: str
) -> None:
    with pytest.raises(InvalidPipeline, match=words):
        form.check(pa.schema(list(schema.items())), "sink 'out'")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"topic": ""}, "needs the name of a topic"),
        ({"bootstrap_servers": ""}, "needs bootstrap_servers"),
        ({"format": "avro"}, "format='avro' must be json or columns"),
        ({"format": "columns", "key": "k"}, 'key=… is for format="json"'),
        ({"remove_where": "gone"}, "needs key, the key of what goes"),
        ({"unknown_epoch": "guess"}, "must be refuse, write or skip"),
        ({"timeout_s": 0}, "must be above 0"),
        ({"create": {"partition": 3}}, "create has partition; it takes partitions, replication, config"),
        ({"options": {"transactional.id": "mine"}}, "options must not set transactional.id"),
        ({"options_env": {"group.id": "GROUP"}}, "options must not set group.id"),
    ],
)
def test_settings_that_cannot_be_are_refused(how: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfiguration, match=words):
        KafkaSink(**{"topic": "t", "bootstrap_servers": NOBODY, **how})


def test_secrets_are_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those of the code nor those of the environment."""
    monkeypatch.setenv("SINK_PASSWORD", "from-the-environment")
    access = KafkaAccess(NOBODY, {"sasl.password": "from-the-code"}, {"ssl.key.password": "SINK_PASSWORD"})
    sink = KafkaSink("t", bootstrap_servers=NOBODY, options={"sasl.password": "from-the-code"})
    shown = f"{access!r} {sink!r} {access.without_secrets('a from-the-code b from-the-environment')}"
    assert "from-the-" not in shown
    monkeypatch.delenv("SINK_PASSWORD")
    with pytest.raises(InvalidConfiguration, match="KafkaSink: the environment variable SINK_PASSWORD is not set"):
        access.admin()
    with pytest.raises(InvalidConfiguration, match="does not take the options: No such configuration property"):
        KafkaAccess(NOBODY, {"sasl.pasword": "x"}).admin()


class Error:
    """An error of the client library."""

    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return self._name

    def str(self) -> str:
        return f"what {self._name} says"


@pytest.mark.parametrize(
    ("name", "seen", "kind"),
    [
        ("_TIMED_OUT", None, Passing),
        ("_TIMED_OUT", "_ALL_BROKERS_DOWN", Passing),
        ("NOT_ENOUGH_REPLICAS", None, Passing),
        ("INVALID_TXN_STATE", None, Passing),
        ("_FENCED", None, FencedOut),
        ("INVALID_PRODUCER_EPOCH", None, FencedOut),
        ("TOPIC_AUTHORIZATION_FAILED", None, StoreRefused),
        ("_TIMED_OUT", "_AUTHENTICATION", StoreRefused),
        ("MSG_SIZE_TOO_LARGE", None, InvalidPipeline),
        ("UNKNOWN_TOPIC_OR_PART", None, InvalidPipeline),
        ("INVALID_TRANSACTION_TIMEOUT", None, InvalidPipeline),
    ],
)
def test_errors_of_the_library_mean_what_a_job_can_do_about_them(name: str, seen: str | None, kind: type) -> None:
    """What passes is tried again, what somebody must grant or put right is not."""
    meaning = KafkaAccess(NOBODY).meaning(Error(name), "t", "w", Error(seen) if seen else None)
    assert type(meaning) is kind
    words = (f"what {seen or name} says", "Make it: `kafka-topics.sh", "does not take the user's name and password")
    assert any(text in str(meaning) for text in words)


@pytest.mark.parametrize("is_hidden", [False, True], ids=["plain", "behind a callback"])
@pytest.mark.parametrize(
    ("code", "kind"), [(KafkaError._FENCED, FencedOut), (KafkaError._TIMED_OUT, Passing)], ids=["fenced", "timed out"]
)
def test_an_error_means_the_same_if_a_callback_was_called_while_it_was_raised(
    is_hidden: bool, code: int, kind: type[Exception]
) -> None:
    """Python makes it the cause of a SystemError then; one with another cause, or none, stays what it is."""
    log = KafkaLog("t", KafkaAccess(NOBODY), "w", "orders/out", timeout_s=1)
    raised: Exception = KafkaException(KafkaError(code))
    if is_hidden:
        hidden, raised = raised, SystemError("<function> returned a result with an exception set")
        raised.__cause__ = hidden
    with pytest.raises(kind), log._explained():
        raise raised
    with pytest.raises(SystemError), log._explained():
        raise SystemError("something else") from ValueError("of another library")


def test_a_call_that_ends_without_saying_why_is_looked_behind_once_and_then_ends_the_run() -> None:
    """The library has lost the error of a producer that was fenced (seen of `flush` while a zombie woke up)."""
    log = KafkaLog("t", KafkaAccess(NOBODY), "w", "orders/out", timeout_s=1)
    for kind in (FencedOut, Fenced):
        with pytest.raises(kind), log._explained():
            raise SystemError("<method 'flush'> returned NULL without setting an exception")


def test_a_cluster_that_does_not_answer_ends_the_start_in_bounded_time(tmp_path: Path) -> None:
    sink = KafkaSink("t", bootstrap_servers=NOBODY, timeout_s=0.5)
    schema = pa.schema([("k", pa.string())])
    with pytest.raises(StoreUnavailable, match=r"127.0.0.1:1 did not do it for topic 't' in 0.5 s.*start again"):
        sink.check_place(sink.layout(schema), (), "sink 'out'")
    spec = sink.spec("orders", "0" * 32, "out", (str(tmp_path), {}))
    with pytest.raises(StoreUnavailable):
        sink.newest_published_epoch(spec)
    assert pickle.loads(pickle.dumps(sink)).topic == "t", "without its clients"
