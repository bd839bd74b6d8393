"""A Kafka topic gets each epoch once: over crashes of the driver and of the broker, and from drivers thought dead."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

from examples.servers.kafka import KafkaBroker, settled
from state_runtime.base import faults
from state_runtime.base.errors import (
    Fenced,
    InvalidConfiguration,
    InvalidPipeline,
    MissingFile,
    SnapshotInUse,
    StoreUnavailable,
)
from state_runtime.base.faults import KAFKA_KILL_POINTS
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.sinks.kafka import KafkaSink
from state_runtime.sinks.kafka_access import Passing
from state_runtime.snapshot.manifest import StagedOutput
from stillstate.testing import check_sink
from tests.kafka_topics import messages, values

pytestmark = pytest.mark.servers
SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])
UID = "0123456789abcdef"


@pytest.fixture
def topic(kafka: KafkaBroker) -> str:
    name = f"t-{uuid.uuid4().hex[:12]}"
    kafka.create_topic(name, 2)
    return name


class Crash(BaseException):
    """The end of a process."""


@dataclass(frozen=True)
class Claim:
    """As much of a claimant as the sink asks for."""

    outputs: tuple[StagedOutput, ...]

    @property
    def newest(self) -> Claim:
        return self


class Driver:
    """A driver's side of a sink: it has just started."""

    def __init__(
        self, bootstrap: str, topic: str, root: Path, schema: pa.Schema = SCHEMA, uid: str = UID, **how: Any
    ) -> None:
        how = {"timeout_s": 30.0, **({"key": "k"} if how.get("format") != "columns" else {}), **how}
        self.sink = KafkaSink(topic, bootstrap_servers=bootstrap, **how)
        self.sink.check(schema, "sink 'out'")
        self.schema = schema
        self.spec: SinkSpec = self.sink.spec("orders", uid, "out", (str(root), {}))

    def staged(self, epoch: int, *rows: dict[str, Any], attempt: str = "attempt") -> StagedOutput:
        staging = self.spec.open(1, epoch, 0, attempt)
        staging.write(pa.RecordBatch.from_pylist(list(rows), schema=self.schema))
        return StagedOutput(self.spec.name, epoch, staging.finish().files)

    def start(self, *outputs: StagedOutput) -> None:
        self.sink.own(self.spec, Claim(outputs))  # type: ignore[arg-type]

    def publish(self, output: StagedOutput) -> None:
        self.sink.publish(self.spec, output, None)

    def publish_again(self, output: StagedOutput) -> None:
        self.sink.publish_again(self.spec, output, None)

    @property
    def newest(self) -> int:
        return self.sink.newest_published_epoch(self.spec)


@contextmanager
def at(point: str, act: Callable[[], None]) -> Iterator[list[str]]:
    """Do something at the first passage of a point."""
    passed: list[str] = []

    def reach(name: str) -> None:
        passed.append(name)
        if name == point and passed.count(name) == 1:
            act()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "reach", reach)
        yield passed


def crash() -> None:
    raise Crash


@pytest.mark.parametrize("how", [{}, {"key": "k"}, {"mark": True}], ids=["rows", "keys", "marked"])
def test_kafka_keeps_the_contract_of_sinks(kafka: KafkaBroker, topic: str, tmp_path: Path, how: Any) -> None:
    check_sink(
        lambda: KafkaSink(topic, bootstrap_servers=kafka.bootstrap, **how),
        lambda: values(kafka.bootstrap, topic),
        str(tmp_path / "root"),
    )


def test_the_contract_finds_a_sink_that_forgets_who_writes(kafka: KafkaBroker, topic: str, tmp_path: Path) -> None:
    """A test that cannot fail protects nothing: one id for all roots, as the epoch alone would be."""

    class Forgets(KafkaSink):
        def spec(self, job_name: str, job_uid: str, name: str, root: Any) -> SinkSpec:
            return super().spec(job_name, uuid.uuid5(uuid.NAMESPACE_OID, topic).hex, name, root)

    with pytest.raises(AssertionError, match="a root that was made anew has published nothing here"):
        check_sink(
            lambda: Forgets(topic, bootstrap_servers=kafka.bootstrap),
            lambda: values(kafka.bootstrap, topic),
            str(tmp_path / "root"),
        )


