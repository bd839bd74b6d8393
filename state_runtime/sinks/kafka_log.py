"""A Kafka topic as one writer sees it: what it has of this writer, and transactions that say so with their records.

A *writer* is a job root's sink. Its name is a transactional id and the id of a consumer group. The group consumes
nothing: the offset that it has of partition 0 of the topic is the number of the newest epoch, and is set in the
transaction that has the epoch's records (KIP-98, KIP-447: made for those who consume, transform and produce).

States of a `KafkaLog`:

    1. no producer    nothing is known; `newest` looks without disturbing anybody
    2. begun          `init_transactions` has ended what another producer of this writer had open, and no other one can
                      commit from now on; then the offset was read, and is the truth until this producer is fenced
    3. in a transaction; ends in 2 by a commit, and in 1 by any error: whatever became of it, it is looked at again

A crash in 3 leaves records that no reader of committed records sees, and that are settled by the next `begin`, or by
the broker after `transaction.timeout.ms`. Rows come from staged files, so a transaction can always be made again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any, Final, Literal, TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from state_runtime.base import faults
from state_runtime.base.errors import Fenced, InvalidConfiguration, SnapshotInUse, StoreUnavailable
from state_runtime.base.patience import patience_s
from state_runtime.sinks.kafka_access import FencedOut, KafkaAccess, Passing, error_of, is_of_library, library
from state_runtime.sinks.kafka_records import Record

__all__ = ["EpochMark", "KafkaLog", "WhenUnknown"]

_LOG = logging.getLogger(__name__)
_WAIT_S_MAX: Final = 2.0
_CALL_S_MAX: Final = 10.0
"""For a question to a broker; it is asked again."""
_ABORT_S_MAX: Final = 5.0
_POLL_S: Final = 0.1
_NUMBER_S_MAX: Final = 10.0
"""For the offset of an epoch, a small request. Longer than that, and it is the library that waits for a coordinator it
does not look for (see `_in_time`): a new producer is quicker."""
_FENCES_MAX: Final = 1
_PARTITION: Final = 0

WhenUnknown = Literal["write", "refuse", "skip"]
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class EpochMark:
    """What the group has of the newest epoch.

    Attributes:
        digest: of the names of the epoch's staged files, which are never used twice; empty if it has no epoch.
    """

    epoch: int
    digest: str = ""


class KafkaLog:
    """One topic and one writer.

    Args:
        writer: see above.
        label: who that is, for people who look at the group.
        timeout_s: how long a broker that does not answer is waited for, about.
        wait: between two attempts, by default random and growing.
    """

    def __init__(
        self, topic: str, access: KafkaAccess, writer: str, label: str, *, timeout_s: float, wait: Any = None
    ) -> None:
        self._topic = topic
        self._access = access
        self.writer = writer
        self._label = label
        self._timeout_s = timeout_s
        self._wait = wait_random_exponential(max=_WAIT_S_MAX) if wait is None else wait
        self._admin: Any = None
        self._group: Any = None
        self._producer: Any = None
        self._newest: EpochMark | None = None
        self._seen: Any = None
        self._undelivered: Any = None
        self._fences = 0

    def __getstate__(self) -> dict[str, Any]:
        clients = {"_admin": None, "_group": None, "_producer": None, "_newest": None, "_seen": None}
        return {**self.__dict__, **clients, "_undelivered": None}

    def newest(self) -> EpochMark | None:
        """Return what was committed last; None if the group has no offset. Nobody is fenced.

        A transaction that is open does not count: its epoch is one that a snapshot names.
        """
        return self._patiently(lambda: self._look(stable=False))

    def has(self, mark: EpochMark) -> bool:
        """Return whether the topic has an epoch by now, whatever this producer knows. Nobody is fenced.

        Raises:
            SnapshotInUse: it has other records for it.
        """
        return self._patiently(lambda: self._has(self._look(stable=False), mark))

    def begin(self, *, is_new: bool) -> EpochMark | None:
        """Fence all other producers of this writer, settle what they have open, and return what is committed then.

        The group's offset is written again, so that it lives from now on for as long as offsets are kept.

        Args:
            is_new: the newest snapshot names no output of this sink, so a group without an offset means that no epoch
                was published: epoch 0 is written.
        """

        def once() -> EpochMark | None:
            self._connect()
            mark = EpochMark(0) if self._newest is None and is_new else self._newest
            if mark is not None:
                self._transact(mark, iter(()))
            return self._newest

        self._fences = 0
        return self._patiently(once)

    def write(self, mark: EpochMark, records: Callable[[], Iterable[Record]], unknown: WhenUnknown = "write") -> bool:
        """Write an epoch's records and its number in one transaction, unless the topic has the epoch, or a later one.

        Args:
            records: begins anew at each call.
            unknown: what to do if the group has no offset.

        Returns:
            Whether this call wrote it.

        Raises:
            Fenced: other producers of this writer ended the transaction, again and again.
            SnapshotInUse: the topic has the epoch with other records.
            StoreUnavailable, StoreRefused: start again; what is staged comes then.
            InvalidPipeline: the topic does not take the rows, or is not there.
        """
        self._fences = 0
        return self._patiently(lambda: self._write_once(mark, records, unknown))

    def _write_once(self, mark: EpochMark, records: Callable[[], Iterable[Record]], unknown: WhenUnknown) -> bool:
        if self._producer is None:
            # Whoever comes too late does not fence the one that was faster.
            if self._has(self._look(stable=False), mark):
                return False
            self._connect()
        if self._has(self._newest, mark):
            return False
        if self._newest is None and unknown != "write":
            if unknown == "skip":
                return False
            raise self._forgotten(mark)
        self._transact(mark, records())
        return True

    def _has(self, found: EpochMark | None, mark: EpochMark) -> bool:
        """Return whether the topic has an epoch.

        Raises:
            SnapshotInUse: it has other records for it.
        """
        if found is None or found.epoch < mark.epoch:
            return False
        if found.epoch == mark.epoch and found.digest != mark.digest:
            raise SnapshotInUse(
                f"the Kafka topic {self._topic!r} has epoch {mark.epoch} of {self.writer!r} with other rows: a copy of "
                "the job's root writes here under the same id. Nothing was written. Let one of the two go, or give "
                "one a topic of its own"
            )
        return True

    def _forgotten(self, mark: EpochMark) -> InvalidConfiguration:
        return InvalidConfiguration(
            f"the Kafka group {self.writer!r} has no offset for topic {self._topic!r}, so whether epoch {mark.epoch}, "
            "which the newest snapshot names, was written before the last run ended is not known. Offsets go when a "
            "job was away for longer than the broker's `offsets.retention.minutes`, or when the group or the topic is "
            "deleted. If the job wrote to another topic until now, start it once with that one. Else look into the "
            'topic, and start once with KafkaSink(…, unknown_epoch="write") or "skip". Nothing was written'
        )

    def _connect(self) -> None:
        """Become the only producer of this writer."""
        with self._explained():
            self._group = self._group or self._access.consumer(self.writer, "read_committed", self._see)
            self._seen = None
            self._producer = self._access.producer(self.writer, self._label, self._see)
            self._producer.init_transactions(self._timeout_s)
            faults.reach("kafka-fenced")
            self._newest = self._look(stable=True)

    def _transact(self, mark: EpochMark, records: Iterable[Record]) -> None:
        """Commit records and the number together."""
        producer, place = self._producer, library().TopicPartition
        self._undelivered = None
        with self._explained():
            producer.begin_transaction()
            faults.reach("kafka-begun")
            self._produce(producer, records)
            self._flush(producer)
            faults.reach("kafka-produced")
            offset = place(self._topic, _PARTITION, mark.epoch, metadata=f"{mark.digest} {self._label}")
            group = self._group.consumer_group_metadata()
            _in_time(lambda: producer.send_offsets_to_transaction([offset], group, _NUMBER_S_MAX))
            faults.reach("kafka-before-commit")
            producer.commit_transaction(self._timeout_s)
        faults.reach("kafka-committed")
        self._newest = mark

    def _produce(self, producer: Any, records: Iterable[Record]) -> None:
        """Hand records to the client, which sends those of a partition in this order.

        This is a call for each record, 3 us. The library's call for many is no faster, and it ignores partitions.
        """
        produce, topic, report = producer.produce, self._topic, self._report
        for key, value, partition, time_ms, headers in records:
            while True:
                try:
                    produce(topic, value, key, partition, on_delivery=report, timestamp=time_ms, headers=headers)
                    break
                except BufferError:
                    self._make_room(producer)

    def _make_room(self, producer: Any) -> None:
        before = len(producer)
        for _ in range(1 + int(self._timeout_s / _POLL_S)):
            producer.poll(_POLL_S)
            if len(producer) < before:
                return
        raise Passing(f"{before:,} records wait, and the brokers take none")

    def _flush(self, producer: Any) -> None:
        left = producer.flush(self._timeout_s)
        if self._undelivered is not None:
            raise library().KafkaException(self._undelivered)
        if left:
            raise Passing(f"{left:,} records were not acknowledged")

    def _report(self, error: Any, _: Any) -> None:
        self._undelivered = self._undelivered or error

    def _see(self, error: Any) -> None:
        self._seen = error

    def _look(self, *, stable: bool) -> EpochMark | None:
        """Read the group's offset.

        Args:
            stable: wait for a transaction that may change it.
        """
        place = library().TopicPartition(self._topic, _PARTITION)
        with self._explained(), self._looking(isolation="read_committed" if stable else "read_uncommitted") as reader:
            (found,) = reader.committed([place], min(_CALL_S_MAX, self._timeout_s))
            if found.error is not None:
                raise library().KafkaException(found.error)
        return EpochMark(found.offset, (found.metadata or "").partition(" ")[0]) if found.offset >= 0 else None

    @contextmanager
    def _looking(self, isolation: str = "read_committed") -> Iterator[Any]:
        """Give a consumer for one question. One that has lost a coordinator may ask the lost one for ever."""
        reader = self._access.consumer(self.writer, isolation, self._see)
        try:
            yield reader
        except library().KafkaException:
            reader.poll(0)  # What a connection was refused for is said nowhere else.
            raise
        finally:
            reader.close()

    def partitions(self) -> int:
        """Return how many partitions the topic has; 0 if it is not there."""

        def once() -> int:
            with self._explained(), self._looking() as reader:
                topics = reader.list_topics(self._topic, timeout=min(_CALL_S_MAX, self._timeout_s)).topics
                topic = topics.get(self._topic)
                if topic is None or (topic.error is not None and topic.error.name() == "UNKNOWN_TOPIC_OR_PART"):
                    return 0
                if topic.error is not None:
                    raise library().KafkaException(topic.error)
                return len(topic.partitions)

        return self._patiently(once)

    def create(self, partitions: int, replication: int, config: Mapping[str, str]) -> None:
        """Make the topic; one that is there stays as it is."""
        from confluent_kafka.cimpl import NewTopic

        def once() -> None:
            self._admin = self._admin or self._access.admin()
            wanted = NewTopic(self._topic, partitions, replication, config=dict(config))
            with self._explained():
                try:
                    self._admin.create_topics([wanted])[self._topic].result(2 * _CALL_S_MAX)
                except library().KafkaException as error:
                    if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
                        raise

        self._patiently(once)

    def _patiently(self, act: Callable[[], _Answer]) -> _Answer:
        """Do it again until the time is over.

        Raises:
            StoreUnavailable: it did not pass.
        """
        retrying = Retrying(
            stop=stop_after_delay(patience_s(self._timeout_s)),
            wait=self._wait,
            retry=retry_if_exception_type((Passing, FencedOut)),
            reraise=True,
        )
        try:
            return retrying(act)
        except (Passing, FencedOut) as error:
            raise StoreUnavailable(
                f"the Kafka cluster {self._access.servers} did not do it for topic {self._topic!r} in "
                f"{patience_s(self._timeout_s):g} s: {error}. Nothing is lost: start again; the output is staged "
                "and comes then. An epoch that takes longer than its transaction may needs "
                "options={'transaction.timeout.ms': …}"
            ) from error

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the library's errors into what they mean; after any error the producer is given up."""
        try:
            yield
            self._seen = None
        except (library().KafkaException, SystemError) as error:
            said = error_of(error)
            if said is not None and not said.fatal():
                said = self._heard(said)
            self._give_up()
            if not is_of_library(error):
                raise
            # What is lost was fatal, and of a transactional producer that is the end by another one.
            meaning = (
                FencedOut("the client library did not say why it ended a call")
                if said is None
                else self._access.meaning(said, self._topic, self.writer, self._seen)
            )
            if isinstance(meaning, FencedOut):
                meaning = self._fenced(meaning)
            _LOG.info("Kafka topic %s: %s", self._topic, meaning)
            raise meaning from error
        except Exception:
            self._give_up()
            raise

    def _heard(self, said: Any) -> Any:
        """Let the library call back with what a connection was refused for; return its error, or a fatal one that it
        has come to know since."""
        if self._producer is not None:
            try:
                self._producer.poll(0)
            except (library().KafkaException, SystemError) as error:
                if not is_of_library(error):
                    raise
                return error_of(error)
        return said

    def _fenced(self, meaning: FencedOut) -> Exception:
        """Decide about a producer that was fenced.

        What a snapshot names may be written by whoever has begun last, so one more look is no harm: the broker fences
        also a driver that slept through its own transaction.
        """
        self._fences += 1
        if self._fences <= _FENCES_MAX:
            return meaning
        return Fenced(
            f"another driver writes to the Kafka topic {self._topic!r} as {self.writer!r}, and ended the transaction "
            f"of this one ({meaning}). Nothing of it is visible; the other one writes what the snapshot names"
        )

    def _give_up(self) -> None:
        """End an open transaction, so that no reader waits for it, and forget all clients."""
        producer, self._producer = self._producer, None
        # A client that has lost a coordinator may ask the lost one for ever (see `_in_time`).
        self._group = self._newest = None
        if producer is None:
            return
        try:
            producer.abort_transaction(_ABORT_S_MAX)
        except (library().KafkaException, SystemError) as error:
            if not is_of_library(error):
                raise
            # None was open, or the broker is away: the next `init_transactions` ends it.
            _LOG.debug("Kafka topic %s: nothing was aborted: %s", self._topic, error)
        producer.purge()


def _in_time(call: Callable[[], None]) -> None:
    """Call, and go on without an answer if there is none in time.

    After a group's coordinator was restarted `send_offsets_to_transaction` may wait for ever, whatever its timeout says
    (librdkafka 2.16, its issues 5456 and 5511). The thread ends with the process; what its producer has open is ended
    by the next one's `init_transactions`.

    Raises:
        Passing: there was no answer.
    """
    answer: Future[None] = Future()

    def run() -> None:
        try:
            call()
            answer.set_result(None)
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=run, name="kafka-offsets", daemon=True).start()
    try:
        answer.result(_NUMBER_S_MAX + 1)
    except NotInTime as error:
        raise Passing("the coordinator of the group did not take the epoch's number") from error
