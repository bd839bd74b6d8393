"""What is measured: the workloads, their data and the order in which the two engines take turns.

Pure apart from :func:`write_data`; knows nothing of Spark.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import nexmark_data
from benchmarks.flink import events
from benchmarks.report import Target

__all__ = ["WORKLOADS", "Turns", "Workload", "quick", "write_data"]

Side = Literal["ours", "peer"]
Information = Literal["checkpoint", "cpu"]
Data = Literal["uniform", "distinct", "events", "repeats", "sides", "nexmark", "bids"]
SEED = 20130101
FIRST_FILE_S = 1_700_000_000
SCHEMAS: Mapping[Data, str] = {
    "uniform": "key long, amount long",
    "distinct": "key long, amount long",
    "events": "key long, amount long, ts timestamp",
    "repeats": "key long, amount long, ts timestamp",
    "sides": "key long, amount long, ts timestamp, side int",
    "nexmark": nexmark_data.SCHEMA,
    "bids": events.SCHEMA,
}
REPEATED = 0.1
"""Share of the rows of the shape `repeats` that come again in the next batch."""


@dataclass(frozen=True)
class Turns:
    """How many batches one engine runs: first to warm up (not counted), then in every round."""

    warm: int
    per_round: int

    def total(self, rounds: int) -> int:
        """Count all batches of the workload except the pre-fill."""
        return self.warm + rounds * self.per_round


@dataclass(frozen=True)
class Workload:
    """One comparison.

    Attributes:
        key: The name that `--only` takes; variants of a workload share its data.
        operator: Which operator both engines run: a name in :mod:`benchmarks.operators`.
        rows: Input rows of a batch.
        keys: Size of the key space; a batch draws its keys from it uniformly.
        prefill_batches: Batches that insert every key once, in equal parts, before anything is measured.
        rounds: How often the engines take turns.
        turns: Batches of each engine; the slow peers run fewer.
        informs: Figures beside the judged one, without target.
        drop_first: Leave the first trigger of a turn out: it follows an idle time, in both engines.
        partitions: Shuffle partitions of the peer and parallelism of ours; 0 is one per core.
        peer_conf: Extra settings of the peer.
        data: The shape of the rows, see :func:`write_data`.
        compare: What must be equal in both engines after every batch. Spark counts the rows of its store, which are
            other things than ours for lists and timers.
        peer_reads: How often the peer's plan reads each row; its progress counts every time.
        sink: Both engines write what they emit as Parquet files; else they drop it.
        peer_from: The workload whose peer this one is judged by, if it has none of its own: same data, same run.
    """

    key: str
    title: str
    operator: str
    rows: int
    keys: int
    prefill_batches: int
    rounds: int
    turns: Mapping[Side, Turns]
    measure: Literal["rows_per_s", "trigger_ms"]
    target: Target | None
    drop_first: bool = False
    informs: tuple[Information, ...] = ("cpu",)
    partitions: int = 0
    peer_conf: tuple[tuple[str, str], ...] = ()
    data: Data = "uniform"
    compare: tuple[str, ...] = ("input_rows", "state_rows")
    peer_reads: int = 1
    peer_from: str = ""
    sink: bool = False

    @property
    def schema(self) -> str:
        """DDL of the input."""
        return SCHEMAS[self.data]

    @property
    def batches(self) -> int:
        """Count the input files: as many as the engine with more batches takes, pre-fill included."""
        return self.prefill_batches + max(turn.total(self.rounds) for turn in self.turns.values())


# Faster settings of the peer that take away something which ours does beside. Neither is Spark's default.
# The state store counts its rows by a look-up before each write; without, `numRowsTotal` is 0. Our progress has it.
NO_ROW_COUNT = (("spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows", "false"),)
# The default manager of a local checkpoint directory, FileContext, renames without overwriting, which is what keeps
# a second driver out, and starts a child process to do so. This one does neither. Ours writes Spark's own logs with
# it too, because they are scratch there; the manifest has the guard.
NO_RENAME_GUARD = (
    (
        "spark.sql.streaming.checkpointFileManagerClass",
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager",
    ),
)

_AGGREGATION = Workload(
    key="c",
    title="JVM aggregation, 2 M keys",
    operator="aggregate",
    rows=200_000,
    keys=2_000_000,
    prefill_batches=4,
    rounds=4,
    turns={"ours": Turns(warm=4, per_round=5), "peer": Turns(warm=4, per_round=5)},
    measure="rows_per_s",
    target=Target(">=", 8),
    informs=("checkpoint", "cpu"),
)

# The JVM needs some fifty triggers until their duration stops falling. Streams run for days, so only what comes
# after counts, for both.
_FLOOR = Workload(
    key="d",
    title="1,000 rows a batch, JVM aggregation",
    operator="aggregate",
    rows=1_000,
    keys=10_000,
    prefill_batches=1,
    rounds=4,
    turns={"ours": Turns(warm=60, per_round=16), "peer": Turns(warm=60, per_round=16)},
    measure="trigger_ms",
    target=Target("<=", 0.7),
    drop_first=True,
    informs=("checkpoint", "cpu"),
)

WORKLOADS: tuple[Workload, ...] = (
    Workload(
        key="a",
        title="transformWithState (rows)",
        operator="row",
        rows=100_000,
        keys=200_000,
        prefill_batches=0,
        rounds=3,
        turns={"ours": Turns(warm=3, per_round=3), "peer": Turns(warm=2, per_round=1)},
        measure="rows_per_s",
        target=Target(">=", 8),
    ),
    Workload(
        key="b",
        title="transformWithStateInPandas",
        operator="pandas",
        rows=100_000,
        keys=200_000,
        prefill_batches=0,
        rounds=2,
        turns={"ours": Turns(warm=1, per_round=2), "peer": Turns(warm=1, per_round=1)},
        measure="rows_per_s",
        target=Target(">=", 4),
    ),
    _AGGREGATION,
    replace(
        _AGGREGATION,
        key="c-uncounted",
        title="same, peer does not count its state",
        rounds=2,
        target=Target(">=", 4),
        peer_conf=NO_ROW_COUNT,
        informs=(),
    ),
    _FLOOR,
    replace(
        _FLOOR,
        key="d-unguarded",
        title="same, peer without its rename guard",
        rounds=2,
        informs=(),
        peer_conf=NO_RENAME_GUARD,
    ),
)


def quick(workload: Workload) -> Workload:
    """Shrink a workload to a smoke test of seconds; its figures mean nothing and its target is dropped."""
    return replace(
        workload,
        rows=min(workload.rows, 2_000),
        keys=min(workload.keys, 4_000),
        prefill_batches=min(workload.prefill_batches, 4),
        rounds=2,
        turns={side: Turns(warm=1, per_round=3 if workload.drop_first else 2) for side in workload.turns},
        target=None,
    )


def write_data(workload: Workload, folder: Path) -> list[Path]:
    """Write the input of a workload, one Parquet file a batch, and return the files in batch order.

    The shapes: keys `uniform` over the key space; `distinct` keys of it; `events`, uniform keys with an event time, a batch
    being one second; `repeats`, new keys with an event time, of which some come again one batch later; `sides`, events of two
    streams, told apart by `side`; `nexmark`, see :mod:`benchmarks.nexmark_data`; `bids`, see :mod:`benchmarks.flink.events`.

    The same seed gives the same rows on every machine. Each file has two row groups, so that the read
    stage of both engines has two tasks. The file source orders by modification time, hence the files get times
    one second apart.
    """
    if workload.data == "bids":
        return events.write_flat(folder, workload.batches, workload.rows)
    if workload.data == "nexmark":
        return nexmark_data.write_events(folder, workload.batches, workload.rows)
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng([SEED, ord((workload.peer_from or workload.key)[0])])
    files: list[Path] = []
    parts = np.array_split(np.arange(workload.keys, dtype=np.int64), max(workload.prefill_batches, 1))
    for index in range(workload.batches):
        keys = random.permutation(parts[index]) if index < workload.prefill_batches else _keys(workload, index, random)
        columns = {"key": keys, "amount": random.integers(0, 1_000, len(keys), dtype=np.int64)}
        if "ts" in workload.schema:
            micros = (FIRST_FILE_S + index) * 1_000_000 + np.sort(random.integers(0, 1_000_000, len(keys)))
            columns["ts"] = pa.array(micros, pa.timestamp("us", "UTC"))
        if "side" in workload.schema:
            columns["side"] = random.integers(0, 2, len(keys), dtype=np.int32)
        path = folder / f"{index:05d}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=(len(keys) + 1) // 2)
        os.utime(path, (FIRST_FILE_S + index, FIRST_FILE_S + index))
        files.append(path)
    return files


def _keys(workload: Workload, index: int, random: np.random.Generator) -> np.ndarray:
    """The keys of one batch."""
    if workload.data == "distinct":
        return random.choice(workload.keys, workload.rows, replace=False).astype(np.int64)
    if workload.data == "repeats":
        new = int(workload.rows * (1 - REPEATED))
        first = index * new
        again = first - new + random.choice(new, workload.rows - new, replace=False)
        return random.permutation(np.concatenate([np.arange(first, first + new), again])).astype(np.int64)
    return random.integers(0, workload.keys, workload.rows, dtype=np.int64)
