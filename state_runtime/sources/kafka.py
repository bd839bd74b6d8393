"""A topic of Kafka as a stream, without Spark's connector; see docs/kafka.md."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from state_runtime.base.errors import InvalidConfiguration, MissingSource
from state_runtime.base.secrets import refuse_secrets, with_secrets
from state_runtime.sources.kafka_client import Cluster, Records, columns_of, library
from state_runtime.sources.kafka_lag import KafkaLag
from state_runtime.sources.kafka_offsets import (
    Positions,
    Range,
    behind_lost,
    check_not_gone,
    check_same_topics,
    go_on,
    limited,
    ranges,
    told_lost,
)
from state_runtime.sources.python_source import HAS_LIMITS, check_limit, telling
from state_runtime.sources.watch import remember_opened

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["KafkaSource"]

if HAS_LIMITS:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

_LOG = logging.getLogger(__name__)
FORMAT: Final = "stillstate-kafka"
_SECRET = re.compile(r"(?i)password|secret|token|\.key(\.pem|\.location)?\Z|sasl\.oauthbearer\.config")
_NOT_YOURS: Final = ("bootstrap.servers", "enable.auto.commit", "auto.offset.reset", "group.id", "enable.partition.eof")
_COLUMNS: Final = (
    "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, timestampType int"
)
_HEADERS: Final = ", headers array<struct<key: string, value: binary>>"
_CONSUMERS_MAX: Final = 64


class KafkaSource:
    """A topic of Kafka, or several, as a stream; give it to `read()`, or open it with `load(spark)`.

    It needs no jar: tasks read with confluent-kafka. Rows have the columns of Spark's own Kafka source (`key`, `value`,
    `topic`, `partition`, `offset`, `timestamp`, `timestampType`, and `headers` if asked for). Positions are in
    snapshots, with the topics' ids; no consumer group is used. Records of a transaction come when it is committed.

    Args:
        topics: name, or names.
        bootstrap_servers: `host:port`, several separated by commas.
        topic_pattern: a regular expression that whole names match, in the place of `topics`. Topics that are made later
            are read from their first record.
        starting: where a job without a snapshot begins: "latest", "earliest", a time (each partition's first record
            from then on), or offsets by topic and partition, `{"orders": {0: 17, 1: 4}}`. Partitions that are added
            later are read from their first record.
        max_offsets_per_trigger: how far a batch goes at most, over all partitions, in proportion to what waits in each;
            None: to the end. Needs Spark 4.2.
        headers: whether rows have the column `headers`.
        when_lost: what happens if Kafka removed records before they were read: "fail" ends the run, with the state
            kept, "skip" goes on behind them and says how many there were.
        options: of librdkafka, without secrets (`security.protocol`, `ssl.ca.location`, `isolation.level`, …).
        options_env: environment variables that hold the values of further options, such as
            `{"sasl.password": "KAFKA_PASSWORD"}`.
            Only the variables' names are kept; each process reads its own environment.

    Example:
        orders = job.read(sources.kafka("orders", bootstrap_servers="broker:9092", starting="earliest"))
    """

    def __init__(
        self,
        topics: str | Sequence[str] = (),
        *,
        bootstrap_servers: str,
        topic_pattern: str = "",
        starting: Literal["latest", "earliest"] | datetime | Mapping[str, Mapping[int, int]] = "latest",
        max_offsets_per_trigger: int | None = None,
        headers: bool = False,
        when_lost: Literal["fail", "skip"] = "fail",
        options: Mapping[str, str] | None = None,
        options_env: Mapping[str, str] | None = None,
    ) -> None:
        names = (topics,) if isinstance(topics, str) else tuple(topics)
        if bool(names) == bool(topic_pattern) or not all(names):
            raise InvalidConfiguration("sources.kafka needs topics, or a topic_pattern, and not both")
        if not bootstrap_servers:
            raise InvalidConfiguration("sources.kafka needs bootstrap_servers, such as broker:9092")
        if max_offsets_per_trigger is not None and max_offsets_per_trigger < 1:
            raise InvalidConfiguration(f"max_offsets_per_trigger must be at least 1 (got {max_offsets_per_trigger})")
        if when_lost not in ("fail", "skip"):
            raise InvalidConfiguration(f'when_lost must be "fail" or "skip" (got {when_lost!r})')
        _check_pattern(topic_pattern)
        _check_options(options or {})
        self.topics = names
        self.topic_pattern = topic_pattern
        self.bootstrap_servers = bootstrap_servers
        self.max_offsets_per_trigger = max_offsets_per_trigger
        self._config: dict[str, Any] = {
            "topics": list(names),
            "pattern": topic_pattern,
            "starting": _starting(starting),
            "rows_max": max_offsets_per_trigger,
            "headers": headers,
            "when_lost": when_lost,
            "settings": {**(options or {}), "bootstrap.servers": bootstrap_servers},
            "options_env": dict(options_env or {}),
        }

    def __repr__(self) -> str:
        return f"sources.kafka({self.topic_pattern or ','.join(self.topics)!r}, {self.bootstrap_servers!r})"

    def __call__(self, spark: SparkSession) -> DataFrame:
        return self.load(spark)

    def load(self, spark: SparkSession) -> DataFrame:
        """Return the stream as a DataFrame of a session.

        Raises:
            InvalidConfiguration: confluent-kafka is not installed, or this Spark lacks what is asked for.
        """
        library()
        check_limit("max_offsets_per_trigger", self.max_offsets_per_trigger, spark)
        spark.dataSource.register(KafkaDataSource)
        named, config = self.topic_pattern or ",".join(self.topics), json.dumps(self._config)
        remember_opened(repr(self), self.lag)
        return spark.readStream.format(FORMAT).options(subscribe=named, config=config).load()

    def lag(self) -> KafkaLag:
        """Return what asks Kafka about this source beside a job."""
        named = self.topic_pattern or ",".join(self.topics)
        settings = with_secrets(self._config["settings"], self._config["options_env"], f"source {named!r}")
        return KafkaLag(named, settings, self.topics or re.compile(self.topic_pattern).fullmatch)


def _starting(starting: Any) -> Any:
    """Return where to begin, as JSON has it: a word, milliseconds since 1970, or offsets."""
    if isinstance(starting, datetime):
        return int(starting.timestamp() * 1000)
    if isinstance(starting, Mapping):
        return {topic: {str(number): offset for number, offset in parts.items()} for topic, parts in starting.items()}
    if starting not in ("latest", "earliest"):
        raise InvalidConfiguration(f'starting must be "latest", "earliest", a datetime, or offsets (got {starting!r})')
    return starting


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidConfiguration(f"topic_pattern {pattern!r} is no regular expression: {error}") from error


def _check_options(options: Mapping[str, str]) -> None:
    for key in options:
        if key in _NOT_YOURS:
            raise InvalidConfiguration(
                f"{key} is not for options: the source sets it itself, or has an argument for it"
            )
        if key.startswith("kafka."):
            raise InvalidConfiguration(f"options are librdkafka's: {key.removeprefix('kafka.')}, and not {key}")
    refuse_secrets(options, _SECRET, "options_env")


class KafkaDataSource(DataSource):
    """What Spark knows of the source; its options hold no secret."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> str:
        """Return the columns."""
        return _COLUMNS + (_HEADERS if json.loads(self.options["config"])["headers"] else "")

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        """Return the reader of this version of Spark."""
        return _LimitedReader(self.options["config"]) if HAS_LIMITS else _PlainReader(self.options["config"])


