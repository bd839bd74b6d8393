"""Access to a Kafka cluster: settings of clients, and what the client library's errors mean for a job.

librdkafka speaks of three kinds of errors: what passes (it is tried again), what ends a transaction, and what ends a
producer. A job needs another line: what passes by itself, what somebody must grant, and what somebody must put right.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from state_runtime.base.errors import InvalidConfiguration, InvalidPipeline, StillstateError, StoreRefused
from state_runtime.base.secrets import SECRET_CHARS_MIN, redacted, with_secrets
from state_runtime.sources.kafka_client import STRANGERS, library, stranger

__all__ = ["FencedOut", "KafkaAccess", "Passing", "error_of", "is_of_library", "library", "making"]

_LOG = logging.getLogger(__name__)
_TRANSACTION_MS: Final = 300_000
"""Of an epoch's records; readers of committed records wait as long for a driver that died and does not come back."""
_QUEUE_KIB: Final = 128 * 1024
_CRITICAL: Final = 2
_OURS: Final = frozenset(
    {"bootstrap.servers", "metadata.broker.list", "transactional.id", "enable.idempotence", "group.id"}
    | {"isolation.level", "delivery.report.only.error", "enable.auto.commit", "enable.gapless.guarantee"}
)
_OF_ACCESS: Final = ("security.", "sasl.", "ssl.", "enable.ssl.", "socket.", "broker.", "client.", "reconnect.", "dns.")
_REFUSED: Final = frozenset(
    {"TOPIC_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED", "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"}
    | {"CLUSTER_AUTHORIZATION_FAILED", "SASL_AUTHENTICATION_FAILED", "_AUTHENTICATION", "_SSL", "POLICY_VIOLATION"}
)
_FENCED: Final = frozenset({"_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH"})
_ADVICE: Final[Mapping[str, str]] = {
    "MSG_SIZE_TOO_LARGE": "Raise `max.message.bytes` of the topic, and of the sink options={'message.max.bytes': …}",
    "RECORD_LIST_TOO_LARGE": "Raise `segment.bytes` of the topic, or lower options={'batch.size': …} of the sink",
    "INVALID_RECORD": "A compacted topic takes no record without a key: name the columns of one (key=…); nor does a "
    "topic take a time far from its clock",
    "_UNKNOWN_PARTITION": "The column `partition` names one that the topic does not have: add partitions to the topic",
    "INVALID_TRANSACTION_TIMEOUT": "options={'transaction.timeout.ms': …} must not be above the broker's "
    "`transaction.max.timeout.ms`",
}


class Passing(Exception):
    """Nothing is wrong with the rows: the same is done again, from the beginning."""


class FencedOut(Exception):
    """Another producer with this transactional id has begun, or the broker has ended a transaction that took too
    long."""


