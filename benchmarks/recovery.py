"""`python -m benchmarks.recovery`: how long a restart takes, from the primary store, from local copies, with twice the shards.

Measured in pieces (:mod:`benchmarks.recovery_workloads`), one for each mode, kept in benchmarks/results/pieces as soon as they
are done. Prints one table of all pieces that there are and writes benchmarks/results/recovery.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
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
from benchmarks.restarts import Epoch, Run, run_in_turns, run_once
from benchmarks.workloads import Turns, Workload, write_data

__all__ = ["app"]

RESULTS = Path(__file__).parent / "results"
RESTART_EPOCHS = 5
RESTART_ROWS = 1_000
WARM_EPOCHS = 20
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
        restarts: list[dict[str, Any]] = []
        for group in self._groups():
            log = self._folder / f"restart-{len(restarts)}.log"
            with closing(run_in_turns([run for _, run in group], log, RESTART_TIMEOUT_S)) as answers:
                for scenario, run in group:
                    turn = len(restarts) // len(self._recovery.scenarios) + 1
                    bar.step(f"{name}: {scenario} {turn}/{self._recovery.repeats}")
                    restarts.append(_restart(scenario, run, next(answers), built[-1]))
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
        processes = 1 if self._recovery.in_turns else restarts
        small = replace(
            self._workload,
            rows=min(RESTART_ROWS, self._workload.rows),
            prefill_batches=0,
            turns={"ours": Turns(0, RESTART_EPOCHS * restarts + WARM_EPOCHS * processes)},
        )
        files = write_data(small, self._folder / "small")
        # The inbox has files of the same names already.
        return [path.rename(path.with_name(f"small-{path.name}")) for path in files]

    def _groups(self) -> list[list[tuple[Scenario, Run]]]:
        """All restarts, in order; those of a group in one process."""
        small = iter(self._small_files())
        wanted = [scenario for _ in range(self._recovery.repeats) for scenario in self._recovery.scenarios]
        if not self._recovery.in_turns:
            return [[(scenario, self._run(scenario, small, warm=True))] for scenario in wanted]
        return [[(scenario, self._run(scenario, small, warm=n == 0)) for n, scenario in enumerate(wanted)]]

    def _run(self, scenario: Scenario, small: Iterator[Path], *, warm: bool) -> Run:
        plan = self._plan(tuple(islice(small, RESTART_EPOCHS)))
        local, store, copy = plan.folder / "local", plan.folder / "store", plan.folder / "doubled"
        if scenario == "doubled":
            # The next restart with as many shards as before must find a snapshot that has them.
            shards = replace(self._workload, partitions=2 * self._workload.partitions)
            plan = replace(plan, store=str(copy), workload=shards)
        return Run(
            plan,
            warm=tuple(islice(small, WARM_EPOCHS)) if warm else (),
            removed=() if scenario == "local" else (local, copy),
            linked=(store, copy) if scenario == "doubled" else None,
        )


def _restart(scenario: Scenario, run: Run, epochs: Sequence[Epoch], built: Epoch) -> dict[str, Any]:
    first = epochs[0]
    if run.plan.side == "ours":
        check_scenario(scenario, run.plan.partitions, first.numbers, built.numbers["state_rows"])
    return {
        "scenario": scenario,
        "recovery_ms": recovery_ms([epoch.duration_ms for epoch in epochs]),
        "restore_ms": first.numbers.get("restore_ms"),
        "ready_ms": first.ready_ms,
        "epochs_ms": [epoch.duration_ms for epoch in epochs],
        "first": dict(first.numbers),
    }


if __name__ == "__main__":
    app()
