"""What the source asks of Kafka: which partitions there are, how far each goes, and the records of one of them.

On confluent-kafka. Its clients are kept between questions: a new one costs several round trips.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import pyarrow as pa
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from state_runtime.base.errors import InvalidConfiguration, MissingSource, StoreRefused, Unavailable
from state_runtime.sources.kafka_offsets import Partition, Positions, Range

__all__ = ["AWAY_S", "STRANGERS", "Cluster", "Records", "library", "stranger", "typed"]

AWAY_S: Final = 60.0
"""How long a question is repeated while no broker answers; then the run ends, and is started again."""
_ASK_S: Final = 10.0
_WAIT_S_MAX: Final = 2.0
_TOPICS_AT_A_TIME: Final = 500
_RECORDS: Final = 10_000
_POLL_S: Final = 1.0
_REFUSED_S: Final = 3.0
"""A connection that a broker refuses may be one of several: so long is waited for what the others send."""
_PREFETCH_KIB: Final = 32 * 1024
"""Of one partition, in a worker's memory: a few tens of milliseconds of a broker's sending."""

_REFUSALS: Final = frozenset(
    {
        "_AUTHENTICATION",
        "_SSL",
        "SASL_AUTHENTICATION_FAILED",
        "TOPIC_AUTHORIZATION_FAILED",
        "CLUSTER_AUTHORIZATION_FAILED",
        "GROUP_AUTHORIZATION_FAILED",
    }
)

T = TypeVar("T")


class _Away(Exception):
    """No broker answers, or none that leads the partition: ask again."""


class Cluster:
    """Questions about topics. Its client is made with the first one.

    Args:
        settings: of librdkafka, with secrets.
        where: which source it is, for messages.
        away_s: how long a question is repeated while no broker answers.
    """

    def __init__(self, settings: Mapping[str, Any], where: str, *, away_s: float = AWAY_S, wait: Any = None) -> None:
        self._settings = {"log_level": 0, **settings}
        self._isolation = self._settings.pop("isolation.level", "read_committed")
        self._where = where
        self._away_s = away_s
        self._wait = wait_random_exponential(multiplier=0.1, max=_WAIT_S_MAX) if wait is None else wait
        self._client: Any = None
        self._refused: Any = None

    def topics_like(self, pattern: Callable[[str], object]) -> list[str]:
        """Return the names of topics that fit; those of Kafka itself never do."""

        def look() -> list[str]:
            listed = self._admin().list_topics(timeout=_ASK_S).topics
            return sorted(name for name in listed if not name.startswith("__") and pattern(name))

        return self._asked(look)

    def newest(self, topics: Sequence[str]) -> Positions:
        """Return how far each partition can be read now, and the ids of the topics. Topics that do not exist are left
        out."""
        return self._asked(lambda: self._newest(topics))

    def _newest(self, topics: Sequence[str]) -> Positions:
        kafka, parts, ids = library(), list[Partition](), dict[str, str]()
        for first in range(0, len(topics), _TOPICS_AT_A_TIME):
            names = kafka.TopicCollection(list(topics[first : first + _TOPICS_AT_A_TIME]))
            for name, answer in self._admin().describe_topics(names, request_timeout=_ASK_S).items():
                try:
                    described = answer.result()
                except kafka.KafkaException as error:
                    if error.args[0].name() == "UNKNOWN_TOPIC_OR_PART":
                        continue
                    raise
                ids[name] = str(described.topic_id)
                parts += [(name, int(part.id)) for part in described.partitions]
        return Positions(self._offsets(dict.fromkeys(parts, kafka.admin.OffsetSpec.latest())), ids)

    def earliest(self, parts: Sequence[Partition]) -> dict[Partition, int]:
        """Return the offset of the first record that each partition still has."""
        kafka = library()
        return self._asked(lambda: self._offsets(dict.fromkeys(parts, kafka.admin.OffsetSpec.earliest())))

    def at_time(self, parts: Sequence[Partition], time_ms: int) -> dict[Partition, int]:
        """Return the offset of each partition's first record from a time on; -1 if it has none."""
        kafka = library()
        return self._asked(lambda: self._offsets(dict.fromkeys(parts, kafka.admin.OffsetSpec.for_timestamp(time_ms))))

    def setting(self, topic: str, name: str, otherwise: str) -> str:
        """Return a setting of a topic."""
        kafka = library()

        def look() -> str:
            resource = kafka.admin.ConfigResource(kafka.admin.ConfigResource.Type.TOPIC, topic)
            entries = self._admin().describe_configs([resource], request_timeout=_ASK_S)[resource].result()
            return entries[name].value if name in entries else otherwise

        return self._asked(look)

    def _offsets(self, asked: Mapping[Partition, Any]) -> dict[Partition, int]:
        if not asked:
            return {}
        kafka = library()
        level = kafka.IsolationLevel
        isolation = level.READ_COMMITTED if self._isolation == "read_committed" else level.READ_UNCOMMITTED
        request = {kafka.TopicPartition(*part): spec for part, spec in asked.items()}
        answers = self._admin().list_offsets(request, isolation_level=isolation, request_timeout=_ASK_S)
        return {(part.topic, part.partition): int(answer.result().offset) for part, answer in answers.items()}

    def _admin(self) -> Any:
        if self._client is None:
            self._client = library().admin.AdminClient({**self._settings, "error_cb": self._see})
        return self._client

    def _see(self, error: Any) -> None:
        if error.name() in _REFUSALS:
            self._refused = error

    def _why(self, error: Any) -> Any:
        """Return the error of a connection that was refused, if there is one: the question is only not answered."""
        if self._client is not None:
            self._client.poll(0)
        refused, self._refused = self._refused, None
        return error if refused is None else library().KafkaException(refused)

    def _asked(self, ask: Callable[[], T]) -> T:
        """Ask, again while no broker answers.

        Raises:
            Unavailable: none did in time. StoreRefused: it refuses. InvalidConfiguration: a setting is not right.
        """
        kafka = library()

        def once() -> T:
            try:
                return ask()
            except kafka.KafkaException as error:
                raise typed(self._why(error), self._where) from error

        retrying = Retrying(
            retry=retry_if_exception_type(_Away), stop=stop_after_delay(self._away_s), wait=self._wait, reraise=True
        )
        try:
            return retrying(once)
        except _Away as error:
            raise Unavailable(f"{error}. The job goes on where it was once a broker answers") from error


