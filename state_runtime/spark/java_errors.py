"""Java exceptions as typed errors, by the reaction that they need, the root cause first.

Spark wraps an error several times and appends its plan and hundreds of lines of trace; the cause, which a person
needs, comes last. So the chain of causes is read from its end. A known cause becomes a typed error that says what
failed, where, and which remedies keep the state; its exit code says whether a restart can help. Any other chain is
reported root cause first.

The texts are those of Spark 4.3 and of its Kafka connector 4.2; recorded ones are in the tests. Values of rows, which
some of them hold, are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

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
from state_runtime.spark.internals import INTERNALS, Internal, private

__all__ = [
    "Thrown",
    "chain_in_text",
    "chain_of",
    "error_of_chain",
    "is_of_session",
    "removed_scratch",
    "root_first",
    "shown",
]

CHAIN_MAX: Final = 20
MESSAGE_CHARS_MAX: Final = 16_000
SHOWN_CHARS_MAX: Final = 400
_OUTER_SHOWN: Final = 2
_TRACE: Final = "\n\nJVM stacktrace:\n"
_CAUSE = re.compile(
    r"^Caused by: ([\w.$]+)(?:: (.*?))?(?=\n\tat |\n\t\.\.\. |\nCaused by: |\Z)", re.MULTILINE | re.DOTALL
)
_KEPT: Final = "Nothing of this epoch was committed, and nothing that was is lost"


@dataclass(frozen=True)
class Thrown:
    """One exception of a chain, as Java has it: its class with the package, and its message."""

    kind: str
    message: str

    @property
    def name(self) -> str:
        """The class without its package."""
        return self.kind.rpartition(".")[2].rpartition("$")[2]


Chain = Sequence[Thrown]
"""From the outermost exception to the root cause."""


def chain_of(error: BaseException) -> tuple[Thrown, ...]:
    """Return the chain behind an error that py4j or pyspark raised; () if no Java exception is behind it."""
    java: Any = getattr(error, "java_exception", None) or _origin(error)
    if java is None and INTERNALS.is_refused(Internal.JAVA_EXCEPTIONS) and isinstance(error, PySparkException):
        return chain_in_text(type(error).__name__, str(error))
    found: list[Thrown] = []
    # If Java has ended meanwhile, only the causes read so far are available.
    with suppress(Py4JError, OSError):
        while java is not None and len(found) < CHAIN_MAX:
            message = str(java.getMessage() or "")[:MESSAGE_CHARS_MAX]
            found.append(Thrown(str(java.getClass().getName()), message))
            java = java.getCause()
    return tuple(found)


def _origin(error: BaseException) -> Any:
    """Return the Java exception behind one of pyspark's; None if it is Python's own."""
    with suppress(AttributeError):
        return private(error, "_origin")
    return None


def chain_in_text(kind: str, text: str) -> tuple[Thrown, ...]:
    """Return the chain as far as the text of pyspark's exception tells it: its message, and the causes in Java's trace,
    which it holds only with spark.sql.pyspark.jvmStacktrace.enabled."""
    message, _, trace = text.partition(_TRACE)
    causes = [Thrown(cause[1], (cause[2] or "").strip()[:MESSAGE_CHARS_MAX]) for cause in _CAUSE.finditer(trace)]
    return (Thrown(kind, message.strip()[:MESSAGE_CHARS_MAX]), *causes[: CHAIN_MAX - 1])


def error_of_chain(chain: Chain) -> StillstateError:
    """Return the typed error for a chain. The chain is searched from the root, for one rule after the other.

    Args:
        chain: not empty.
    """
    for rule in _RULES:
        for thrown in reversed(chain):
            match = rule.message.search(thrown.message) if rule.kind.search(thrown.kind) else None
            if match is not None:
                return rule.made(match, chain)
    return StillstateError(
        f"Spark failed: {root_first(chain)}. {_KEPT}; start the job again. If it ends like this once more, report it "
        "with the log, which has Java's trace"
    )


def root_first(chain: Chain) -> str:
    """Return the root cause, and further messages around it, in one line."""
    told: list[str] = []
    for thrown in reversed(chain):
        line = _line(thrown)
        # A wrapping exception mostly repeats the message.
        if not told or (len(told) <= _OUTER_SHOWN and line and not _repeats(thrown, chain)):
            told.append(f"{line} ({thrown.name})" if line else thrown.name)
    return ", in: ".join(told)


def _repeats(outer: Thrown, chain: Chain) -> bool:
    after = chain[next(n for n, thrown in enumerate(chain) if thrown is outer) + 1 :]
    return any(inner.message and inner.message.partition("\n")[0] in outer.message for inner in after)


def _line(thrown: Thrown) -> str:
    first = next((line.strip() for line in thrown.message.splitlines() if line.strip()), "")
    return shown(first).rstrip(".")


_SQLSTATE = re.compile(r"\s*SQLSTATE: \w+\s*$")
# A literal may hold its own quote after a backslash, and may have been cut off.
_VALUE = re.compile(
    r"""\b([Vv]alue|[Tt]ext|input string:|record parsing:) """
    r"""('(?:[^'\\]|\\.)*(?:'|$)|"(?:[^"\\]|\\.)*(?:"|$)|\[[^\]]*(?:\]|$))""",
    re.DOTALL,
)
_SECRET = re.compile(r"(?i)\b([\w.]*(?:password|secret|token|credential)[\w.]*\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s,;]+)")
_USER_INFO = re.compile(r"(://)[^/@\s]+@")


