"""What the engine benchmark measures: every kind of state and operator, and how an epoch's time and memory grow.

Pure; the shapes of the data are in :mod:`benchmarks.workloads`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.report import Target
from benchmarks.workloads import Side, Turns, Workload, quick

__all__ = [
    "COMPARISONS",
    "GROWTH",
    "SMALL",
    "TAIL",
    "Growth",
    "Small",
    "Tail",
    "quick_growth",
    "quick_small",
    "quick_tail",
]

_FEW: dict[Side, Turns] = {"ours": Turns(warm=3, per_round=3), "peer": Turns(warm=2, per_round=1)}
# What counts is a job that runs, not one that starts: Java still compiles for half of its time after ten batches.
_MANY: dict[Side, Turns] = {"ours": Turns(warm=40, per_round=5), "peer": Turns(warm=40, per_round=5)}

_ROWS = Workload(
    key="value",
    title="value state, rows",
    operator="row",
    rows=100_000,
    keys=200_000,
    prefill_batches=0,
    rounds=3,
    turns=_FEW,
    measure="rows_per_s",
    target=Target(">=", 12),
)
_JVM = Workload(
    key="aggregate",
    title="aggregate, 2 M keys",
    operator="aggregate",
    rows=200_000,
    keys=2_000_000,
    prefill_batches=4,
    rounds=4,
    turns=_MANY,
    measure="rows_per_s",
    target=Target(">=", 8),
)
# Spark's row counts: a list is one row of its store, a timer is two; and its windows and joins count otherwise, too.
_INPUT = ("input_rows",)

COMPARISONS: tuple[Workload, ...] = (
    _ROWS,
    replace(_ROWS, key="list", title="list append, rows", operator="list", compare=_INPUT),
    replace(_ROWS, key="map", title="map update, rows", operator="map"),
    replace(_ROWS, key="timers", title="timer per key, rows", operator="timers", data="events", compare=_INPUT),
    replace(
        _ROWS,
        key="pandas",
        title="value state, pandas",
        operator="pandas",
        rounds=2,
        turns={"ours": Turns(warm=1, per_round=2), "peer": Turns(warm=1, per_round=1)},
        target=Target(">=", 6),
    ),
    replace(
        _ROWS,
        key="vectorized",
        title="VectorizedProcessor / peer's pandas",
        operator="vectorized",
        turns={"ours": Turns(warm=8, per_round=5), "peer": Turns(warm=1, per_round=1)},
        target=Target(">=", 100),
        peer_from="pandas",
    ),
    _JVM,
    replace(
        _JVM, key="aggregate-million", title="aggregate, 1,000,000 updates of 2 M keys", rows=1_000_000, rounds=3,
        turns={"ours": Turns(warm=12, per_round=2), "peer": Turns(warm=12, per_round=2)},
    ),
    replace(
        _JVM, key="sliding", title="sliding window 10 s / 1 s", operator="sliding", keys=20_000, data="events",
        prefill_batches=0, turns=_MANY,
        target=Target(">=", 5), compare=_INPUT,
    ),
    replace(
        _JVM, key="deduplicate", title="deduplicate within a watermark", operator="deduplicate", data="repeats",
        prefill_batches=0, turns=_MANY,
        target=Target(">=", 5), compare=_INPUT,
    ),
    replace(
        _JVM, key="join", title="interval join", operator="join", keys=500_000, data="sides", peer_reads=2,
        prefill_batches=0, turns=_MANY,
        target=Target(">=", 5), compare=_INPUT,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Growth:
    """The same updates over few and over many keys, both in our engine.

    Attributes:
        memory: Bound of the private memory of one Python worker with the many keys, in MiB.
        memory_batches: Batches that run while it is watched, after those that are timed.
    """

    key: str
    few: Workload
    many: Workload
    target: Target | None
    memory: Target | None
    memory_batches: int


@dataclass(frozen=True)
class Tail:
    """Many epochs of our engine, merges of local runs included: how far the slow ones are from the median."""

    key: str
    workload: Workload
    target: Target | None


@dataclass(frozen=True)
class Small:
    """A small state with what large ones need, and without it, in turns.

    Attributes:
        variants: settings of ours by name; the first is what the others are compared with.
    """

    key: str
    workload: Workload
    variants: Mapping[str, Mapping[str, Any]]


_UPDATES = replace(
    _JVM,
    key="keys",
    title="100 k keys",
    rows=50_000,
    keys=100_000,
    prefill_batches=1,
    rounds=4,
    turns={"ours": Turns(warm=20, per_round=10)},
    measure="trigger_ms",
    target=None,
    drop_first=True,
    informs=(),
    partitions=2,
    data="distinct",
)

GROWTH = Growth(
    key="keys",
    few=_UPDATES,
    many=replace(_UPDATES, title="10 M keys", keys=10_000_000, prefill_batches=20),
    target=Target("<=", 1.3),
    memory=Target("<=", 400),
    memory_batches=10,
)
TAIL = Tail(
    key="tail",
    workload=replace(
        _UPDATES, key="tail", title="1 M keys", rows=20_000, keys=1_000_000, prefill_batches=4, rounds=1,
        turns={"ours": Turns(warm=30, per_round=301)},
    ),
    target=Target("<=", 2),
)  # fmt: skip

# More epochs than the log may have segments, so that it is folded at least once while it counts.
SMALL = Small(
    key="small",
    workload=replace(
        _UPDATES, key="small", title="10 k keys", rows=20_000, keys=10_000, rounds=6, data="uniform",
        turns={"ours": Turns(warm=30, per_round=50)},
    ),
    variants={
        "as it comes": {},
        "no folding": {"materialize": False},
        "merging later": {"runs_max": 64},
        "RocksDB": {"backend": "rocksdb"},
    },
)  # fmt: skip


def quick_small(small: Small) -> Small:
    """A smoke test of seconds."""
    return replace(small, workload=quick(small.workload))


def quick_growth(growth: Growth) -> Growth:
    """A smoke test of seconds, which judges nothing."""
    return replace(growth, few=quick(growth.few), many=quick(growth.many), target=None, memory=None, memory_batches=2)


def quick_tail(tail: Tail) -> Tail:
    """A smoke test of seconds, which judges nothing."""
    return replace(tail, workload=quick(tail.workload), target=None)
