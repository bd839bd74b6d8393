"""Warnings of Spark's Java in our log: each kind is told, none floods it, and rows that were passed over are counted."""

from __future__ import annotations

import logging

import pytest
from py4j.protocol import Py4JNetworkError

from state_runtime.spark.java_log import KINDS_MAX, JavaWarnings, WarningBook

CONSUMER = "org.apache.spark.sql.kafka010.consumer.KafkaDataConsumer"
# Spark's Kafka connector 4.2.0, whose structured log puts its texts together wrongly.
RECORDED = (
    "\nThe current available offset range is MDC[key=RANGE, value=AvailableOffsetRange(22,30)].\n Offset MDC[key=OFFSET, "
    "value=10] is out of range, and records in\n [MDC[key=OFFSET, value=10], MDC[key=UNTIL_OFFSET, value=22]] will be\n "
    "skippedMessageWithContext((GroupId: spark-kafka-source-93cbd55a-c4bd-4203-91a4-10ce669058f0--948261485-executor, "
    "TopicPartition: orders-0). \nSome data may have been lost,{})"
)


def record(message: str, logger: str = CONSUMER) -> str:
    return f"\x1e{logger}\x1f{message}"


def heard(*looks: str) -> WarningBook:
    """A book that has looked as often as there are texts."""
    texts = list(looks)
    book = WarningBook(lambda: texts.pop(0) if texts else "")
    for _ in looks:
        book.look()
    return book


def test_rows_that_a_source_passed_over_are_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """`failOnDataLoss=false` skipped 620 rows without a word anywhere: Spark says it in a warning only."""
    book = heard(record("Cannot fetch offset 10"), record(RECORDED))
    assert book.skipped_rows() == 12
    assert book.skipped_rows() == 0, "of the next epoch"
    assert "KafkaDataConsumer warns: The current available offset range" in caplog.text
    assert "12 rows that are gone were passed over by now" in caplog.text
    assert "\n" not in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("message", "rows"),
    [
        ("Offset 7 is out of range, and records in [7, 107) will be skipped", 100),
        ("Skip missing records in [5, 9)(GroupId: a, TopicPartition: b-0)", 4),
        ("Added partition orders-1 starts from 5 instead of 0. Some data may have been missed", 5),
        ("Some data may be lost. Recovering from the earliest offset: 22", 0),
        ("Offset 9 is out of range, and records in [9, 3) will be skipped", 0),
    ],
)
def test_every_way_in_which_sparks_kafka_source_says_so_is_known(message: str, rows: int) -> None:
    assert heard(record(message)).skipped_rows() == rows


def test_files_that_were_passed_over_are_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """With `ignoreMissingFiles`, or gone when its batch is planned: rows are fewer, and Spark only warns."""
    planned = "The directory file:/in/a.json was not found. Was it deleted very recently?"
    read = "Skipped missing file: path: file:///in/b.json, range: 0-1, partition values: [empty row]"
    damaged = "Skipped the rest of the content in the corrupted file: path: file:///in/c.json, range: 0-1"
    heard(*map(record, (planned, read, damaged, "Skipped lunch")))
    told = [r.getMessage() for r in caplog.records]
    assert [text.rpartition("; ")[2] for text in told[:3]] == [
        f"rows of this file were passed over, as of {n} files by now" for n in (1, 2, 3)
    ]
    assert "file:///in/b.json" in told[1]
    assert "passed over" not in told[3]


def test_warnings_of_sources_and_clients_are_told_and_none_floods_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A broker that is away is warned of several times a second, each time with other numbers."""
    away = [
        record(f"[Consumer groupId=g-{n}] Connection to node -{n} could not be established", "a.NetworkClient")
        for n in range(1000)
    ]
    heard("".join(away[:500]), "", "".join(away[500:]))
    told = [r.getMessage() for r in caplog.records]
    assert told[0].startswith("NetworkClient warns: [Consumer groupId=g-0] Connection to node -0")
    assert [text.partition(": ")[0] for text in told] == [
        "NetworkClient warns",
        "NetworkClient warns (10 times by now)",
        "NetworkClient warns (100 times by now)",
        "NetworkClient warns (1,000 times by now)",
    ]
    assert all(r.levelno == logging.WARNING for r in caplog.records)


def test_ever_new_kinds_of_warnings_flood_nothing_either(caplog: pytest.LogCaptureFixture) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    heard("".join(record(f"{a}{b} is odd", "a.B") for a in letters for b in letters) + record("x" * 10_000))
    assert len(caplog.records) <= KINDS_MAX + 3
    assert max(len(r.getMessage()) for r in caplog.records) < 1000


class Buffer:
    """A StringBuffer of Java's."""

    def __init__(self) -> None:
        self.text, self.is_ended = "", False

    def getBuffer(self) -> Buffer:
        if self.is_ended:
            raise Py4JNetworkError("Answer from Java side is empty")
        return self

    def length(self) -> int:
        return len(self.text)

    def substring(self, first: int, end: int) -> str:
        taken = self.text[first:end]
        self.text += record("came meanwhile")
        return taken

    def delete(self, first: int, end: int) -> None:
        self.text = self.text[:first] + self.text[end:]


def test_nothing_is_lost_that_comes_while_it_is_read_and_a_java_that_ended_has_nothing() -> None:
    java = Buffer()
    warnings = JavaWarnings(java)
    assert warnings.take() == ""
    java.text = record("first")
    assert warnings.take() == record("first")
    assert warnings.take() == record("came meanwhile")
    java.is_ended = True
    assert warnings.take() == ""
    warnings.end()
    assert JavaWarnings().take() == ""


def test_neither_secrets_nor_rows_come_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """These warnings were silent until now."""
    csv = "CSV header does not conform to the schema.\n Header: 1, Pat Brien\n Schema: n, name\nCSV file: file:///in/a.csv"
    heard(
        record("login failed with password=geheim at https://me:geheim@host/x"),
        record("cannot parse the value 'Pat O\\'Brien' as a number"),
        record(csv, "org.apache.spark.sql.catalyst.csv.CSVHeaderChecker"),
    )
    assert len(caplog.records) == 3
    assert "CSV header does not conform" in caplog.text
    assert not [part for part in ("geheim", "Pat", "Brien") if part in caplog.text]