def shown(text: str) -> str:
    """Return a Java text without values of rows and possible secrets, shortened for people."""
    text = "".join(character for character in text if character.isprintable())
    text = _VALUE.sub(r"\1 (left out)", _SQLSTATE.sub("", text.strip()))
    text = _USER_INFO.sub(r"\1", _SECRET.sub(r"\1(left out)", text))
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"


@dataclass(frozen=True)
class _Rule:
    """A rule recognises an exception by its class and its message; `made` makes the typed error of match and chain."""

    kind: re.Pattern[str]
    message: re.Pattern[str]
    made: Callable[[re.Match[str], Chain], StillstateError]


def _rule(kind: str, message: str, made: Callable[[re.Match[str], Chain], StillstateError]) -> _Rule:
    return _Rule(re.compile(kind), re.compile(message, re.DOTALL), made)


# --- Kafka -------------------------------------------------------------------------------------------------------

_GOES_ON = (
    'To keep the state and go on with the offsets that Kafka still has, set .option("failOnDataLoss", "false") on the '
    "source: lost offsets are skipped, logged and counted (skipped_rows)"
)
_NO_RESTART = "A restart gets the same answer"


def _asked_of_kafka(which: str) -> str:
    """Return the command that asks Kafka what it has now: Spark's exception does not say it."""
    return f"What Kafka has: kafka-get-offsets.sh --bootstrap-server SERVERS {which} --time earliest (then: latest)"


def _offsets_gone(match: re.Match[str], chain: Chain) -> StillstateError:
    first, end, topic, partition = match.groups()
    return MissingSource(
        f"the job would read offsets {first} to {int(end) - 1} of topic {topic!r}, partition {partition}, next, and "
        f"Kafka does not have offset {first} any more: retention or DeleteRecords removed it before it was read. "
        f"{_NO_RESTART}. {_asked_of_kafka(f'--topic {topic} --partitions {partition}')}. {_GOES_ON}. A longer "
        "retention.ms keeps it from happening again"
    )


def _offset_went_back(match: re.Match[str], chain: Chain) -> StillstateError:
    topic, partition, read, end = match.groups()
    return MissingSource(
        f"the job has read topic {topic!r}, partition {partition}, up to offset {read}, and the partition ends at "
        f"{end} now: the topic was deleted and created again. {_NO_RESTART}. {_GOES_ON}; rows that were written to the "
        "new topic before that start are skipped too. To read the new topic from its beginning, give the new topic "
        "another name"
    )


def _partitions_gone(match: re.Match[str], chain: Chain) -> StillstateError:
    return MissingSource(
        f"the job has read partitions that Kafka does not have any more: {shown(match[1])}. The topic was deleted, or "
        f"created again with fewer of them. {_NO_RESTART}. {_GOES_ON}"
    )


def _begins_late(match: re.Match[str], chain: Chain) -> StillstateError:
    topic, partition, first = match.groups()
    return MissingSource(
        f"topic {topic!r} has a new partition {partition}, and Kafka has it from offset {first} on: the job has not "
        f"read the rows before. {_NO_RESTART}. {_GOES_ON}"
    )


def _kafka_data_gone(match: re.Match[str], chain: Chain) -> StillstateError:
    return MissingSource(
        f"Kafka does not have what the job would read next: {shown(' '.join(match[1].split()))}. {_NO_RESTART}. "
        f"{_asked_of_kafka('--topic TOPIC')}. {_GOES_ON}"
    )