@dataclass(frozen=True)
class KafkaAccess:
    """How clients reach a cluster.

    Attributes:
        options: librdkafka's settings.
        options_env: by setting, the environment variable that has its value: for what must be in no code.
    """

    servers: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    options_env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.servers:
            raise InvalidConfiguration("KafkaSink needs bootstrap_servers, such as 'broker-1:9092,broker-2:9092'")
        taken = sorted(_OURS & {*self.options, *self.options_env})
        if taken:
            raise InvalidConfiguration(
                f"KafkaSink: options must not set {', '.join(taken)}: exactly once depends on them, and the sink sets "
                "them"
            )

    def producer(self, writer: str, job: str, on_error: Callable[[Any], None]) -> Any:
        """Return a new transactional producer; nothing is sent yet."""
        settings = {
            "client.id": f"stillstate-{job}",
            # As Java's clients do it, and so Spark's sink: a key keeps its partition if a job comes from there.
            "partitioner": "murmur2_random",
            "transaction.timeout.ms": _TRANSACTION_MS,
            "queue.buffering.max.kbytes": _QUEUE_KIB,
            **self._options(),
            "bootstrap.servers": self.servers,
            "transactional.id": writer,
            "delivery.report.only.error": True,
            "error_cb": on_error,
            "logger": _LOG,
        }
        return self._made(library().Producer, settings)

    def consumer(self, group: str, isolation: str, on_error: Callable[[Any], None]) -> Any:
        """Return a consumer that never consumes: it looks at topics and offsets, and says what its group is.

        Args:
            isolation: with "read_committed" it gives offsets that no open transaction may change (`require_stable`).
        """
        settings = {"group.id": group or "stillstate", "enable.auto.commit": False, "isolation.level": isolation}
        return self._made(library().Consumer, {**self._for_looking(), **settings, "error_cb": on_error})

    def admin(self) -> Any:
        """Return a client that makes topics."""
        from confluent_kafka.admin import AdminClient

        return self._made(AdminClient, self._for_looking())

    def _for_looking(self) -> dict[str, Any]:
        options = {name: value for name, value in self._options().items() if name.startswith(_OF_ACCESS)}
        return {**options, "bootstrap.servers": self.servers, "log_level": _CRITICAL}

    def _options(self) -> dict[str, Any]:
        return with_secrets(self.options, self.options_env, "KafkaSink")

    def _made(self, client: Any, settings: Mapping[str, Any]) -> Any:
        try:
            return client(dict(settings))
        except library().KafkaException as error:
            raise InvalidConfiguration(
                f"KafkaSink: the client library does not take the options: {self.without_secrets(error.args[0].str())}"
            ) from None

    def without_secrets(self, text: str) -> str:
        """Return a text of the library without values that options have."""
        text = redacted(text, map(os.environ.get, self.options_env.values()))
        return redacted(text, self.options.values(), SECRET_CHARS_MIN)

    def meaning(self, error: Any, topic: str, writer: str, seen: Any = None) -> Exception:
        """Return what to raise for an error of the library.

        Args:
            seen: the newest error of a connection: a call that timed out says nothing of why.
        """
        name, text = error.name(), self.without_secrets(error.str())
        if seen is not None and seen.name() in _REFUSED:
            name, text = seen.name(), self.without_secrets(seen.str())
        if name in _FENCED:
            return FencedOut(text)
        if name in STRANGERS:
            return StoreRefused(
                f"the sink of topic {topic!r} cannot talk to the Kafka cluster {self.servers}: "
                f"{stranger(error if seen is None or seen.name() != name else seen)}. What is staged comes then"
            )
        if name in _REFUSED:
            return StoreRefused(
                f"the Kafka cluster {self.servers} refused the sink of topic {topic!r}: {text}. It needs WRITE, READ "
                f"and DESCRIBE on the topic, READ on the group and WRITE on the transactional id {writer!r}. What is "
                "staged stays, and comes when the job is started"
            )
        if name in ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC"):
            return self.no_topic(topic)
        if name in _ADVICE:
            return _lasting(topic, text, _ADVICE[name])
        return Passing(text if seen is None else f"{text}; {self.without_secrets(seen.str())}")

    def no_topic(self, topic: str, where: str = "") -> StillstateError:
        """Return the error for a topic that is not there."""
        return InvalidPipeline(
            f"{where}{': ' * bool(where)}there is no topic {topic!r} in the Kafka cluster {self.servers}. "
            f"{making(topic, self.servers)}"
        )


def is_of_library(error: BaseException) -> bool:
    """Return whether an exception comes from the client library.

    A fatal error, such as that of a producer that was fenced, is raised inside of `flush` and `poll`. If a callback is
    called behind it in the same call, Python makes a SystemError of it, whose cause it is, or which has lost it
    (confluent-kafka 2.16).
    """
    raised = error.__cause__ if isinstance(error, SystemError) else error
    return raised is None or isinstance(raised, library().KafkaException)


def error_of(error: BaseException) -> Any | None:
    """Return the library's error that an exception of the library is about; None if that is lost."""
    raised = error.__cause__ if isinstance(error, SystemError) else error
    return raised.args[0] if isinstance(raised, library().KafkaException) else None


def making(topic: str, servers: str) -> str:
    """Return how a topic is made."""
    return (
        f"Make it: `kafka-topics.sh --bootstrap-server {servers} --create --topic {topic} --partitions 3`, or let the "
        "sink make it: create={'partitions': 3, 'replication': 3}"
    )


def _lasting(topic: str, text: str, advice: str) -> StillstateError:
    return InvalidPipeline(
        f"the Kafka topic {topic!r} does not take the rows: {text}. {advice}. What is staged stays, and comes when "
        "that is put right and the job is started"
    )