class _Part(InputPartition):
    """A range of one partition, for one task."""

    def __init__(self, part: Range) -> None:
        self.range = part


class _Reader(DataSourceStreamReader):
    """Plans batches in a process beside the driver, and reads their ranges in tasks."""

    def __init__(self, config: str) -> None:
        self._config = config
        self._of = json.loads(config)
        self._where = f"source {self._of['pattern'] or ','.join(self._of['topics'])!r}"
        self._cluster_made: Cluster | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cluster_made": None}

    @property
    def _cluster(self) -> Cluster:
        if self._cluster_made is None:
            settings = with_secrets(self._of["settings"], self._of["options_env"], self._where)
            self._cluster_made = Cluster(settings, self._where)
        return self._cluster_made

    def initialOffset(self) -> dict[str, Any]:
        """Return where a job without a snapshot begins."""
        with telling():
            newest, starting = self._newest(), self._of["starting"]
            missing = sorted(set(self._of["topics"]) - set(newest.ids))
            if missing:
                raise MissingSource(
                    f"{self._where}: Kafka has no topic {missing[0]!r} (or does not show it). Make it "
                    f"(kafka-topics.sh --create --topic {missing[0]} …), and start again"
                )
            return self._begin(newest, starting).to_json()

    def _begin(self, newest: Positions, starting: Any) -> Positions:
        parts = list(newest.next)
        if starting == "latest":
            return newest
        if isinstance(starting, int):
            found = self._cluster.at_time(parts, starting)
            return Positions({p: newest.next[p] if o < 0 else o for p, o in found.items()}, newest.ids)
        first = self._cluster.earliest(parts)
        if isinstance(starting, dict):
            given = Positions.from_json(starting).next
            unknown = sorted(set(given) - set(newest.next))
            if unknown:
                raise MissingSource(f"{self._where}: starting names a partition that Kafka does not have: {unknown[0]}")
            first = {**first, **given}
        return Positions(first, newest.ids)

    def _newest(self) -> Positions:
        topics = self._of["topics"] or self._cluster.topics_like(re.compile(self._of["pattern"]).fullmatch)
        return self._cluster.newest(topics)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the ranges of a batch, each for one task."""
        with telling():
            parts = ranges(Positions.from_json(start), Positions.from_json(end))
            earliest = self._cluster.earliest([(part.topic, part.partition) for part in parts])
            if self._of["when_lost"] == "fail":
                check_not_gone(parts, earliest)
            elif told := told_lost(parts, earliest):
                # This process has no logging but its stderr, which is the driver's.
                _LOG.warning("%s: %s; they are passed over", self._where, told)
            return [_Part(part) for part in behind_lost(parts, earliest)]

    def read(self, partition: Any) -> Iterator[Any]:
        """Yield the rows of a range; runs in a task."""
        with telling():
            part = partition.range
            for messages in _records(self._config, part.topic, part.partition, self._where).read(part):
                yield columns_of(messages, headers=self._of["headers"])


if HAS_LIMITS:

    class _LimitedReader(_Reader, SupportsTriggerAvailableNow):
        _target: Positions | None = None
        _seen: Positions | None = None

        def getDefaultReadLimit(self) -> ReadLimit:
            rows_max = self._of["rows_max"]
            return ReadAllAvailable() if rows_max is None else ReadMaxRows(rows_max)

        def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
            """Return how far the next batch goes."""
            with telling():
                begin, newest = Positions.from_json(start), self._target or self._newest()
                check_same_topics(begin, newest.ids)
                self._seen = go_on(begin, newest)
                end = limited(begin, self._seen, limit.max_rows) if isinstance(limit, ReadMaxRows) else self._seen
                return end.to_json()

        def reportLatestOffset(self) -> dict[str, Any] | None:
            """Return how far Kafka was when it was asked last; Spark shows it in its progress."""
            return None if self._seen is None else self._seen.to_json()

        def prepareForTriggerAvailableNow(self) -> None:
            """Go no further than what there is now."""
            with telling():
                self._target = self._newest()


class _PlainReader(_Reader):
    """For Spark 4.1, which asks only how far Kafka is."""

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]
        with telling():
            return self._newest().to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        with telling():
            check_same_topics(Positions.from_json(start), Positions.from_json(end).ids)
        return super().partitions(start, end)


_KEPT: dict[tuple[str, str, int], Records] = {}


def _records(config: str, topic: str, partition: int, where: str) -> Records:
    """Return the client that this worker keeps for a partition: it has fetched ahead since the epoch before."""
    key = (config, topic, partition)
    if key not in _KEPT:
        while len(_KEPT) >= _CONSUMERS_MAX:
            _KEPT.pop(next(iter(_KEPT))).close()
        of = json.loads(config)
        _KEPT[key] = Records(with_secrets(of["settings"], of["options_env"], where), topic, partition, where)
    return _KEPT[key]