class Records:
    """The records of one partition, for tasks. Kept between epochs, because it fetches ahead.

    Args:
        settings: of librdkafka, with secrets.
    """

    def __init__(self, settings: Mapping[str, Any], topic: str, partition: int, where: str) -> None:
        kafka = library()
        self._where = where
        self._part = (topic, partition)
        self._held: list[Any] = []
        self._next = -1
        self._refused: Any = None
        self._consumer = kafka.Consumer(
            {
                # Never used: offsets are kept in snapshots, and no group is joined.
                "group.id": "stillstate",
                "log_level": 0,
                "queued.max.messages.kbytes": _PREFETCH_KIB,
                "fetch.queue.backoff.ms": 20,
                **settings,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "error_cb": self._see,
            }
        )

    def _see(self, error: Any) -> None:
        if error.name() in _REFUSALS:
            self._refused = error

    def read(self, part: Range, away_s: float = AWAY_S) -> Iterator[list[Any]]:
        """Yield the messages of a range, in their order, ten thousand at a time.

        Raises:
            MissingSource: they are gone. StoreRefused: a broker refuses the connection.
            Unavailable: no broker answers, or one does not send what it has.
        """
        if self._next != part.start:
            self._held.clear()
            self._consumer.assign([library().TopicPartition(*self._part, part.start)])
            self._next = part.start
        silent_s = 0.0
        while self._next < part.end:
            found, self._held = self._held or self._fetched(), []
            silent_s = 0.0 if found else silent_s + _POLL_S
            if found:
                self._refused = None
            if self._refused is not None and silent_s > _REFUSED_S:
                raise typed(library().KafkaException(self._refused), self._where)
            if silent_s > away_s:
                raise Unavailable(
                    f"{self._where}: Kafka sends nothing of topic {part.topic!r} partition {part.partition} from "
                    f"offset {self._next} on, and should have records before {part.end}. The job goes on there when "
                    "it is started again"
                )
            messages = self._taken(found, part)
            if messages:
                yield messages

    def _fetched(self) -> list[Any]:
        """Return what is there; wait only if there is nothing. The client waits until it has as many as were asked for,
        or the time is over."""
        ready: list[Any] = self._consumer.consume(_RECORDS, 0)
        return ready or list(self._consumer.consume(1, _POLL_S))

    def _taken(self, found: list[Any], part: Range) -> list[Any]:
        """Return the messages of the range, and keep those behind it. What is no message says how far it is: at the end
        of a partition there may be records that no reader gets, such as the marks of transactions."""
        messages: list[Any] = []
        for number, message in enumerate(found):
            error = message.error()
            if error is not None and error.name() != "_PARTITION_EOF":
                raise self._failed(error, part)
            if message.offset() >= part.end:
                self._next = part.end
                self._held = found[number:] if error is None else []
                return messages
            if error is None:
                messages.append(message)
                self._next = message.offset() + 1
        return messages

    def _failed(self, error: Any, part: Range) -> Exception:
        if error.name() in ("OFFSET_OUT_OF_RANGE", "_AUTO_OFFSET_RESET"):
            return MissingSource(
                f"{self._where}: Kafka does not have offset {self._next} of topic {part.topic!r} partition "
                f"{part.partition} any more: retention or DeleteRecords removed it while it was being read. The state "
                'is kept. To go on without it, give the source when_lost="skip"'
            )
        problem = typed(library().KafkaException(error), self._where)
        return Unavailable(str(problem)) if isinstance(problem, _Away) else problem

    def close(self) -> None:
        """Close the connection."""
        self._consumer.close()