def _no_topic(match: re.Match[str], chain: Chain) -> StillstateError:
    asked = next((found for t in chain if (found := re.search(r"KafkaV2\[(\w+\[[^\]]*\])\]", t.message))), None)
    return MissingSource(
        f"Kafka does not have the topic that the source asks for{f' ({asked[1]})' if asked else ''}: it was deleted, "
        "or never made. A restart gets the same answer until it is there: make it, or correct the source's option, and "
        "start the job"
    )


def _kafka_away(match: re.Match[str], chain: Chain) -> StillstateError:
    return Unavailable(
        f"Kafka does not answer: {root_first(chain)}. The job goes on where it was once a broker answers; if none "
        "does, look at kafka.bootstrap.servers and the network"
    )


def _kafka_refuses(match: re.Match[str], chain: Chain) -> StillstateError:
    return Unavailable(
        f"Kafka refuses the job: {root_first(chain)}. Somebody must grant it, or correct the source's kafka.* options; "
        "then the job goes on where it was"
    )


def _kafka_options(match: re.Match[str], chain: Chain) -> StillstateError:
    return InvalidConfiguration(
        f"the kafka.* options of the source are not right: {_without_setting(match[0])}. {_NO_RESTART}; correct them "
        "in read()"
    )


def _without_setting(text: str) -> str:
    """Return the complaint about an option without the option's value, which may be a password."""
    return shown(re.sub(r"Invalid value .*? for configuration", "Invalid value for configuration", text))


def _topics_moved(match: re.Match[str], chain: Chain) -> StillstateError:
    return Unavailable(
        f"partitions of the topic came or went while the job read it ({match[1]}). The next start reads them again"
    )


# --- Files -------------------------------------------------------------------------------------------------------

_SAME_FILE = (
    "The file stays the next one to be read: put it right under the same name, or remove it and start the job, which "
    "then goes on without it"
)


def _file_gone(match: re.Match[str], chain: Chain) -> StillstateError:
    return Unavailable(
        f"the input file {match[1]} was removed after Spark had listed it and before it was read; its rows are lost if "
        "it does not come back. The next start goes on without it. Remove input files only after the job has read them "
        "(cleanSource does)"
    )


def _column_type(match: re.Match[str], chain: Chain) -> StillstateError:
    file, column, wanted, found = match.groups()
    return InvalidData(
        f"the input file {file} has column {column!r} as {found}, and the schema of read() says {wanted}. "
        f"{_NO_RESTART}. {_SAME_FILE}; or read such files with a schema of their own in another stream, cast, and unite"
    )


def _file_unreadable(match: re.Match[str], chain: Chain) -> StillstateError:
    inner = [thrown for thrown in chain if "FAILED_READ_FILE" not in thrown.message and thrown.kind != _STREAM]
    why = root_first(inner) if inner else "Spark does not say why"
    return InvalidData(f"the input file {match[1]} cannot be read: {why}. {_NO_RESTART}. {_SAME_FILE}")


def _folder_gone(match: re.Match[str], chain: Chain) -> StillstateError:
    return MissingSource(
        f"what read() names does not exist: {shown(match[1])}. {_NO_RESTART} until it is there: mount or make it, or "
        "correct the path, and start the job. What it has read stays read"
    )


def _store_away(match: re.Match[str], chain: Chain) -> StillstateError:
    return Unavailable(
        f"something that Spark reads or writes does not answer: {root_first(chain)}. Nothing that was committed is "
        "lost; the job goes on where it was"
    )


_OF_SESSION: Final = r"(?:blockmgr|spark)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
"""A folder of a session, below spark.local.dir."""
_NOT_REMOVED: Final = (
    r"(?!.*\((?:No space left|Disk quota|Too many open files|Permission denied|Operation not permitted|Read-only file))"
)
"""Java says "not found" for a file that cannot be opened for any reason; these are the other reasons."""
_OF_RUN: Final = r"-[0-9a-f]{16}-\d+/(?:offsets|commits|sources|metadata|state)"
"""The content of a run's checkpoint directory."""


def is_of_session(path: str) -> bool:
    """Return whether a path is in one of the folders that a Spark session makes for itself."""
    return re.search(rf"/{_OF_SESSION}(?:/|$)", path) is not None


