"""What the benchmark of rows in flight measures, and how its figures follow from the pieces. Pure but for the files that it writes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.report import Figure, Target, median
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.keyhash import hash_rows

__all__ = [
    "ALIGNED",
    "BACKLOG",
    "CAP_BYTES",
    "COST_US",
    "DEFAULT",
    "EVEN_ROWS",
    "EXECUTOR_KILLED_EVERY_S",
    "KILLS",
    "KILL_FILES",
    "KILL_FILES_PER_BATCH",
    "PIECES",
    "RESTARTS",
    "SKEW",
    "UNALIGNED",
    "UNDISTURBED_S",
    "durable",
    "figures_of",
    "first_s",
    "intervals_s",
    "keys_of_shards",
    "rows_per_s",
    "write_file",
    "written_once",
]

SHARDS = 2
COST_US = 100.0
EVEN_ROWS = 10_000
"""Of a shard in a batch: a second of work for the slow processor."""
SKEW = 10
BACKLOG = 20
"""Batches that wait."""
RESTARTS = 3
KILLS: Mapping[float, int] = {10.0: 4, 30.0: 2}
"""How long after a start of the query it is killed, and how often."""
UNDISTURBED_S = 60.0
KILL_FILES = 60
KILL_FILES_PER_BATCH = 10
"""Ten seconds of work and more for all cores: no batch is over before its driver is killed after so long."""
EXECUTOR_KILLED_EVERY_S = 10.0
"""One of two, in turn; the driver lives."""
CAP_BYTES = 16 << 20
KEYS_PER_SHARD = 1_000
FIRST_FILE_S = 1_700_000_000

ALIGNED: Mapping[str, Any] = {"checkpoint": {"mode": "aligned"}}
UNALIGNED: Mapping[str, Any] = {"checkpoint": {"mode": "unaligned"}}
DEFAULT: Mapping[str, Any] = {}
"""aligned-with-timeout."""

PIECES = ("skew", "backlog", "kills", "standby", "executors", "throughput", "cap", "memory")

Line = Mapping[str, Any]
Piece = Mapping[str, Any]


def keys_of_shards(per_shard: int = KEYS_PER_SHARD) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """So many keys of each shard."""
    candidates = np.arange(4 * per_shard * SHARDS, dtype=np.int64)
    hashes = hash_rows([pa.array(candidates)])
    found = []
    for shard in range(SHARDS):
        low, high = hash_range_of_shard(shard, SHARDS)
        found.append(candidates[(hashes >= np.uint64(low)) & (hashes <= np.uint64(high))][:per_shard])
    return found


def write_file(
    folder: Path, number: int, rows_of_shards: Sequence[int], keys: Sequence[np.ndarray[Any, np.dtype[np.int64]]]
) -> int:
    """One file of input; its rows. The file source orders by modification time: files are a second apart."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng([20130101, number])
    drawn = np.concatenate([random.choice(of, rows) for of, rows in zip(keys, rows_of_shards, strict=True) if rows])
    table = pa.table({"key": random.permutation(drawn), "amount": random.integers(0, 1_000, len(drawn))})
    # A name that the source does not look at, until it is whole.
    hidden, path = folder / f".{number:05d}.parquet", folder / f"{number:05d}.parquet"
    pq.write_table(table, hidden, row_group_size=(len(drawn) + 1) // 2)
    os.utime(hidden, (FIRST_FILE_S + number, FIRST_FILE_S + number))
    hidden.rename(path)
    return len(drawn)


# --- what the lines of a run say -------------------------------------------------------------------------------------


def durable(lines: Sequence[Line]) -> list[Line]:
    """Those of durable checkpoints that processed rows."""
    found, before = [], 0
    for line in lines:
        if line["what"] == "durable" and line["rows"] > before:
            before = line["rows"]
            found.append(line)
    return found


def intervals_s(lines: Sequence[Line], skip: int) -> list[float]:
    """From one durable checkpoint to the next, without the first `skip`."""
    times = [line["at_s"] for line in durable(lines)]
    return [later - earlier for earlier, later in itertools.pairwise(times)][skip:]


def first_s(lines: Sequence[Line]) -> float:
    """From the start of the query to the first durable checkpoint."""
    began = next(line["at_s"] for line in lines if line["what"] == "start")
    return float(durable(lines)[0]["at_s"] - began)


def rows_per_s(lines: Sequence[Line], skip: int) -> float:
    """Over the durable checkpoints after the first `skip`."""
    counted = durable(lines)[skip:]
    return float((counted[-1]["rows"] - counted[0]["rows"]) / (counted[-1]["at_s"] - counted[0]["at_s"]))


def written_once(lines: Sequence[Line]) -> tuple[int, int]:
    """Rows that waited, each counted once; and the most bytes that waited at a time."""
    inflight = [line["numbers"].get("inflight") or {} for line in lines if line["what"] == "durable"]
    return sum(i.get("new_rows", 0) for i in inflight), max((i.get("bytes", 0) for i in inflight), default=0)


# --- figures ---------------------------------------------------------------------------------------------------------


def figures_of(pieces: Mapping[str, Piece], *, judged: bool = True) -> list[Figure]:
    """The figures that follow from the pieces that there are; without targets if they are not `judged`."""
    figures: list[Figure] = []
    for name, of in (
        ("skew", _skew), ("backlog", _backlog), ("kills", _kills), ("standby", _kills), ("executors", _executors),
        ("throughput", _throughput), ("cap", _cap), ("memory", _memory),
    ):  # fmt: skip
        if name in pieces:
            figures += of(pieces[name])
    return figures if judged else [replace(figure, target=None) for figure in figures]


def _skew(piece: Piece) -> list[Figure]:
    title = f"checkpoint to checkpoint, one shard with {SKEW} times the rows ÷ even"
    return [
        Figure(
            f"{title}: {name}", "s", median(piece[name]["skewed_s"]), median(piece[name]["even_s"]),
            Target("<=", 1.5) if name == "unaligned" else None,
        )
        for name in ("unaligned", "aligned", "default", "spark")
    ]  # fmt: skip


def _backlog(piece: Piece) -> list[Figure]:
    even = median(piece["unaligned"]["even_s"])
    figures = [
        Figure(
            f"checkpoint to checkpoint, {BACKLOG} batches waiting ÷ none: unaligned", "s",
            median(piece["unaligned"]["backlog_s"]), even, Target("<=", 1.5),
        )
    ]  # fmt: skip
    for name, target in (("unaligned", Target("<=", 0.2)), ("prepared", None), ("default", None), ("aligned", None)):
        if name in piece:
            figures.append(
                Figure(
                    f"restart with {BACKLOG} batches waiting, to the first durable checkpoint: {TITLES.get(name, name)} ÷ Spark",
                    "s", median(piece[name]["first_s"]), median(piece["spark"]["first_s"]), target,
                )
            )  # fmt: skip
    return figures


TITLES: Mapping[str, str] = {
    "prepared": "unaligned, after stillstate prepare",
    "standby": "unaligned, by a driver that stood by",
}


def _kills(piece: Piece) -> list[Figure]:
    names = {
        "unaligned": Target(">=", 0.5), "prepared": None, "aligned": None, "spark": None, "standby": Target(">=", 0.5),
    }  # fmt: skip
    return [
        Figure(
            f"rows committed a minute, killed {after_s:.0f} s after each start with a backlog ÷ undisturbed: {TITLES.get(name, name)}",
            "rows/min", piece[name][f"killed_{after_s:.0f}"], piece[name]["undisturbed"], target if after_s == 10 else None,
        )
        for after_s in KILLS
        for name, target in names.items()
        if name in piece
    ]  # fmt: skip


def _executors(piece: Piece) -> list[Figure]:
    return [
        Figure(
            f"rows committed a minute, an executor killed every {EXECUTOR_KILLED_EVERY_S:.0f} s with a backlog ÷ undisturbed: {name}",
            "rows/min", piece[name]["killed"], piece[name]["undisturbed"],
            Target(">=", 0.5) if name == "unaligned" else None,
        )
        for name in ("unaligned", "aligned", "spark")
    ]  # fmt: skip


def _throughput(piece: Piece) -> list[Figure]:
    figures = []
    for operator in ("totals", "slow"):
        runs = piece[operator]
        title = "vectorised aggregate" if operator == "totals" else "a user's processor"
        aligned = median(runs["aligned"])
        figures += [
            Figure(
                f"throughput, {title}: unaligned ÷ aligned",
                "rows/s",
                median(runs["unaligned"]),
                aligned,
                Target(">=", 0.95),
            ),
            Figure(
                f"throughput, {title}: unaligned ÷ no checkpoints at all",
                "rows/s",
                median(runs["unaligned"]),
                median(runs["none"]),
            ),
            Figure(
                f"throughput, {title}: unaligned ÷ Spark", "rows/s", median(runs["unaligned"]), median(runs["spark"])
            ),
        ]
    return figures


def _cap(piece: Piece) -> list[Figure]:
    return [
        Figure(
            "rows in flight written ÷ rows that waited",
            "rows",
            piece["rows_written"],
            piece["rows_waited"],
            Target("<=", 1.0),
        ),
        Figure(
            "most bytes in flight of a snapshot ÷ max_inflight_bytes",
            "bytes",
            piece["bytes_max"],
            piece["cap_bytes"],
            Target("<=", 1.05),
        ),
        Figure(
            "stored bytes of those rows ÷ their bytes in memory", "bytes", piece["stored_bytes"], piece["kept_bytes"]
        ),
    ]


def _memory(piece: Piece) -> list[Figure]:
    return [
        Figure(
            f"private memory of a task, {title}: 50 ÷ 1 times task_bytes_max",
            "MiB",
            piece[name]["large_mib"],
            piece[name]["small_mib"],
            Target("<=", 1.3),
        )
        for name, title in (
            ("totals", "vectorised aggregate"), ("slow", "a user's processor"),
            ("totals-key", "vectorised aggregate, one key"), ("slow-key", "a user's processor, one key"),
        )
    ]  # fmt: skip