def typed(error: Any, where: str) -> Exception:
    """Return a KafkaException as one of Stillstate's errors; `_Away` if it passes by itself."""
    problem = error.args[0]
    said = f"{where}: {problem.str()}"
    if problem.name() in STRANGERS:
        return StoreRefused(f"{where}: {stranger(problem)}")
    if problem.name() in _REFUSALS:
        return StoreRefused(f"{said}. Somebody must grant it, or correct the source's settings of security")
    if problem.name() in ("_INVALID_ARG", "_CONFLICT"):
        return InvalidConfiguration(f"{said}; correct the source's options")
    return _Away(f"{said}: Kafka does not answer. Look at bootstrap_servers and the network")


STRANGERS: Final = frozenset({"_AUTHENTICATION", "_SSL", "SASL_AUTHENTICATION_FAILED"})
"""Errors of a connection whose ends do not trust each other."""


def stranger(problem: Any) -> str:
    """Return what one of `STRANGERS` means. The library's own text quotes what a broker says, and is left out."""
    if problem.name() == "_SSL":
        return (
            "the broker and this client do not agree on TLS: the broker's certificate is not signed by the CA of "
            "`ssl.ca.location`, is for another host or has expired, or the broker refuses this client's own. Correct "
            "the options of security, and start again"
        )
    return (
        "the broker does not take the user's name and password (or token). Look at `sasl.mechanism`, `sasl.username` "
        "and at the environment variables that options_env names, and start again"
    )


def library() -> Any:
    """Return confluent_kafka.

    Raises:
        InvalidConfiguration: it is not installed.
    """
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError as error:
        raise InvalidConfiguration(
            "Kafka needs the package confluent-kafka: pip install 'stillstate[kafka]'"
        ) from error
    return confluent_kafka


def columns_of(messages: Sequence[Any], *, headers: bool) -> pa.RecordBatch:
    """Return messages as a batch with the columns of Spark's Kafka source. The client gives one message at a time, so
    there is a loop for each column."""
    stamps = [message.timestamp() for message in messages]
    columns = [
        pa.array([message.key() for message in messages], pa.binary()),
        pa.array([message.value() for message in messages], pa.binary()),
        pa.array([message.topic() for message in messages], pa.string()),
        pa.array([message.partition() for message in messages], pa.int32()),
        pa.array([message.offset() for message in messages], pa.int64()),
        pa.array([1000 * ms for _, ms in stamps], pa.timestamp("us", tz="UTC")),
        pa.array([kind - 1 for kind, _ in stamps], pa.int32()),
    ]
    if not headers:
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(list(SCHEMA)[:-1]))
    named = [
        None if not found else [{"key": key, "value": value} for key, value in found]
        for found in (message.headers() for message in messages)
    ]
    return pa.RecordBatch.from_arrays([*columns, pa.array(named, SCHEMA.field("headers").type)], schema=SCHEMA)


SCHEMA: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("timestampType", pa.int32()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)
"""As Spark's Kafka source has them (timestampType: 0 by the producer, 1 by the broker)."""