def removed_scratch(path: str) -> ScratchRemoved:
    """Return the error for a removed file or folder that Spark needs until the run ends.

    Args:
        path: of the missing file or folder.
    """
    return ScratchRemoved(
        f"a file or folder that Spark needs until the run ends was removed: {shown(path)}. A cleaner of the temporary "
        "directory (systemd-tmpfiles, tmpwatch, tmpreaper) removes files that are days old, even while they are in "
        "use. Nothing that was committed is lost; the next start creates these files again and goes on from the newest "
        "snapshot. So that it does not happen again, set scratch_dir and Spark's spark.local.dir to folders that no "
        "cleaner visits, or exclude stillstate-*, spark-* and blockmgr-* from it"
    )


def _scratch_removed(match: re.Match[str], chain: Chain) -> StillstateError:
    return removed_scratch(match["path"].rstrip("."))


# --- Changed sources and state -----------------------------------------------------------------------------------

_BOOTSTRAP = (
    "Give it the old source again; or, to keep the state under the new one, begin a new job with it (docs/guide.md, "
    "'Begin with state')"
)


def _another_source(match: re.Match[str], chain: Chain) -> StillstateError:
    return InvalidConfiguration(
        "the source is of another kind than the one whose position the newest snapshot holds (files, Kafka, rate, …), "
        f"and cannot read that position. {_NO_RESTART}. {_BOOTSTRAP}"
    )


def _number_of_sources(match: re.Match[str], chain: Chain) -> StillstateError:
    return InvalidConfiguration(
        f"the newest snapshot holds positions of {match[1]} sources, and read() has {match[2]} of them: Spark goes on "
        f"with as many, in the same order. {_NO_RESTART}. {_BOOTSTRAP}"
    )


def _state_of_sparks(match: re.Match[str], chain: Chain) -> StillstateError:
    return InvalidPipeline(
        "read() has an operator of Spark's with state (dropDuplicates, an aggregation, a join of streams), which is "
        "not in our snapshots, so that no restart has it. Take it out of read() and use ours: deduplicate, aggregate, "
        "window or interval_join"
    )


# --- Rows and memory ---------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"(?<![\w.])-?(\d{6,}(\.\d+)?|\d+\.\d+)L?\b")
_PLACE = re.compile(
    r'== SQL [^\n]*==\n(?P<sql>.+?)\n\s*\^|== DataFrame ==\n"(?P<call>[^"]+)" was called from\n(?P<at>\S+)'
)


def _row_misfits(match: re.Match[str], chain: Chain) -> StillstateError:
    place = _PLACE.search(match.string)
    where = ""
    if place is not None:
        # If pyspark's debugging of columns is off, as in Stillstate's sessions, the caller is Java's own.
        caller = f", called from {place['at']}" if place["at"] and not place["at"].startswith("java.") else ""
        where = f" ({shown((place['sql'] or place['call']).strip())}{caller})"
    said = shown(_NUMBER.sub("(left out)", " ".join(match["said"].split())))
    return InvalidData(
        f"a row does not fit an expression of the job{where}: [{match['condition']}] {said} {_NO_RESTART}: the row "
        "stays the next one to be read. Change the expression so that it takes such rows (try_cast, a filter)"
    )


def _no_memory(match: re.Match[str], chain: Chain) -> StillstateError:
    return StillstateError(
        f"Spark's Java process ran out of memory: {root_first(chain)}. {_KEPT}. Give it more (spark.driver.memory, "
        "spark.executor.memory) or less at a time (maxFilesPerTrigger, maxOffsetsPerTrigger), and start the job again"
    )


def _spark_ended(match: re.Match[str], chain: Chain) -> StillstateError:
    return ProcessEnded(
        f"Spark was shut down under the run: {root_first(chain)}. Somebody or the system ended its Java process. "
        f"{_KEPT}; start the job again"
    )


