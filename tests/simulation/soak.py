"""Thousands of seeds of the system simulation, over all processors: `python -m tests.simulation.soak --seeds 20000`.

Prints each seed that breaks a law as soon as it does, and at the end how to play them again; ends with 1 if there is one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .cast import play, seed_plan

CHUNK = 50
REAL_EVERY = 40
SHOWN_MAX = 20


@dataclass
class Played:
    """What a number of seeds did."""

    seen: Counter[str] = field(default_factory=Counter)
    broken: list[tuple[int, str]] = field(default_factory=list)
    steps: int = 0


def play_chunk(first: int, count: int) -> Played:
    """Seeds from `first` on; each fortieth with the real formats."""
    played = Played()
    for seed in range(first, first + count):
        try:
            world = play(seed, seed_plan(seed, real=seed % REAL_EVERY == 0))
        except Exception as error:  # of the watcher itself: the other seeds still tell something
            played.broken.append((seed, f"{type(error).__name__} in the simulation: {error}"))
            continue
        played.seen.update(world.seen)
        played.steps += world.turns.step
        if world.violations:
            played.broken.append((seed, "; ".join(world.violations[:3])))
    return played


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.soak", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20_000, help="how many (20,000)")
    parser.add_argument("--first", type=int, default=0, help="the first one (0)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at a time (all processors)")
    given = parser.parse_args(argv)
    console = Console(stderr=True)
    total = Played()
    columns = (
        TextColumn("seeds"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[broken]}"),
        TimeRemainingColumn(),
    )
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
        ProcessPoolExecutor(given.processes) as pool,
    ):
        task = bar.add_task("", total=given.seeds, broken="")
        end = given.first + given.seeds
        chunks = {
            pool.submit(play_chunk, n, min(CHUNK, end - n)): min(CHUNK, end - n) for n in range(given.first, end, CHUNK)
        }
        for number, done in enumerate(as_completed(chunks), 1):
            played = done.result()
            total.seen.update(played.seen)
            total.broken += played.broken
            for seed, why in played.broken:
                console.print(f"seed {seed}: {why}", markup=False)
            total.steps += played.steps
            bar.update(task, advance=chunks[done], broken=f"{len(total.broken)} broken" if total.broken else "")
            if not console.is_terminal and number % 20 == 0:
                console.print(f"{number * CHUNK:,} of {given.seeds:,} seeds, {len(total.broken)} broken")
    print(
        f"{given.seeds:,} seeds, {total.steps:,} steps; "
        + ", ".join(f"{n:,} {what}" for what, n in sorted(total.seen.items()))
    )
    for seed, why in sorted(total.broken)[:SHOWN_MAX]:
        print(f"STILLSTATE_TEST_SEED={seed} pytest tests/simulation   {why}")
    if len(total.broken) > SHOWN_MAX:
        print(f"and {len(total.broken) - SHOWN_MAX} more")
    return 1 if total.broken else 0


if __name__ == "__main__":
    sys.exit(main())