@pytest.mark.parametrize("point", KAFKA_KILL_POINTS)
def test_a_crash_anywhere_in_a_transaction_is_repaired_by_the_next_driver(
    kafka: KafkaBroker, topic: str, tmp_path: Path, point: str
) -> None:
    driver = Driver(kafka.bootstrap, topic, tmp_path)
    driver.start()
    driver.publish(driver.staged(1, {"k": "a", "n": 1}))
    output = driver.staged(2, {"k": "b", "n": 2}, {"k": "c", "n": 3})
    with at(point, crash), pytest.raises(Crash):
        driver.publish(output)
    following = Driver(kafka.bootstrap, topic, tmp_path)
    assert following.newest == (2 if point == "kafka-committed" else 1)
    following.start(output)
    following.publish_again(output)
    following.publish(following.staged(3, {"k": "d", "n": 4}))
    assert sorted(row["n"] for row in values(kafka.bootstrap, topic)) == [1, 2, 3, 4]


def test_a_driver_that_was_thought_dead_cannot_commit_once_the_next_one_has_begun(
    kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    """It sleeps with all of its records and the number in the broker: its epoch is there once, and it learns that."""
    zombie, following = (Driver(kafka.bootstrap, topic, tmp_path) for _ in range(2))
    zombie.start()
    output = zombie.staged(1, {"k": "a", "n": 1})

    def takes_over() -> None:
        following.start(output)
        following.publish_again(output)

    with at("kafka-before-commit", takes_over):
        zombie.publish(output)
    following.publish(following.staged(2, {"k": "b", "n": 2}))
    assert sorted(row["n"] for row in values(kafka.bootstrap, topic)) == [1, 2]
    uncommitted = messages(kafka.bootstrap, topic, committed=False)
    assert len(uncommitted) == 3, "its records lie there, and only readers of uncommitted ones see them"


@pytest.mark.parametrize("point", KAFKA_KILL_POINTS)
@pytest.mark.parametrize("rows", [1, 5_000], ids=["one row", "many rows"])
def test_a_driver_that_slept_anywhere_in_its_transaction_finds_the_epoch_there_and_goes_on(
    kafka: KafkaBroker, topic: str, tmp_path: Path, point: str, rows: int
) -> None:
    """The next one has written it meanwhile: whatever the library says of a fenced producer, it is looked at once more."""
    zombie, following = (Driver(kafka.bootstrap, topic, tmp_path) for _ in range(2))
    zombie.start()
    output = zombie.staged(1, *({"k": f"k{n}", "n": n} for n in range(rows)))

    def takes_over() -> None:
        following.start(output)
        following.publish_again(output)

    with at(point, takes_over):
        zombie.publish(output)
    assert sorted(row["n"] for row in values(kafka.bootstrap, topic)) == list(range(rows))


def test_a_driver_whose_transaction_was_ended_by_the_broker_makes_it_again(
    kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    """The broker ends one that takes too long, and fences its producer: nobody else has written the epoch."""
    driver = Driver(kafka.bootstrap, topic, tmp_path)
    driver.start()
    other = Driver(kafka.bootstrap, topic, tmp_path)
    with at("kafka-produced", lambda: other.start()) as passed:
        driver.publish(driver.staged(1, {"k": "a", "n": 1}))
    assert passed.count("kafka-committed") == 2, "of the other one's number, and of the epoch"
    assert values(kafka.bootstrap, topic) == [{"k": "a", "n": 1}]


def test_a_driver_that_is_fenced_again_and_again_stops(kafka: KafkaBroker, topic: str, tmp_path: Path) -> None:
    driver, other = (Driver(kafka.bootstrap, topic, tmp_path) for _ in range(2))
    driver.start()

    def reach(name: str) -> None:
        if name == "kafka-produced" and not begun:
            begun.append(1)
            Driver(kafka.bootstrap, topic, tmp_path).start()
            begun.clear()

    begun: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "reach", reach)
        with pytest.raises(Fenced, match="another driver writes to the Kafka topic"):
            driver.publish(driver.staged(1, {"k": "a", "n": 1}))
    other.start()
    assert values(kafka.bootstrap, topic) == []


def test_an_unknown_outcome_is_read_back(kafka: KafkaBroker, topic: str, tmp_path: Path) -> None:
    """The commit was made, and its answer was lost."""
    driver = Driver(kafka.bootstrap, topic, tmp_path)
    driver.start()

    with at("kafka-committed", lambda: None) as passed:
        log = driver.sink._log_of(driver.spec)
        transact, lost = log._transact, []

        def made_and_lost(*given: Any) -> None:
            transact(*given)
            if not lost:
                lost.append(1)
                log._give_up()
                raise Passing("the answer was lost")

        log._transact = made_and_lost  # type: ignore[method-assign]
        driver.publish(driver.staged(1, {"k": "a", "n": 1}))
    assert (len(lost), passed.count("kafka-committed")) == (1, 1)
    assert values(kafka.bootstrap, topic) == [{"k": "a", "n": 1}]


@pytest.mark.parametrize("unknown", ["refuse", "write", "skip"])
def test_a_number_that_is_gone_is_not_guessed(kafka: KafkaBroker, topic: str, tmp_path: Path, unknown: Any) -> None:
    """As after `offsets.retention.minutes`: whether the epoch that the snapshot names was written is not known."""
    driver = Driver(kafka.bootstrap, topic, tmp_path, unknown_epoch=unknown)
    driver.start()
    output = driver.staged(1, {"k": "a", "n": 1})
    driver.publish(output)
    forget(kafka, driver)
    following = Driver(kafka.bootstrap, topic, tmp_path, unknown_epoch=unknown)
    following.start(output)
    if unknown == "refuse":
        with pytest.raises(InvalidConfiguration, match=r"whether epoch 1.*is not known.*unknown_epoch"):
            following.publish_again(output)
    else:
        following.publish_again(output)
    expected = [1, 1] if unknown == "write" else [1]
    assert [row["n"] for row in values(kafka.bootstrap, topic)] == expected


def test_a_number_that_goes_while_the_job_runs_is_not_missed(kafka: KafkaBroker, topic: str, tmp_path: Path) -> None:
    """The sink is quiet for longer than offsets are kept. Its producer is not fenced, so nobody else has written."""
    driver = Driver(kafka.bootstrap, topic, tmp_path)
    driver.start()
    driver.publish(driver.staged(1, {"k": "a", "n": 1}))
    forget(kafka, driver)
    driver.publish(driver.staged(2, {"k": "b", "n": 2}))
    assert Driver(kafka.bootstrap, topic, tmp_path).newest == 2


def test_a_first_start_leaves_a_number_so_that_its_absence_means_something(
    kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    """A crash before the first epoch was written is no case of not knowing."""
    driver = Driver(kafka.bootstrap, topic, tmp_path)
    driver.start()
    output = driver.staged(1, {"k": "a", "n": 1})
    following = Driver(kafka.bootstrap, topic, tmp_path)
    following.start(output)
    following.publish_again(output)
    assert values(kafka.bootstrap, topic) == [{"k": "a", "n": 1}]


def forget(kafka: KafkaBroker, driver: Driver) -> None:
    group = driver.sink._log_of(driver.spec).writer
    kafka.admin.delete_consumer_groups([group])[group].result(30)


def test_a_copy_of_the_root_is_not_taken_for_the_root(kafka: KafkaBroker, topic: str, tmp_path: Path) -> None:
    """It has the same id and gives the same numbers to other rows: to take them for a repetition would lose them."""
    driver, copy = (Driver(kafka.bootstrap, topic, tmp_path) for _ in range(2))
    driver.publish(driver.staged(1, {"k": "a", "n": 1}))
    with pytest.raises(SnapshotInUse, match=r"has epoch 1 .* with other rows: a copy of the job's root"):
        copy.publish(copy.staged(1, {"k": "b", "n": 2}, attempt="other"))


def test_what_the_topic_does_not_take_is_said_once_and_comes_when_it_is_put_right(
    kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    """Nothing of the epoch is visible until then."""
    kafka.create_topic(f"{topic}-small", max_message_bytes="1000")
    kafka.create_topic(f"{topic}-compacted", cleanup_policy="compact")
    columns = pa.schema([("key", pa.string()), ("value", pa.string()), ("partition", pa.int32())])
    refused: list[tuple[str, dict[str, Any], str]] = [
        (topic, {"key": "a", "value": "x" * 2_000_000, "partition": None}, "Raise `max.message.bytes`"),
        (f"{topic}-small", {"key": "a", "value": "x" * 5_000, "partition": None}, "Raise `max.message.bytes`"),
        (f"{topic}-compacted", {"key": None, "value": "x", "partition": None}, "no record without a key"),
        (topic, {"key": "a", "value": "x", "partition": 7}, "names one that the topic does not have"),
    ]
    staged: list[StagedOutput] = []
    for epoch, (name, row, words) in enumerate(refused, 1):
        driver = Driver(kafka.bootstrap, name, tmp_path, columns, format="columns")
        driver.start()
        output = driver.staged(epoch, {"key": "good", "value": "x", "partition": None}, row)
        staged.append(output)
        with pytest.raises(InvalidPipeline, match=words):
            driver.publish(output)
        assert messages(kafka.bootstrap, name) == []
    small = refused[1][0]
    raised = ConfigEntry("max.message.bytes", "10000", incremental_operation=AlterConfigOpType.SET)
    settled(kafka.admin.incremental_alter_configs([ConfigResource("topic", small, incremental_configs=[raised])]))
    following = Driver(kafka.bootstrap, small, tmp_path, columns, format="columns")
    following.start(staged[1])
    following.publish_again(staged[1])
    assert len(messages(kafka.bootstrap, small)) == 2


def test_records_are_what_the_columns_say_and_keep_their_order(kafka: KafkaBroker, topic: str, tmp_path: Path) -> None:
    """A key's records are in one partition, in the order of the rows."""
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    schema = pa.schema(
        [("key", pa.string()), ("value", pa.binary()), ("headers", headers), ("timestamp", pa.timestamp("us", "UTC"))]
    )
    driver = Driver(kafka.bootstrap, topic, tmp_path, schema, format="columns", mark=True)
    rows = [{"key": f"k{n % 7}", "value": b"%d" % n, "headers": None, "timestamp": None} for n in range(2000)]
    rows[0] = {**rows[0], "headers": [{"key": "h", "value": b"x"}], "timestamp": 1_500_000, "value": None}
    driver.publish(driver.staged(4, *rows))
    found = messages(kafka.bootstrap, topic)
    by_key: dict[Any, list[Any]] = {}
    for message in found:
        by_key.setdefault(message.key(), []).append(message.value())
    assert by_key == {
        f"k{k}".encode(): [None if n == 0 else b"%d" % n for n in range(2000) if n % 7 == k] for k in range(7)
    }
    assert len({(message.key(), message.partition()) for message in found}) == 7
    marked = [("stillstate-writer", f"stillstate-{UID}-out".encode()), ("stillstate-epoch", b"4")]
    first = next(message for message in found if message.value() is None)
    assert (first.headers(), first.timestamp()[1]) == ([("h", b"x"), *marked], 1_500)
    assert all(message.headers() == marked for message in found if message is not first)


def test_a_topic_that_is_not_there_is_refused_or_made(kafka: KafkaBroker, topic: str, tmp_path: Path) -> None:
    missing = Driver(kafka.bootstrap, f"{topic}-new", tmp_path)
    with pytest.raises(InvalidPipeline, match=rf"there is no topic '{topic}-new'.*kafka-topics.sh --bootstrap-server"):
        missing.sink.check_place(missing.sink.layout(SCHEMA), (), "sink 'out'")
    create = {"partitions": 3, "replication": 1, "config": {"cleanup.policy": "compact"}}
    making = Driver(kafka.bootstrap, f"{topic}-new", tmp_path, create=create)
    making.sink.check_place(making.sink.layout(SCHEMA), (), "sink 'out'")
    for _ in range(2):
        making.start()
    making.publish(making.staged(1, {"k": "a", "n": 1}))
    missing.sink.check_place(missing.sink.layout(SCHEMA), (), "sink 'out'")
    assert values(kafka.bootstrap, f"{topic}-new") == [{"k": "a", "n": 1}]


def test_the_newest_epoch_is_the_groups_word(kafka: KafkaBroker, topic: str, tmp_path: Path) -> None:
    """A root that was put back from a backup goes on above it; another root has its own."""
    driver = Driver(kafka.bootstrap, topic, tmp_path)
    assert driver.newest == 0
    driver.publish(driver.staged(41, {"k": "a", "n": 1}))
    assert Driver(kafka.bootstrap, topic, tmp_path).newest == 41
    assert Driver(kafka.bootstrap, topic, tmp_path, uid="fedcba9876543210").newest == 0


def test_a_staged_file_that_was_lost_is_named(kafka: KafkaBroker, topic: str, tmp_path: Path) -> None:
    driver = Driver(kafka.bootstrap, topic, tmp_path)
    output = driver.staged(5, {"k": "a", "n": 1})
    (tmp_path / output.files[0].staged).unlink()
    with pytest.raises(MissingFile, match="does not have epoch 5"):
        driver.publish(output)


def test_written_rows_are_not_kept_twice(kafka: KafkaBroker, topic: str, tmp_path: Path) -> None:
    driver = Driver(kafka.bootstrap, topic, tmp_path)
    output = driver.staged(1, {"k": "a", "n": 1})
    driver.publish(output)
    driver.sink.settle(driver.spec, output)
    assert not list(tmp_path.rglob("*.parquet"))
    driver.publish_again(output)
    assert len(values(kafka.bootstrap, topic)) == 1


def test_a_broker_that_is_killed_in_a_transaction_costs_no_row_and_doubles_none(tmp_path: Path) -> None:
    """SIGKILL before and behind the records, and at the commit; it comes back while the sink waits."""
    with KafkaBroker(tmp_path / "broker") as broker:
        broker.create_topic("t", 2)
        driver = Driver(broker.bootstrap, "t", tmp_path / "root", timeout_s=90.0)
        driver.start()
        restarts: list[threading.Thread] = []

        def restart() -> None:
            broker.kill()
            restarts.append(threading.Thread(target=broker.start))
            restarts[-1].start()

        points = ("kafka-begun", "kafka-produced", "kafka-before-commit", "kafka-committed")
        for epoch, point in enumerate(points, 1):
            with at(point, restart):
                driver.publish(driver.staged(epoch, *({"k": f"k{n}", "n": 10 * epoch + n} for n in range(4))))
            restarts[-1].join()
        found = sorted(row["n"] for row in values(broker.bootstrap, "t"))
        assert found == [10 * epoch + n for epoch in range(1, 5) for n in range(4)]


def test_a_broker_that_stays_away_ends_the_run_and_what_is_staged_comes_later(tmp_path: Path) -> None:
    with KafkaBroker(tmp_path / "broker") as broker:
        broker.create_topic("t")
        driver = Driver(broker.bootstrap, "t", tmp_path / "root", timeout_s=2.0)
        driver.start()
        output = driver.staged(1, {"k": "a", "n": 1})
        broker.kill()
        with pytest.raises(StoreUnavailable, match="Nothing is lost: start again"):
            driver.publish(output)
        broker.start()
        following = Driver(broker.bootstrap, "t", tmp_path / "root", timeout_s=60.0)
        following.start(output)
        following.publish_again(output)
        assert values(broker.bootstrap, "t") == [{"k": "a", "n": 1}]
