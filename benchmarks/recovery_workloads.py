"""What the recovery benchmark measures, and how its figures follow from the pieces. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks.checkpoint_workloads import MODES, VALUE, Mode
from benchmarks.report import Figure, Target, median
from benchmarks.workloads import Turns, Workload

__all__ = ["PIECES", "WORKLOAD", "Recovery", "Scenario", "check_scenario", "figures_of", "recovery_ms"]

Scenario = Literal["primary", "local", "doubled"]
"""From the primary store alone; with the copies of the run before; from the primary with twice as many shards."""

WORKLOAD: Workload = replace(VALUE, key="recovery", turns={"ours": Turns(warm=0, per_round=80)})
"""5 M keys by large batches, then small epochs, so that the changelog is as long as materialization lets it get."""


@dataclass(frozen=True)
class Recovery:
    """One piece: the state is built once, then restarted from.

    Attributes:
        scenarios: in this order, `repeats` times; "local" follows a "primary", whose copies it uses.
        in_turns: all restarts in one process; else each in its own, because the engine keeps state in its process.
    """

    mode: Mode
    scenarios: tuple[Scenario, ...]
    repeats: int = 15
    in_turns: bool = True


PIECES: Mapping[str, Recovery] = {
    "on": Recovery(MODES["on"], ("primary", "local", "doubled")),
    "off-arrow": Recovery(MODES["off-arrow"], ("primary",)),
    "off-rocksdb": Recovery(MODES["off-rocksdb"], ("primary",), repeats=2, in_turns=False),
    "spark": Recovery(MODES["spark"], ("primary",), repeats=2, in_turns=False),
}

Piece = Mapping[str, Any]


class WrongRestoreError(RuntimeError):
    """Shards were not restored from where the scenario says: the time would be of something else."""


def check_scenario(scenario: Scenario, shards: int, numbers: Mapping[str, float], state_rows: float) -> None:
    """Compare a restart with what it is called.

    Args:
        numbers: of the restart's first epoch, fields of `Progress`.
        state_rows: before the restart; its input has no new keys, so it must end with as many.

    Raises:
        WrongRestoreError: it was another one, or lost state.
    """
    wanted = {"local_restores": shards, "primary_restores": 0} if scenario == "local" else {"primary_restores": shards}
    wanted["state_rows"] = int(state_rows)
    found = {name: numbers[name] for name in wanted}
    if found != wanted:
        raise WrongRestoreError(f"restart {scenario!r} with {shards} shards: {found}, wanted {wanted}")


def recovery_ms(epochs_ms: Sequence[float]) -> float:
    """What the first epoch of a run took beyond the ones after it, which have the same work and nothing to restore.

    Raises:
        ValueError: fewer than two epochs.
    """
    first, *others = epochs_ms
    return max(first - median(others), 0.0)


def figures_of(pieces: Mapping[str, Piece], *, judged: bool = True) -> list[Figure]:
    """The figures that follow from the pieces that there are; without targets if they are not `judged`."""
    figures: list[Figure] = []
    on = pieces.get("on")
    if on is not None:
        for mode, target in (("off-arrow", Target("<=", 1.1)), ("off-rocksdb", None), ("spark", None)):
            if mode in pieces:
                figures += _pair(f"from primary, on / {mode}", (on, "primary"), (pieces[mode], "primary"), target)
        figures += _pair("local copies / primary, on", (on, "local"), (on, "primary"), Target("<=", 0.2))
        figures += _pair("twice the shards / the same, on", (on, "doubled"), (on, "primary"), Target("<=", 1.3))
    return figures if judged else [replace(figure, target=None) for figure in figures]


def _pair(
    title: str, ours: tuple[Piece, Scenario], peer: tuple[Piece, Scenario], target: Target | None
) -> list[Figure]:
    """Judged is the recovery itself; the whole time to the first checkpoint and the slowest shard's restore are information."""
    figures = []
    for name, what, bound in (
        ("recovery", "recovery_ms", target),
        ("slowest shard", "restore_ms", None),
        ("to the first checkpoint", "ready_ms", None),
    ):
        sides = [[r[what] for r in piece["restarts"] if r["scenario"] == kind] for piece, kind in (ours, peer)]
        if None in (*sides[0], *sides[1]):
            continue  # Spark does not say
        figures.append(Figure(f"{name}: {title}", "ms", median(sides[0]), median(sides[1]), bound))
    return figures
