"""What the checkpoint benchmark measures, and how its figures follow from the pieces. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.report import Figure, Target, median, percentile
from benchmarks.workloads import Side, Turns, Workload

__all__ = [
    "KEYS",
    "LOADS",
    "MANIFEST",
    "MODES",
    "PIECES",
    "REQUESTS",
    "TURNS",
    "VALUE",
    "Load",
    "ManifestSize",
    "Mode",
    "Requests",
    "Turned",
    "WrongModeError",
    "check_mode",
    "figures_of",
    "scaled",
]

KIB = 1024


@dataclass(frozen=True)
class Mode:
    """An engine and how it makes its checkpoints."""

    title: str
    side: Side
    settings: tuple[tuple[str, Any], ...] = ()


MODES: Mapping[str, Mode] = {
    "on": Mode("changelog on, arrow", "ours"),
    "off-arrow": Mode("changelog off, arrow", "ours", (("changelog", "off"),)),
    "off-rocksdb": Mode("changelog off, rocksdb", "ours", (("changelog", "off"), ("backend", "rocksdb"))),
    "spark": Mode("Spark, RocksDB with changelog", "peer"),
}


class WrongModeError(RuntimeError):
    """A snapshot is not one of the mode that was asked for."""


def check_mode(mode: Mode, files_of: str | None) -> None:
    """Compare a snapshot with the mode that it was made in.

    Args:
        files_of: the backend whose files the snapshot consists of; None if it is a changelog and tables.

    Raises:
        WrongModeError: it is not what the mode makes.
    """
    settings = dict(mode.settings)
    wanted = settings.get("backend", "arrow") if settings.get("changelog") == "off" else None
    if files_of != wanted:
        raise WrongModeError(f"{mode.title}: its newest snapshot has files of {files_of}, wanted {wanted}")


@dataclass(frozen=True)
class Load:
    """One workload in one mode: keys loaded by large batches, then many small epochs.

    Attributes:
        workload: `turns["ours"]` says how many epochs warm up and how many are counted.
    """

    workload: Workload
    mode: Mode

    @property
    def epochs(self) -> int:
        """Epochs that are counted."""
        return self.workload.turns["ours"].per_round


VALUE = Workload(
    key="value",
    title="value state",
    operator="aggregate",
    rows=50_000,
    keys=5_000_000,
    prefill_batches=10,
    rounds=1,
    turns={"ours": Turns(warm=20, per_round=500)},
    measure="trigger_ms",
    target=None,
    partitions=2,
    data="distinct",
    informs=(),
)
"""5 M keys in a value state of five columns; 50 k different ones change an epoch."""

SLIDING = replace(
    VALUE, key="sliding", title="sliding window 10 s / 1 s", operator="sliding", prefill_batches=0, data="events",
)  # fmt: skip
"""The same keys and rows. Each epoch is one second of events, and a row is in ten windows: an epoch adds 50 k panes, removes as many
of 500 k and emits about 475 k windows."""

# Enough for the median and to see what a slow commit is; the judged tails are ours alone.
_FEWER = {"ours": Turns(warm=20, per_round=150)}

LOADS: Mapping[str, Load] = {
    "value-on": Load(VALUE, MODES["on"]),
    "value-off-arrow": Load(VALUE, MODES["off-arrow"]),
    "value-off-rocksdb": Load(VALUE, MODES["off-rocksdb"]),
    "value-spark": Load(replace(VALUE, turns=_FEWER), MODES["spark"]),
    "sliding-on": Load(SLIDING, MODES["on"]),
    "sliding-off-arrow": Load(SLIDING, MODES["off-arrow"]),
    "sliding-off-rocksdb": Load(SLIDING, MODES["off-rocksdb"]),
    "sliding-spark": Load(replace(SLIDING, turns={"ours": Turns(warm=20, per_round=60)}), MODES["spark"]),
}


Turned = Mapping[str, Load]
"""Loads that are up at once and take turns, so that all see the machine in the same hour; of the first one the rounds count."""


def _in_turns(workload: Workload, per_round: int) -> Turned:
    load = replace(workload, rounds=3, turns={"ours": Turns(warm=20, per_round=per_round)})
    return {name: Load(load, MODES[name]) for name in ("on", "off-arrow")}


_GROWTH = replace(VALUE, title="100 k keys", keys=100_000, prefill_batches=1, rounds=5, turns={"ours": Turns(25, 21)})
KEYS: Turned = {
    "few": Load(_GROWTH, MODES["on"]),
    "many": Load(replace(_GROWTH, title="10 M keys", keys=10_000_000, prefill_batches=16), MODES["on"]),
}
"""The same changes over few and over many keys."""

# The first epoch of a round is not counted.
TURNS: Mapping[str, Turned] = {
    "value-turns": _in_turns(VALUE, 101),
    "sliding-turns": _in_turns(SLIDING, 51),
    "keys": KEYS,
}


@dataclass(frozen=True)
class Requests:
    """Small changes on an S3 server that counts, with few and with many shards.

    Attributes:
        shards: parallelism of the two jobs.
        workload: `turns["ours"]` as in `Load`; its batches run one by one.
    """

    shards: tuple[int, int]
    workload: Workload


REQUESTS = Requests(
    (2, 200),
    replace(VALUE, key="requests", title="small changes", rows=1_000, keys=10_000, prefill_batches=1,
            turns={"ours": Turns(warm=3, per_round=6)}),
)  # fmt: skip


@dataclass(frozen=True)
class ManifestSize:
    """How large a manifest gets, from the code that writes segments and manifests; no Spark.

    Attributes:
        epochs: checkpoints since the last materialization.
    """

    shards: int
    operators: int
    epochs: int


MANIFEST = ManifestSize(200, 5, 600)
PIECES: tuple[str, ...] = (*LOADS, *TURNS, "requests", "manifest")


def scaled(workload: Workload, share: float) -> Workload:
    """A smaller run: `share` of the keys and of the epochs, and no more rows an epoch than keys."""
    if share >= 1:
        return workload
    turns = workload.turns["ours"]
    keys = max(int(workload.keys * share), 1_000)
    return replace(
        workload,
        keys=keys,
        rows=min(workload.rows, keys // 2),
        prefill_batches=min(workload.prefill_batches, 3),
        rounds=min(workload.rounds, 2),
        turns={
            "ours": Turns(
                warm=max(int(turns.warm * share), 2),
                per_round=min(turns.per_round, max(int(turns.per_round * share), 8)),
            )
        },
    )


Piece = Mapping[str, Any]


def figures_of(pieces: Mapping[str, Piece], *, judged: bool = True) -> list[Figure]:
    """The figures that follow from the pieces that there are.

    Args:
        judged: whether they have targets; a scaled run has none.
    """
    figures: list[Figure] = []
    for load, tail, space in (("value", 0.1, 1.3), ("sliding", 0.2, 2.0)):
        found = {mode: pieces[f"{load}-{mode}"] for mode in MODES if f"{load}-{mode}" in pieces}
        if "on" in found:
            figures += _against_off(load, found, tail, space)
        if turns := pieces.get(f"{load}-turns"):
            on, off = (_rows_per_s(turns[name]) for name in ("on", "off-arrow"))
            figures.append(
                Figure(f"{load}: throughput, on / off-arrow, in turns", "rows/s", on, off, Target(">=", 0.95))
            )
    if "keys" in pieces:
        figures += _growth(pieces["keys"])
    if "manifest" in pieces:
        size = pieces["manifest"]
        title = "manifest: bytes at {shards} shards, {operators} operators, {epochs} epochs".format(**size)
        figures.append(Figure(title, "bytes", size["bytes"], None, Target("<=", 256 * KIB)))
    if "requests" in pieces:
        figures += _requests(pieces["requests"])
    return figures if judged else [replace(figure, target=None) for figure in figures]


def _against_off(load: str, found: Mapping[str, Piece], tail: float, space: float) -> list[Figure]:
    """One workload: changelog on against the other modes that were measured."""
    on = _times(found["on"], "checkpoint_ms")
    high = percentile(on, 99.9)
    figures: list[Figure] = []
    for mode, target in (("off-rocksdb", Target("<=", tail)), ("off-arrow", Target("<=", 1.0)), ("spark", None)):
        if mode not in found:
            continue
        other = _times(found[mode], "checkpoint_ms")
        figures.append(Figure(f"{load}: checkpoint p99.9, on / {mode}", "ms", high, percentile(other, 99.9), target))
        figures.append(Figure(f"{load}: checkpoint p50, on / {mode}", "ms", median(on), median(other)))
    figures.append(Figure(f"{load}: checkpoint p99.9 / p50 of {len(on)}, on", "ms", high, median(on), Target("<=", 3)))
    for mode, bound in (("off-arrow", Target("<=", space)), ("off-rocksdb", None)):
        if mode in found:
            ours, theirs = (_mean(found[name]["snapshot_bytes"]) for name in ("on", mode))
            figures.append(Figure(f"{load}: full snapshot, mean, on / {mode}", "bytes", ours, theirs, bound))
    for mode in ("off-arrow", "off-rocksdb", "spark"):
        if mode in found:
            ours, theirs = (_rows_per_s(found[name]) for name in ("on", mode))
            figures.append(Figure(f"{load}: throughput, on / {mode}", "rows/s", ours, theirs))
    return figures


def _growth(piece: Piece) -> list[Figure]:
    many, few = (_times(piece[name], "checkpoint_ms") for name in ("many", "few"))
    title = f"keys: checkpoint p50, {piece['many']['title']} / {piece['few']['title']}"
    return [
        Figure(title, "ms", median(many), median(few), Target("<=", 1.2)),
        Figure(title.replace("p50", "p99"), "ms", percentile(many, 99), percentile(few, 99)),
    ]


def _requests(piece: Piece) -> list[Figure]:
    # Listings are left out: a checkpoint makes one, of the boundary; those for materializations come by the clock.
    few, many = (
        sum(number for kind, number in count["per_checkpoint"].items() if kind != "LIST") for count in piece["counts"]
    )
    shards = [count["shards"] for count in piece["counts"]]
    title = f"requests a checkpoint, small changes, {shards[1]} / {shards[0]} shards"
    return [Figure(title, "requests", many, few, Target("<=", 1.0))]


def _times(piece: Piece, field: str) -> Sequence[float]:
    return [sample[field] for sample in piece["samples"]]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _rows_per_s(piece: Piece) -> float:
    """Rows by the time of all triggers, the slow ones included."""
    return sum(_times(piece, "input_rows")) / sum(_times(piece, "trigger_ms")) * 1000
