"""A job that tells where it ran, and what must come out of it."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from state_runtime import ParquetSink, StreamingJob
from state_runtime.spark.executor import executor_id
from tests.job_settings import job_settings

from ..spark.jobs import SCHEMA, Steps

SHARDS = 6
_STEPS = "id long, name string, seen long, total long, previous long, executor string, disk string"


class StepsAndPlaces(Steps):
    """The same rows, with the executor and the disk that the key's state was on.

    Args:
        rounds: of hashing that each row costs; a thousand take half a millisecond or more.
        slow: a file; while it is there a row costs twenty times as much.
    """

    def __init__(self, rounds: int, slow: Path) -> None:
        self._rounds = rounds
        self._slow = slow

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        executor, disk = executor_id(), os.environ.get("STILLSTATE_LOCAL_DIR", "")
        rounds = self._rounds * (20 if self._slow.exists() else 1)
        for row in super().handleInputRows(key, rows, timerValues):
            if rounds:
                hashlib.pbkdf2_hmac("sha256", b"work", b"salt", rounds)
            yield Row(**row.asDict(), executor=executor, disk=disk)


class Meets(StatefulProcessor):
    """Hands rows on; one task meets the test, in the middle of its epoch: it tells its disk, and waits until it may go on.

    Args:
        place: a file with the port where the test listens. Who takes the file away meets it.
    """

    def __init__(self, place: Path) -> None:
        self._place = place

    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        self._meet()
        (n,) = self._count.get() or (0,)
        for row in rows:
            n += 1
            yield Row(bucket=key[0], id=row.id, n=n)
        self._count.update((n,))

    def _meet(self) -> None:
        taken = self._place.with_name(f"met-{executor_id()}")
        try:
            self._place.rename(taken)
        except FileNotFoundError:
            return
        with socket.create_connection(("127.0.0.1", int(taken.read_text()))) as connection:
            connection.sendall(f"{os.environ['STILLSTATE_LOCAL_DIR']}\n".encode())
            connection.recv(1)

    def close(self) -> None:
        pass


def places_job(root: Path, *, rounds: int = 0, meets: bool = False, **changes: Any) -> StreamingJob:
    """One stateful operator over numbered input files; with `meets` a second one behind it."""
    defaults: dict[str, Any] = {
        "parallelism": SHARDS,
        "local_dir": str(root / "driver"),
        "heartbeat_interval_s": 0.5,
    }
    job = StreamingJob("places", store=str(root / "store"), settings=job_settings(**{**defaults, **changes}))
    steps = (
        job.read(
            lambda spark: spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(root / "in"))
        )
        .key_by("name")
        .transform_with_state(StepsAndPlaces(rounds, root / "slow"), _STEPS, uid="steps")
        .write(ParquetSink(str(root / "out")), name="steps")
    )
    if meets:
        (
            steps.transform(lambda df: df.selectExpr("id", "id % 40 AS bucket"))
            .key_by("bucket")
            .transform_with_state(Meets(root / "meet"), "bucket long, id long, n long", uid="meets")
            .write(ParquetSink(str(root / "met")), name="met")
        )
    return job


def output(root: Path, sink: str = "out") -> list[dict[str, Any]]:
    """All published rows."""
    files = [str(p) for p in sorted((root / sink).glob("*.parquet"))]
    return pa.dataset.dataset(files).to_table().to_pylist()


def expected_steps(root: Path) -> list[tuple[Any, ...]]:
    """What the job must have made of its input, computed row by row."""
    rows = [row for file in sorted((root / "in").glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    state: dict[Any, tuple[int, int, int | None]] = {}
    steps = []
    for row in sorted(rows, key=lambda r: r["id"]):
        seen, total, last = state.get(row["name"], (0, 0, None))
        seen, total = seen + 1, total + row["amount"]
        steps.append((row["id"], row["name"], seen, total, last))
        state[row["name"]] = (seen, total, row["amount"])
    return steps


def assert_exact(root: Path) -> None:
    """No row lost, none twice, every state as it should be."""
    found = [tuple(row[c] for c in ("id", "name", "seen", "total", "previous")) for row in output(root)]
    assert sorted(found) == expected_steps(root)


def places(root: Path, column: str) -> dict[int, dict[Any, str]]:
    """Per epoch and key the executor or disk that its state was on."""
    found: dict[int, dict[Any, str]] = {}
    for row in output(root):
        found.setdefault(row["epoch"], {})[row["name"]] = row[column]
    return found
