"""`python -m benchmarks.recovery`: how long a restart takes, from the primary store, from local copies, with twice the shards.

Measured in pieces (:mod:`benchmarks.recovery_workloads`), one for each mode, kept in benchmarks/results/pieces as soon as they
are done. Prints one table of all pieces that there are and writes benchmarks/results/recovery.json.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress, TaskID

from benchmarks.checkpoint import SMALL_MEMORY
from benchmarks.checkpoint_workloads import scaled
from benchmarks.engines import WorkerPlan
from benchmarks.measure import workload_dict
from benchmarks.pieces import Benchmark, Options
from benchmarks.recovery_workloads import (
    PIECES,
    WORKLOAD,
    Recovery,
    Scenario,
    check_scenario,
    figures_of,
    recovery_ms,
)
from benchmarks.report import usable_cores
from benchmarks.restarts import Epoch, Run, run_once
from benchmarks.workloads import Turns, Workload, write_data

__all__ = ["app"]

RESULTS = Path(__file__).parent / "results"
RESTART_EPOCHS = 5
RESTART_ROWS = 1_000
WARM_EPOCHS = 12
BUILD_TIMEOUT_S = 1_200.0
RESTART_TIMEOUT_S = 300.0

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def main(
    only: Annotated[str, typer.Option(help="Only these pieces, e.g. [b]on,off-arrow[/b].")] = "",
    scale: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="Share of keys and epochs; below 1 nothing is judged.")
    ] = 1.0,
    table: Annotated[bool, typer.Option("--table", help="Measure nothing, show what there is.")] = False,
    keep: Annotated[bool, typer.Option(help="Keep the working folder with the stores and logs.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a target is missed.")] = False,
) -> None:
    """Measure restarts: from the primary store in each mode, from local copies, with twice the shards, and Spark's.

    Example: [b]python -m benchmarks.recovery --only on[/b]
    """
    names = tuple(PIECES)
    Benchmark("recovery", names, _measure, figures_of).run(Options(only, scale, table, keep, strict), RESULTS)


@dataclass
class _Bar:
    progress: Progress
    task: TaskID

    def step(self, text: str) -> None:
        self.progress.update(self.task, description=text, advance=1)


def _measure(name: str, folder: Path, *, scale: float, progress: Progress) -> Mapping[str, Any]:
    recovery = PIECES[name] if scale >= 1 else replace(PIECES[name], repeats=1)
    task = progress.add_task(f"{name}: building", total=1 + len(recovery.scenarios) * recovery.repeats)
    try:
        return _Piece(recovery, scaled(WORKLOAD, scale), folder, scale).measure(_Bar(progress, task), name)
    finally:
        progress.remove_task(task)


class _Piece:
    """The state of one mode, and restarts from it."""

    def __init__(self, recovery: Recovery, workload: Workload, folder: Path, scale: float) -> None:
        self._recovery = recovery
        self._workload = workload
        self._folder = folder
        self._conf = () if scale >= 1 else SMALL_MEMORY

    def measure(self, bar: _Bar, name: str) -> dict[str, Any]:
        """Build the state, then restart from it in all scenarios.

        Raises:
            RunFailed: a run failed.
            WrongRestoreError: shards came from elsewhere than the scenario says.
        """
        built = run_once(
            Run(self._plan(tuple(write_data(self._workload, self._folder / "input")))),
            self._folder / "build.log",
            BUILD_TIMEOUT_S,
        )
        small = iter(self._small_files())
        restarts: list[dict[str, Any]] = []
        for number in range(self._recovery.repeats):
            for scenario in self._recovery.scenarios:
                bar.step(f"{name}: {scenario} {number + 1}/{self._recovery.repeats}")
                restarts.append(self._restart(scenario, number, small, built[-1]))
        return {
            "title": self._recovery.mode.title,
            "workload": workload_dict(self._workload),
            "settings": dict(self._recovery.mode.settings),
            "built": dict(built[-1].numbers),
            "restarts": restarts,
        }

    def _plan(self, files: tuple[Path, ...]) -> WorkerPlan:
        mode = self._recovery.mode
        return WorkerPlan(
            mode.side, self._workload, self._folder / "job", usable_cores(), files, mode.settings, self._conf
        )

    def _small_files(self) -> list[Path]:
        """Input of all restarts, and of the small jobs before them."""
        restarts = self._recovery.repeats * len(self._recovery.scenarios)
        small = replace(
            self._workload,
            rows=min(RESTART_ROWS, self._workload.rows),
            prefill_batches=0,
            turns={"ours": Turns(0, (RESTART_EPOCHS + WARM_EPOCHS) * restarts)},
        )
        files = write_data(small, self._folder / "small")
        # The inbox has files of the same names already.
        return [path.rename(path.with_name(f"small-{path.name}")) for path in files]

    def _restart(self, scenario: Scenario, number: int, small: Iterator[Path], built: Epoch) -> dict[str, Any]:
        plan = self._plan(tuple(islice(small, RESTART_EPOCHS)))
        local, store = plan.folder / "local", plan.folder / "store"
        if scenario != "local":
            shutil.rmtree(local, ignore_errors=True)
        if scenario == "doubled":
            # The next restart with as many shards as before must find a snapshot that has them.
            copy = plan.folder / "doubled"
            # Objects never change. A real copy would still be on its way to the disk while the restart is timed.
            shutil.copytree(store, copy, copy_function=os.link)
            plan = replace(
                plan, store=str(copy), workload=replace(self._workload, partitions=2 * self._workload.partitions)
            )
        warm = tuple(islice(small, WARM_EPOCHS))
        log = self._folder / f"{scenario}-{number}.log"
        epochs = run_once(Run(plan, warm), log, RESTART_TIMEOUT_S)
        shutil.rmtree(plan.folder / "warm", ignore_errors=True)
        if scenario == "doubled":
            shutil.rmtree(plan.folder / "doubled")
            shutil.rmtree(local, ignore_errors=True)
        first = epochs[0]
        if plan.side == "ours":
            check_scenario(scenario, plan.partitions, first.numbers, built.numbers["state_rows"])
        return {
            "scenario": scenario,
            "recovery_ms": recovery_ms([epoch.duration_ms for epoch in epochs]),
            "restore_ms": first.numbers.get("restore_ms"),
            "ready_ms": first.ready_ms,
            "epochs": [asdict(epoch) for epoch in epochs],
        }


if __name__ == "__main__":
    app()
