"""The shop's demo: a broker, a database, Dagster, and the producer of its events, all in one work folder."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from examples.servers.dagster import DagsterStack
from examples.servers.kafka import KafkaBroker
from examples.servers.postgres import PostgresServer

__all__ = ["JOB", "PARTITIONS", "ShopStack"]

CONFIG: Final = Path(__file__).resolve().with_name("stillstate.yaml")
JOB: Final = "shop"
PARTITIONS: Final = 2


class ShopStack(DagsterStack):
    """The servers start with it and end with it.

    Args:
        work, port: see ``DagsterStack``; what an earlier demo left is removed.
    """

    def __init__(self, work: Path, *, port: int = 0) -> None:
        # The addresses are only known when the servers are there.
        super().__init__(work, demo="shop", config=CONFIG, job=JOB, leavings=("kafka",), port=port, fresh=True)
        self.broker = KafkaBroker(self.work / "kafka")
        self.database = PostgresServer()
        self.variables |= {"SHOP_KAFKA": self.broker.bootstrap, "SHOP_DATABASE": self.database.url()}
        self._producer: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.broker.start()
        for topic in ("orders", "payments", "alerts"):
            self.broker.create_topic(topic, PARTITIONS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self.broker.close()
        self.database.close()

    @property
    def lake(self) -> Path:
        """The Delta table of paid orders."""
        return self.work / "output" / "paid"

    def start_producer(self, seconds: int, rate: float) -> None:
        """Begin to send the events of so many seconds of event time."""
        what = ["--seconds", str(seconds), "--rate", str(rate), "--partitions", str(PARTITIONS)]
        command = ["-m", "examples.shop.produce", "--kafka", self.broker.bootstrap, *what]
        self._producer = self.spawn(command, self.work / "logs" / "producer.log")

    def producer_exit_code(self) -> int | None:
        """The producer's exit code; None while it runs."""
        return None if self._producer is None else self._producer.poll()
