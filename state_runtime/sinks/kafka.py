"""A sink into a Kafka topic, exactly once: the epoch's number is in the same transaction as its records.

Tasks stage Parquet files below the job's root. After the manifest the driver reads them and writes their rows as
records, in one transaction. See docs/kafka-out.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.pipeline.output_layout import OutputLayout
from state_runtime.pipeline.output_owner import Claimant
from state_runtime.pipeline.sinks import OnRollback, Sink
from state_runtime.pipeline.staged_rows import lost_file, publish_unless_there
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.sinks.kafka_access import KafkaAccess
from state_runtime.sinks.kafka_log import EpochMark, KafkaLog, WhenUnknown
from state_runtime.sinks.kafka_records import Record, RecordFormat
from state_runtime.snapshot.manifest import StagedFile, StagedOutput

__all__ = ["KafkaSink"]

_TIMEOUT_S: Final = 60.0
_BATCH_ROWS: Final = 10_000
"""Rows that are Python objects at a time."""


class KafkaSink(Sink):
    """A Kafka topic, exactly once for readers of committed records.

    Each epoch is one transaction, which also sets the epoch's number: the offset of the consumer group
    `stillstate-<root id>-<sink>`. A repetition after a crash, and a driver that was thought dead, are seen by it.
    Readers with `isolation.level=read_committed` see whole epochs, in order; readers of uncommitted records, which is
    the default of many clients, also see records of transactions that were ended without a commit.

    Args:
        topic: name of the topic.
        bootstrap_servers: `host:port` of some brokers, with commas between them.
        format: "json": each row is one JSON object. "columns": rows have the columns `value` (text or binary), and
            maybe `key`, `headers`, `partition` and `timestamp`, as for Spark's Kafka sink.
        key: with "json", the columns whose values are the record's key: one column's value as text (binary as it is),
            several as a JSON object. Records with one key keep their order.
        remove_where: boolean column: where it is true the record has no value (a tombstone), by which a compacted topic
            forgets the key. The column itself is not in the record.
        mark: give each record the headers `stillstate-writer` and `stillstate-epoch`.
        create: make the topic if it is not there: {"partitions": 3, "replication": 3, "config": {…}}. Without it, a
            topic that is not there is refused at the start.
        options: librdkafka's settings, such as {"security.protocol": "SASL_SSL", "compression.type": "lz4"}; in no
            manifest, message or log.
        options_env: by setting, the environment variable of the driver that has its value: {"sasl.password":
            "KAFKA_PASSWORD"}.
        timeout_s: how long brokers that do not answer are waited for, about; then the run ends and may be started
            again.
        unknown_epoch: what a start does if the newest snapshot names an epoch, and the group has no offset: "refuse",
            "write" it (it may be there twice then), or "skip" it (it may be missing then).
        on_rollback: what happens when the job has gone back to an older snapshot, with records that were published
            since: they stay, and come again ("continue"), or the start is refused ("refuse").

    Example:
        .write(KafkaSink("totals", bootstrap_servers="broker:9092", key="customer"))
    """

    may_have_python: ClassVar[bool] = False

    def __init__(
        self,
        topic: str,
        *,
        bootstrap_servers: str,
        format: Literal["json", "columns"] = "json",  # the name that Spark's users know
        key: str | Sequence[str] | None = None,
        remove_where: str = "",
        mark: bool = False,
        create: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        options_env: Mapping[str, str] | None = None,
        timeout_s: float = _TIMEOUT_S,
        unknown_epoch: WhenUnknown = "refuse",
        on_rollback: OnRollback = "continue",
    ) -> None:
        if not topic:
            raise InvalidConfiguration("KafkaSink needs the name of a topic")
        if unknown_epoch not in ("refuse", "write", "skip"):
            raise InvalidConfiguration(f"KafkaSink: unknown_epoch={unknown_epoch!r} must be refuse, write or skip")
        if not timeout_s > 0:
            raise InvalidConfiguration(f"KafkaSink: timeout_s={timeout_s!r} must be above 0")
        self.topic = topic
        self.mark = mark
        self.unknown_epoch = unknown_epoch
        self.on_rollback = self.checked(on_rollback)
        self._format = RecordFormat(format, (key,) if isinstance(key, str) else tuple(key or ()), remove_where)
        self._access = KafkaAccess(bootstrap_servers, dict(options or {}), dict(options_env or {}))
        self._create = _NewTopic.of(create) if create is not None else None
        self._timeout_s = timeout_s
        self._log: KafkaLog | None = None

    def __repr__(self) -> str:
        return f"KafkaSink({self.topic!r}, bootstrap_servers={self._access.servers!r})"

    def spec(self, job_name: str, job_uid: str, name: str, root: tuple[str, Mapping[str, Any]]) -> SinkSpec:
        """See `Sink.spec`: stage below the job root."""
        return SinkSpec.below_root(name, job_name, job_uid, root, name)

    def check(self, schema: pa.Schema, where: str) -> None:
        """See `Sink.check`."""
        self._format.check(schema, where)

    def layout(self, schema: pa.Schema) -> OutputLayout:
        """See `Sink.layout`. Sinks of one job may write rows of different columns to one topic."""
        return OutputLayout(f"kafka:{self._access.servers}/{self.topic}:{schema}", schema)

    def check_place(self, layout: OutputLayout, pending: Sequence[StagedFile], where: str) -> None:
        """See `Sink.check_place`: the topic is there, or the sink may make it.

        Raises:
            InvalidPipeline: it is not there. StoreUnavailable, StoreRefused: the cluster cannot be asked.
        """
        log = KafkaLog(self.topic, self._access, "", "", timeout_s=self._timeout_s)
        if self._create is None and not log.partitions():
            raise self._access.no_topic(self.topic, where)

    def own(self, spec: SinkSpec, claimant: Claimant) -> int:
        """Make the topic if the sink may, and fence the producers of earlier runs: nothing of theirs is committed from
        now on.

        Returns:
            0: what is staged below the root is the root's.
        """
        log = self._log_of(spec)
        if self._create is not None and not log.partitions():
            log.create(self._create.partitions, self._create.replication, self._create.config)
        pending = any(output.sink == spec.name and output.files for output in claimant.newest.outputs)
        log.begin(is_new=not pending)
        return 0

    def newest_published_epoch(self, spec: SinkSpec) -> int:
        """See `Sink.newest_published_epoch`: what the group says, of this root and sink."""
        newest = self._log_of(spec).newest()
        return 0 if newest is None else newest.epoch

    def publish(self, spec: SinkSpec, output: StagedOutput, spark: object) -> None:
        """Write an epoch's rows and its number in one transaction; a topic that has the epoch is left alone.

        Atomic: readers of committed records see all of it or nothing. After a crash anywhere, the next run ends the
        open transaction, looks, and writes the epoch if the topic does not have it.

        Raises:
            MissingFile: the topic does not have the epoch, and a staged file is gone.
            See `KafkaLog.write` for the others.
        """
        self._write(spec, output, "write")

    def publish_again(self, spec: SinkSpec, output: StagedOutput, spark: object) -> None:
        """See `publish`; output of an earlier run is not written if it is not known whether that run did.

        Raises:
            InvalidConfiguration: the group has no offset, and `unknown_epoch` does not say what to do.
        """
        self._write(spec, output, self.unknown_epoch)

    def _write(self, spec: SinkSpec, output: StagedOutput, unknown: WhenUnknown) -> None:
        if output.files:
            log = self._log_of(spec)
            marks: list[tuple[str, bytes | None]] = []
            if self.mark:
                marks = [("stillstate-writer", log.writer.encode()), ("stillstate-epoch", b"%d" % output.epoch)]
            records = _marked(lambda: self._records(spec, output), marks)
            mark = EpochMark(output.epoch, _digest(output))

            def write() -> None:
                log.write(mark, records, unknown)

            publish_unless_there(write, lambda: log.has(mark))

    def _records(self, spec: SinkSpec, output: StagedOutput) -> Iterator[Record]:
        store = spec.store()
        for file in output.files:
            try:
                data = store.read(file.staged, file.bytes)
            except FileNotFoundError as error:
                raise lost_file(spec, output, file, f"the Kafka topic {self.topic!r}") from error
            for batch in pq.ParquetFile(pa.BufferReader(data)).iter_batches(_BATCH_ROWS):
                yield from self._format.records(batch)

    def settle(self, spec: SinkSpec, output: StagedOutput) -> None:
        """Delete staged files that no restart will write again."""
        store = spec.store()
        for file in output.files:
            store.delete(file.staged)

    def _log_of(self, spec: SinkSpec) -> KafkaLog:
        # The root's id is in no other root; the job's name may change, and does not say who writes.
        writer = f"stillstate-{spec.root_id}-{spec.name}"
        if self._log is None or self._log.writer != writer:
            label = f"{spec.job}/{spec.name}"
            self._log = KafkaLog(self.topic, self._access, writer, label, timeout_s=self._timeout_s)
        return self._log


@dataclass(frozen=True)
class _NewTopic:
    partitions: int
    replication: int
    config: Mapping[str, str]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> _NewTopic:
        other = sorted(set(given) - {"partitions", "replication", "config"})
        if other:
            raise InvalidConfiguration(
                f"KafkaSink: create has {', '.join(other)}; it takes partitions, replication, config"
            )
        config = {str(name): str(value) for name, value in dict(given.get("config", {})).items()}
        return cls(int(given.get("partitions", 1)), int(given.get("replication", -1)), config)


def _marked(
    records: Callable[[], Iterator[Record]], marks: list[tuple[str, bytes | None]]
) -> Callable[[], Iterator[Record]]:
    if not marks:
        return records
    return lambda: ((*record[:4], [*(record[4] or []), *marks]) for record in records())


def _digest(output: StagedOutput) -> str:
    """Return a word for an epoch's files, by their names: they have the attempt of each task in them."""
    names = sorted(file.staged.rpartition("/")[2] for file in output.files)
    return xxhash.xxh3_128_hexdigest("\n".join(names).encode())
