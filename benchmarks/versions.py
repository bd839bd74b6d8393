"""`python -m benchmarks.versions BEFORE`: two versions of Stillstate in turns, over the workloads of `bench-engine`, without Spark's operators.

A ratio to Spark moves by a tenth from run to run, because two different programs share one machine. Two versions of the same
program, both up at once and in turns, show a loss of a few in a hundred. Prints one table and writes benchmarks/results/versions.json.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.comparisons import chosen_workloads, publish
from benchmarks.engine_workloads import COMPARISONS
from benchmarks.engines import COMMON_CONF, WorkerPlan
from benchmarks.measure import (
    DisagreementError,
    Measured,
    figures_of,
    measure,
    new_console,
    progress_display,
    samples_dict,
    steps_shown,
    workload_dict,
)
from benchmarks.report import Report, Target, describe_machine, usable_cores
from benchmarks.workers import TreeWorker, Worker, WorkerFailed
from benchmarks.workloads import Turns, Workload, quick

__all__ = ["app", "compared"]

TARGET = Target(">=", 0.97)
ROUNDS = 5
"""More than against Spark: what is looked for is smaller."""
WARM = 8
"""What Java still compiles would be larger than what is looked for."""

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def main(
    before: Annotated[
        Path,
        typer.Argument(
            exists=True,
            file_okay=False,
            help="A checkout of the older version ([b]git worktree add ../before REV[/b]).",
        ),
    ],
    only: Annotated[
        str, typer.Option(help="Only these, e.g. [b]list,map[/b]; writes results/versions-partial.json.")
    ] = "",
    quick_run: Annotated[
        bool, typer.Option("--quick", help="Smoke test, no targets; writes results/versions-quick.json.")
    ] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a target is missed.")] = False,
) -> None:
    """Measure this version beside an older one: same machine, same run, same data, in turns.

    Example: [b]git worktree add ../before HEAD~50 && python -m benchmarks.versions ../before --only aggregate[/b]
    """
    console = new_console()
    chosen = [quick(one) if quick_run else one for one in map(compared, chosen_workloads(only, COMPARISONS))]
    folder = Path(tempfile.mkdtemp(prefix="stillstate-bench-"))
    measured: dict[str, Measured] = {}
    try:
        with progress_display(console) as progress:
            for workload in chosen:
                step = steps_shown(progress, workload)
                start = _workers(before.resolve())
                measured[workload.key] = measure(workload, folder / workload.key, usable_cores(), step, start)
                step("done", 0)
                shutil.rmtree(folder / workload.key, ignore_errors=True)
    except (WorkerFailed, DisagreementError) as error:
        console.print(f"[red]benchmark failed:[/red] {error}", highlight=False)
        raise typer.Exit(1) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report = Report(
        name="versions",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        figures=tuple(figure for workload in chosen for figure in figures_of(workload, measured[workload.key])),
        machine=describe_machine(),
        settings={
            "both": COMMON_CONF,
            "ours": _revision(Path(__file__).parent),
            "peer": _revision(before),
            "workloads": {workload.key: workload_dict(workload) for workload in chosen},
        },
        samples={key: samples_dict(found) for key, found in measured.items()},
    )
    publish(console, report, is_quick=quick_run, is_partial=bool(only), strict=strict)


def compared(workload: Workload) -> Workload:
    """A workload of ours against Spark as one of ours against ours: as many batches, and more rounds, for both."""
    ours = workload.turns["ours"]
    # A workload that warms for one batch has long ones.
    turns = Turns(max(ours.warm, min(WARM, 4 * ours.warm)), ours.per_round)
    return replace(
        workload,
        rounds=ROUNDS,
        turns={"ours": turns, "peer": turns},
        target=TARGET,
        peer_from="",
        peer_reads=1,
        compare=("input_rows", "state_rows"),
    )


def _workers(before: Path) -> Callable[[WorkerPlan], Worker]:
    """Start ours from here, and the peer, which is ours too, from the other checkout."""

    def start(plan: WorkerPlan) -> Worker:
        return Worker(plan) if plan.side == "ours" else TreeWorker(replace(plan, side="ours"), before)

    return start


def _revision(folder: Path) -> str:
    """What git calls a checkout; empty if it is none."""
    found = subprocess.run(("git", "describe", "--always", "--dirty"), cwd=folder, capture_output=True, text=True)
    return found.stdout.strip()


if __name__ == "__main__":
    app()
