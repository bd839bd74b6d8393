"""Exceptions of Java's: what they mean for who runs the job. The chains in `java_chains.json` are recorded ones."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Final

import pytest
from py4j.protocol import Py4JNetworkError

from state_runtime.base.errors import (
    InvalidConfiguration,
    InvalidData,
    InvalidPipeline,
    MissingSource,
    ProcessEnded,
    ScratchRemoved,
    StillstateError,
    Unavailable,
)
from state_runtime.driver.scratch import Scratch
from state_runtime.spark.errors import typed_error
from state_runtime.spark.java_errors import CHAIN_MAX, Thrown, chain_of, error_of_chain, root_first

CHAINS: Final = {
    title: tuple(Thrown(kind, message) for kind, message in chain)
    for title, chain in json.loads(Path(__file__).with_name("java_chains.json").read_text())["chains"].items()
}
FAIL: Final = '.option("failOnDataLoss", "false")'
# What each is, and what it says: what, where, which way on.
MEANINGS: Final[dict[str, tuple[type[StillstateError], tuple[str, ...]]]] = {
    "Kafka: offsets gone by DeleteRecords": (
        MissingSource,
        (
            "offsets 10 to 29 of topic 'orders', partition 0",
            "does not have offset 10 any more",
            "kafka-get-offsets.sh --bootstrap-server SERVERS --topic orders --partitions 0 --time earliest",
            FAIL,
        ),
    ),
    "Kafka: a topic deleted and made anew": (
        MissingSource,
        ("topic 'orders', partition 1, up to offset 10", "ends at 0 now", "created again", FAIL, "another name"),
    ),
    "Kafka: a topic made anew with fewer partitions": (MissingSource, ("any more: orders-1.", FAIL)),
    "Kafka: a new partition that does not begin at 0": (
        MissingSource,
        ("topic 'orders' has a new partition 1", "from offset 5 on", FAIL),
    ),
    "Kafka: an unknown topic": (MissingSource, ("does not have the topic", "make it")),
    "Kafka: a topic deleted under a run": (MissingSource, ("(Subscribe[orders])", "make it")),
    "Kafka: no broker answers": (Unavailable, ("Kafka does not answer: Timed out", "kafka.bootstrap.servers")),
    "Kafka: the broker's host is unknown": (Unavailable, ("Kafka does not answer: No resolvable bootstrap urls",)),
    **dict.fromkeys(
        (
            "a restart: Kafka, then files",
            "a restart: Kafka, then rate",
            "a restart: files, then Kafka",
            "a restart: files, then rate",
            "a restart: rate, then Kafka",
            "a restart: rate, then files",
        ),
        (InvalidConfiguration, ("the source is of another kind", "old source again", "Begin with state")),
    ),
    "a restart: two sources, then one": (
        InvalidConfiguration,
        ("positions of 2 sources, and read() has 1", "Begin with state"),
    ),
    "files: a Parquet column of another type": (
        InvalidData,
        ("file:///data/f_type/in/b.parquet has column 'v' as BINARY", "says bigint", "stays the next one"),
    ),
    "files: a listed file vanished": (Unavailable, ("file:///data/f_vanished2/in/a.parquet was removed",)),
    "files: a damaged footer": (InvalidData, ("file:///data/f_corrupt/in/a.parquet cannot be read: corrupted file",)),
    "files: no Parquet": (InvalidData, ("f_notparquet/in/a.parquet cannot be read:", "is not a Parquet file")),
    "files: no ORC": (InvalidData, ("f_orc/in/a.orc cannot be read: Malformed ORC file",)),
    "files: damaged pages": (
        InvalidData,
        ("f_cut/in/a.parquet cannot be read: FAILED_TO_UNCOMPRESS(5)", "dictionary for [k]"),
    ),
    "files: a cut gzip": (InvalidData, ("f_gz/in/a.json.gz cannot be read: Unexpected end of input stream",)),
    "files: malformed JSON in FAILFAST": (InvalidData, ("f_json/in/a.json cannot be read: Unexpected end-of-input",)),
    "files: malformed CSV in FAILFAST": (InvalidData, ("f_csv/in/a.csv cannot be read: For input string",)),
    "files: no such folder": (MissingSource, ("does not exist: /data/h_raw/nowhere.",)),
    "Spark's state: dropDuplicates in read()": (InvalidPipeline, ("dropDuplicates", "deduplicate")),
    "Spark's state: an aggregation in read()": (InvalidPipeline, ("aggregation", "use ours")),
    "rows: a cast": (InvalidData, ("(cast(v as long) v)", "[CAST_INVALID_INPUT]")),
    "rows: a division by zero": (InvalidData, ("(cast(1 / v as long) v)", "[DIVIDE_BY_ZERO]")),
    "rows: an overflow": (InvalidData, ("(v * 4 as v)", "[ARITHMETIC_OVERFLOW]")),
    "rows: a cast by the DataFrame API": (InvalidData, ("expression of the job (cast):",)),
    "rows: an overflow of a time": (InvalidData, ("[DATETIME_OVERFLOW]", "create a TIMESTAMP")),
    "scratch: blockmgr-* before a run": (
        ScratchRemoved,
        ("removed: /tmp/blockmgr-51e020c0-a235-46ae-8fd6-88ea7042a9d0/00. A cleaner", "spark.local.dir"),
    ),
    "scratch: blockmgr-* under tasks": (ScratchRemoved, ("/36/temp_shuffle_2928bfbe", "cleaner", "spark.local.dir")),
    "scratch: a folder of blockmgr-* under tasks": (ScratchRemoved, ("88ea7042a9d0/34. A cleaner", "spark.local.dir")),
    "scratch: a source's log of files": (
        ScratchRemoved,
        ("removed: /var/tmp/stillstate-1000/spark/steps-f219eb73f4989e81-1/sources/0/0. A cleaner", "scratch_dir"),
    ),
    "scratch: a log that is being written": (ScratchRemoved, ("/sources/0/.0.ec0f3ac7", "cleaner", "scratch_dir")),
    "scratch: the commits": (ScratchRemoved, ("-1/commits/.0.a9e8607e", "cleaner", "scratch_dir")),
    "scratch: the folder of a source": (ScratchRemoved, ("-1/sources/0. A cleaner", "scratch_dir")),
    "memory: Java's heap": (
        StillstateError,
        ("Java process ran out of memory: Java heap space", "spark.driver.memory"),
    ),
    "anything else: no such format": (
        StillstateError,
        ("Spark failed: nosuch.DefaultSource (ClassNotFoundException), in: [DATA_SOURCE_NOT_FOUND]",),
    ),
}


@pytest.mark.parametrize("title", CHAINS)
def test_an_exception_of_javas_is_typed_by_its_cause_and_says_what_where_and_which_way_on(title: str) -> None:
    """Spark's own first line says that `count` failed or that a query ended. Whether a restart can help is the type's:
    what is `invalid` is not tried again by recovery, what is `unavailable` without end."""
    typed = error_of_chain(CHAINS[title])
    expected, words = MEANINGS[title]
    assert type(typed) is expected
    assert not [word for word in words if word not in str(typed)], str(typed)
    assert "\n" not in str(typed), "a heartbeat keeps the first line"
    if isinstance(typed, Unavailable) or type(typed) is StillstateError:
        assert "restart gets the same answer" not in str(typed)


def test_no_value_of_a_row_is_repeated() -> None:
    """Messages reach heartbeats, pages and whoever is called at night; rows do not belong there."""
    values = ("'x'", "notanumber", "[a,null]", "[null,null]", "4611686018427387904")
    for title, chain in CHAINS.items():
        said = str(error_of_chain(chain))
        assert not [value for value in values if value in said], title
    cut = r"""The value 'Pat O\'Brien, 5 Elm\nSt' of the type "STRING" cannot be cast"""
    for message in (cut, cut.replace(r"\n", "\n"), cut[:35], "The value [1, Pat", "The 1234.56 rounded half up"):
        thrown = Thrown("org.apache.spark.SparkArithmeticException", f"[CAST] {message} SQLSTATE: 22003")
        said = str(error_of_chain((thrown,)))
        assert not [part for part in ("Pat", "Brien", "Elm", "1234.56") if part in said], said


def test_no_secret_of_an_option_is_repeated() -> None:
    jaas = 'Invalid value org.Login required password="geheim"; for configuration sasl.jaas.config: not loadable'
    config = Thrown("org.apache.kafka.common.config.ConfigException", jaas)
    other = Thrown("java.lang.IllegalStateException", "no login with password=geheim at https://me:geheim@host/x")
    for chain in ((config,), (other,), (Thrown("a.B", "outside"), other)):
        assert "geheim" not in str(error_of_chain(chain))
    assert isinstance(error_of_chain((config,)), InvalidConfiguration)
    assert "sasl.jaas.config" in str(error_of_chain((config,)))


def test_what_is_not_known_is_told_root_cause_first() -> None:
    chain = (
        Thrown(
            "org.apache.spark.SparkException",
            "Job aborted due to stage failure: Task 0: a.b.Deep: the\ncause\nDriver stacktrace:",
        ),
        Thrown("a.b.Wrapper", "while reading part 7"),
        Thrown("a.b.Outer$Deep", "the\ncause SQLSTATE: 42000"),
    )
    assert root_first(chain) == "the (Deep), in: while reading part 7 (Wrapper)"
    assert str(error_of_chain(chain)).startswith(
        "Spark failed: the (Deep), in: while reading part 7 (Wrapper). Nothing"
    )
    assert root_first((Thrown("java.lang.NullPointerException", ""),)) == "NullPointerException"


class FakeThrowable:
    """As py4j shows a Throwable."""

    def __init__(self, kind: str, message: str | None, cause: FakeThrowable | None = None, ends: bool = False) -> None:
        self.kind, self.message, self.cause, self.ends = kind, message, cause, ends

    def getClass(self) -> FakeThrowable:
        return self

    def getName(self) -> str:
        return self.kind

    def getMessage(self) -> str | None:
        return self.message

    def getCause(self) -> FakeThrowable | None:
        if self.ends:
            raise Py4JNetworkError("Answer from Java side is empty")
        return self.cause


class FromJava(Exception):
    """As py4j raises it; its text is asked of Java."""

    def __init__(self, java: FakeThrowable, *, is_ended: bool = False) -> None:
        super().__init__("An error occurred while calling o294.count.")
        self.java_exception, self.is_ended = java, is_ended

    def __str__(self) -> str:
        if self.is_ended:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        return super().__str__()


def test_the_driver_sees_the_cause_behind_a_call_that_failed() -> None:
    chain = CHAINS["Kafka: offsets gone by DeleteRecords"]
    java = FakeThrowable(chain[0].kind, chain[0].message, FakeThrowable(chain[1].kind, chain[1].message))
    assert chain_of(FromJava(java)) == chain
    typed = typed_error(FromJava(java))
    assert isinstance(typed, MissingSource)
    assert typed.exit_code == 2
    assert chain_of(ValueError("not Java's")) == ()


def test_a_chain_without_end_and_a_java_that_ends_while_it_is_asked_are_bounded() -> None:
    circle = FakeThrowable("a.B", None)
    circle.cause = circle
    assert len(chain_of(FromJava(circle))) == CHAIN_MAX
    cut = FakeThrowable("a.B", "first", ends=True)
    assert chain_of(FromJava(cut)) == (Thrown("a.B", "first"),)


def test_an_error_whose_text_java_cannot_tell_any_more_says_that_java_ended() -> None:
    """Java had no memory left, raised, and ended: to ask it for the text of its exception fails as well."""
    typed = typed_error(FromJava(FakeThrowable("a.B", "x"), is_ended=True))
    assert type(typed) is ProcessEnded
    assert "Spark's Java process ended" in str(typed)


def test_a_full_disk_stays_what_it_is_when_java_says_so(tmp_path: Path) -> None:
    """It is told by the folder that is full, with what is free there, whatever Java wraps it in."""
    java = FakeThrowable(
        "org.apache.spark.SparkException", "x", FakeThrowable("java.io.IOException", "No space left on device")
    )
    shuffled = "/tmp/blockmgr-51e020c0-a235-46ae-8fd6-88ea7042a9d0/2f/temp_shuffle_x (No space left on device)"
    opened = FakeThrowable(
        "org.apache.spark.SparkException", "x", FakeThrowable("java.io.FileNotFoundException", shuffled)
    )
    scratch = Scratch(tmp_path, tmp_path / "state")
    for thrown in (java, opened):
        typed = typed_error(FromJava(thrown))
        with pytest.raises(Unavailable, match=r"disk of the driver's host is full"), scratch.explained():
            raise typed


@pytest.mark.parametrize("why", ["Too many open files", "Permission denied", "Read-only file system"])
def test_a_file_that_cannot_be_opened_was_not_removed(why: str) -> None:
    """Java has one exception for both. Nobody is to look for a cleaner while file handles run out."""
    path = "/tmp/blockmgr-51e020c0-a235-46ae-8fd6-88ea7042a9d0/2f/temp_shuffle_x"
    found = error_of_chain((Thrown("java.io.FileNotFoundException", f"{path} ({why})"),))
    assert type(found) is StillstateError
    assert why in str(found)
    gone = error_of_chain((Thrown("java.io.FileNotFoundException", f"{path} (No such file or directory)"),))
    assert isinstance(gone, ScratchRemoved)
