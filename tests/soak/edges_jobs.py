"""Whole jobs of `make soak-edges`: Spark, Kafka in, every sink out; driver, broker and database killed at drawn moments."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, cycle, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from confluent_kafka import Producer
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

from state_runtime.base.faults import (
    DELTA_KILL_POINTS,
    ICEBERG_KILL_POINTS,
    KAFKA_KILL_POINTS,
    SQL_KILL_POINTS,
)
from tests.kafka_topics import messages, values
from tests.soak.edges_job import INPUT, ROWS_PER_EPOCH, iceberg_options
from tests.soak.edges_lives import LawBroken

if TYPE_CHECKING:
    from examples.servers.kafka import KafkaBroker
    from examples.servers.postgres import PostgresServer

__all__ = ["BLOWS_OF_A_JOB", "JobLife", "live_job"]

ROOT = Path(__file__).resolve().parents[2]
BLOWS_OF_A_JOB: Final = 8
_HANGS_S: Final = 300.0
_NAMES: Final = 7
_START_S: Final = (1.0, 12.0)
_MOMENT_S_MAX: Final = 1.0
_TOPICS: Final = (INPUT, "soak-rows", "soak-totals")
_POINTS: Final = (
    *("task-processed", "before-manifest", "manifest-written", "before-publish", "one-output-published", "published"),
    *DELTA_KILL_POINTS,
    *ICEBERG_KILL_POINTS,
    *SQL_KILL_POINTS,
    *KAFKA_KILL_POINTS,
)
_SERVERS: Final = (
    "broker",
    "database",
    "driver, within its start",
    "driver, at a moment",
    "driver, while output waits for the database",
)


class _Driver:
    """A driver of Spark's. One that hangs is killed, and then its lines end."""

    def __init__(self, world: JobLife, *arguments: str, kill_at: str = "") -> None:
        self.lines: list[str] = []
        self._errors: IO[bytes] = (world.folder / "driver.log").open("ab")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.soak.edges_job", str(world.folder)),
                *(world.broker.bootstrap, world.dsn, *arguments),
            ],
            cwd=ROOT,
            env={**os.environ, "STILLSTATE_KILL_AT": kill_at, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._guard = threading.Timer(_HANGS_S, self.kill)
        self._guard.start()

    def comes_to_an_epoch(self, more: int = 1) -> None:
        """Wait until it has made so many more.

        Raises:
            LawBroken: it ended, or hung, before.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())
            more -= line.startswith("epoch")
            if not more:
                return
        raise LawBroken(f"a driver that should go on ended: {self.lines[-3:]}")

    def kill(self) -> None:
        """End it and its processes by SIGKILL."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> int:
        """Wait for its end; its exit code."""
        assert self.process.stdout is not None
        self.lines += [line.strip() for line in self.process.stdout]
        code = self.process.wait()
        self._guard.cancel()
        self._errors.close()
        # What a kill at a point has left: its JVM and its workers.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return code

    def lives_for(self, seconds: float) -> bool:
        """Whether it is still there after a drawn time."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return True
        return False


@dataclass
class JobLife:
    """One job, its servers and its input.

    Attributes:
        kills: by what died and at which step.
    """

    name: str
    folder: Path
    broker: KafkaBroker
    database: PostgresServer
    dsn: str
    database_name: str
    draw: random.Random
    sent: int = 0
    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    rows: int = 0
    _drivers: list[_Driver] = field(default_factory=list)

    def _begun(self, *arguments: str, kill_at: str = "") -> _Driver:
        self._drivers.append(_Driver(self, *arguments, kill_at=kill_at))
        return self._drivers[-1]

    def close(self) -> None:
        """No driver outlives its job."""
        for driver in self._drivers:
            driver.kill()

    def send(self, epochs: int) -> None:
        """More input, of about so many epochs."""
        producer = Producer({"bootstrap.servers": self.broker.bootstrap, "enable.idempotence": True, "log_level": 0})
        first, self.sent = self.sent, self.sent + epochs * ROWS_PER_EPOCH
        for number in range(first, self.sent):
            producer.produce(INPUT, value=json.dumps(_event(number)), partition=number % 2)
        if producer.flush(60):
            raise LawBroken("the broker took no input within a minute")

    def meet(self, blow: str) -> None:
        """Play one disturbance. What it has started is dead behind it, but for the servers."""
        acts: Mapping[str, Callable[[], None]] = {
            "broker": self._broker_dies,
            "database": self._database_dies,
            "driver, within its start": self._driver_dies_in_its_start,
            "driver, at a moment": self._driver_dies_at_a_moment,
            "driver, while output waits for the database": self._driver_dies_while_output_waits,
        }
        if blow in acts:
            acts[blow]()
        else:
            self._driver_dies_at(blow)

    def _driver_dies_at(self, point: str) -> None:
        self.send(4)
        driver = self._begun("--to-end", kill_at=f"{point}:{self.draw.choice((1, 2, 3, 5))}")
        code = driver.end()
        if code not in (0, -signal.SIGKILL):
            raise LawBroken(f"a driver ended with {code}: {driver.lines[-3:]}")
        if code:
            self.kills["driver", point] += 1

    def _driver_dies_in_its_start(self) -> None:
        self.send(2)
        driver = self._begun()
        if driver.lives_for(self.draw.uniform(*_START_S)):
            driver.kill()
            self.kills["driver", "within its start"] += 1
        driver.end()

    def _driver_dies_at_a_moment(self) -> None:
        self.send(6)
        driver = self._begun()
        driver.comes_to_an_epoch(self.draw.choice((1, 2, 3)))
        driver.lives_for(self.draw.uniform(0, _MOMENT_S_MAX))
        self._kill(driver, "at a moment behind an epoch")

    def _broker_dies(self) -> None:
        """It comes back, and the same driver goes on."""
        self.send(4)
        driver = self._begun()
        driver.comes_to_an_epoch()
        driver.lives_for(self.draw.uniform(0, _MOMENT_S_MAX))
        self.broker.kill()
        self.kills["broker", "at a moment behind an epoch"] += 1
        self.broker.start()
        self.send(3)
        driver.comes_to_an_epoch(2)
        self._kill(driver, "behind the broker's return")

    def _database_dies(self) -> None:
        """Checkpoints go on without it; it comes back, and the same driver goes on."""
        driver = self._goes_on_without_database()
        self.database.start()
        self.send(2)
        driver.comes_to_an_epoch()
        self._kill(driver, "behind the database's return")

    def _driver_dies_while_output_waits(self) -> None:
        driver = self._goes_on_without_database()
        self._kill(driver, "while output waits for the database")
        self.database.start()

    def _goes_on_without_database(self) -> _Driver:
        self.send(6)
        driver = self._begun()
        driver.comes_to_an_epoch()
        self.database.kill()
        self.kills["database", "at a moment behind an epoch"] += 1
        driver.comes_to_an_epoch(3)
        return driver

    def _kill(self, driver: _Driver, when: str) -> None:
        driver.kill()
        driver.end()
        self.kills["driver", when] += 1

    def ends(self) -> None:
        """A driver is left alone, and every target is compared with the input.

        Raises:
            LawBroken: rows are lost or doubled.
        """
        self.send(1)
        driver = self._begun("--to-end")
        if code := driver.end():
            raise LawBroken(f"the driver that was left alone ended with {code}: {driver.lines[-3:]}")
        wanted = Counter((row["id"], row["name"], row["amount"]) for row in map(_event, range(self.sent)))
        totals: dict[str, tuple[int, int]] = {}
        for _, name, amount in wanted:
            n, total = totals.get(name, (0, 0))
            totals[name] = (n + 1, total + amount)
        for target, rows in self._rows().items():
            found = Counter((row["id"], row["name"], row["amount"]) for row in rows)
            if found != wanted:
                lost, doubled = wanted - found, found - wanted
                raise LawBroken(f"{target}: {lost.total()} rows lost, {doubled.total()} doubled: {lost}, {doubled}")
            self.rows += found.total()
        for target, rows in self._totals().items():
            kept = {row["name"]: (row["n"], row["total"]) for row in rows}
            if kept != totals or len(rows) != len(totals):
                raise LawBroken(f"{target}: {kept} instead of {totals}")
            self.rows += len(rows)

    def _rows(self) -> dict[str, Sequence[Mapping[str, Any]]]:
        return {**self._tables("rows"), "kafka rows": values(self.broker.bootstrap, "soak-rows")}

    def _totals(self) -> dict[str, Sequence[Mapping[str, Any]]]:
        newest = {m.key(): json.loads(m.value() or b"") for m in messages(self.broker.bootstrap, "soak-totals")}
        return {**self._tables("totals"), "kafka totals": list(newest.values())}

    def _tables(self, name: str) -> dict[str, Sequence[Mapping[str, Any]]]:
        iceberg = load_catalog("lake", **iceberg_options(self.folder)).load_table(f"soak.{name}")
        return {
            f"delta {name}": DeltaTable(str(self.folder / name)).to_pyarrow_table().to_pylist(),
            f"iceberg {name}": iceberg.scan().to_arrow().to_pylist(),
            f"postgres {name}": self.database.rows(f"SELECT * FROM soak_{name}", self.database_name),
        }


def _event(number: int) -> dict[str, Any]:
    return {"id": number, "name": f"n{number * 7919 % _NAMES}", "amount": number * 31 % 101 - 50}


def _blows(seed: int) -> Iterator[str]:
    """Each once before any comes again; every second one is of servers or of a moment."""
    draw = random.Random(f"{seed} jobs")
    points = chain.from_iterable(draw.sample(_POINTS, len(_POINTS)) for _ in cycle([None]))
    others = chain.from_iterable(draw.sample(_SERVERS, len(_SERVERS)) for _ in cycle([None]))
    return chain.from_iterable(zip(points, others))


def live_job(
    seed: int, number: int, broker: KafkaBroker, database: PostgresServer, tell: Callable[[str], None]
) -> JobLife:
    """One job, to its end.

    Raises:
        LawBroken: its folder stays.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"soak-edges-job-{seed}-{number}-"))
    name = database.database()
    life = JobLife(
        f"{seed}-{number}", folder, broker, database, database.url(name), name, random.Random(f"{seed} job {number}")
    )
    for topic in _TOPICS:
        broker.create_topic(topic, 2)
    try:
        for blow in islice(_blows(seed), number * BLOWS_OF_A_JOB, (number + 1) * BLOWS_OF_A_JOB):
            tell(blow)
            life.meet(blow)
        tell("the end")
        life.ends()
    finally:
        life.close()
    for topic in _TOPICS:
        broker.delete_topic(topic)
    return life