_STREAM: Final = "org.apache.spark.sql.streaming.StreamingQueryException"
_GONE = r"Some data may have been lost.*Reason:\s*"
_AWAY = (
    r"\.(Socket\w*|Connect\w*|NoRouteToHost|UnknownHost|PortUnreachable|SSL\w*|InterruptedIO|ConnectionClosed|"
    r"SdkClient|AWSServiceIO|AWSClientIO|AbortedSdk|ApiCallTimeout)Exception$"
)
# The first rule that fits any exception of the chain is used; rules about one kind are listed from narrow to wide.
_RULES: Final = (
    _rule(r"java\.lang\.OutOfMemoryError$|SparkOutOfMemoryError$", r"", _no_memory),
    _rule(
        r"",
        r"SparkContext was shut ?down|SparkContext has been shut ?down|stopped SparkContext|"
        r"SparkContext or SparkSession has been closed",
        _spark_ended,
    ),
    _rule(
        r"(FileNotFound|NoSuchFile|ExitCode)Exception$",
        rf"^{_NOT_REMOVED}.*?(?P<path>/[^\n]*?(?:/{_OF_SESSION}|{_OF_RUN})(?:/[^\s']*)?)",
        _scratch_removed,
    ),
    _rule(
        r"", _GONE + r"Could not read records in offset \[(\d+), (\d+)\) for topic partition (\S+)-(\d+)", _offsets_gone
    ),
    _rule(r"", _GONE + r"Starting offset for (\S+-\d+ was \d+ but consumer reset to \d+)", _kafka_data_gone),
    _rule(r"", _GONE + r"Partition (\S+)-(\d+) offset was changed from (\d+) to (\d+)", _offset_went_back),
    _rule(r"", _GONE + r"Partitions (?:\w+\()?(.*?)\)? have been deleted", _partitions_gone),
    _rule(r"", _GONE + r"Added partition (\S+)-(\d+) starts from (\d+) instead of 0", _begins_late),
    _rule(r"", _GONE + r"(.*?)\s*(?:SQLSTATE.*)?$", _kafka_data_gone),
    _rule(r"\.OffsetOutOfRangeException$", r"(.*)", _kafka_data_gone),
    _rule(r"\.(UnknownTopicOrPartition|InvalidTopic|UnknownTopicId)Exception$", r"", _no_topic),
    _rule(r"kafka\.common\.errors\.\w*(Authorization|Authentication)\w*Exception$", r"", _kafka_refuses),
    _rule(r"kafka\.common\.config\.ConfigException$", r"No resolvable bootstrap urls", _kafka_away),
    _rule(r"kafka\.common\.config\.ConfigException$", r".*", _kafka_options),
    _rule(
        r"kafka\.common\.errors\.(Timeout|Disconnect|Network|\w*NotAvailable|\w*NotCoordinator)Exception$",
        r"",
        _kafka_away,
    ),
    _rule(r"TimeoutException$", r"^Cannot fetch record for offset", _kafka_away),
    _rule(r"", r"\[(\w+(?:TRIGGER_AVAILABLENOW|_THAN_PREFETCHED|_AND_PREFETCHED))\]", _topics_moved),
    _rule(_AWAY, r"", _store_away),
    _rule(r"Exception$", r"Input/output error|Stale file handle|Transport endpoint is not connected", _store_away),
    _rule(r"", r"\[FAILED_READ_FILE\.FILE_NOT_EXIST\] [^\n]*? reading file (.+?)\.\s", _file_gone),
    _rule(
        r"",
        r"\[FAILED_READ_FILE\.PARQUET_COLUMN_DATA_TYPE_MISMATCH\] [^\n]*? reading file (.+?)\.\s"
        r".*Parquet column \[(.*?)\]\. Expected Spark type (.+?), actual Parquet type (.+?)\.\s",
        _column_type,
    ),
    _rule(r"", r"\[FAILED_READ_FILE\.\w+\] [^\n]*? reading file (.+?)\.\s", _file_unreadable),
    _rule(r"", r"\[PATH_NOT_FOUND\] Path does not exist: (.*?)\. SQLSTATE", _folder_gone),
    _rule(
        r"", r"There are \[(\d+)\] sources in the checkpoint offsets and now there are \[(\d+)\]", _number_of_sources
    ),
    _rule(r"IllegalArgumentException$", r'^Expected e\.g\. \{"topicA"', _another_source),
    _rule(r"json4s\.MappingException$", r"^No usable value for", _another_source),
    _rule(r"IllegalStateException$", r"^Failed to read log file \S*/sources/\d+/", _another_source),
    _rule(r"NumberFormatException$", r'^For input string: "\{"', _another_source),
    _rule(r"", r"\[STREAMING_STATEFUL_OPERATOR_MISSING_STATE_DIRECTORY\]", _state_of_sparks),
    _rule(r"", r"\[STREAMING_OUTPUT_MODE\.UNSUPPORTED_OPERATION\]", _state_of_sparks),
    _rule(r"", r"^\[(?P<condition>[A-Z_.0-9]+)\] (?P<said>.*?)\s*SQLSTATE: 22\w{3}", _row_misfits),
)
