"""`python -m benchmarks.main`: Stillstate against Spark's own stateful operators, in one table.

Runs the workloads of :mod:`benchmarks.workloads` one after the other. In each, the two engines are up at once
and take turns, so that a slow minute of the machine hits both. Prints one table and writes
benchmarks/results/main.json.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.engines import COMMON_CONF, PEER_CONF, Sample, WorkerPlan
from benchmarks.report import (
    Figure,
    Report,
    describe_machine,
    median,
    percentile,
    render_table,
    usable_cores,
    write_json,
)
from benchmarks.workers import Turn, Worker, WorkerFailed, settle
from benchmarks.workloads import NO_ROW_COUNT, WORKLOADS, Side, Workload, quick, write_data

__all__ = ["Measured", "Samples", "app", "figures_of", "measure"]

RESULTS = Path(__file__).parent / "results"
BATCH_TIMEOUT_S = 300.0
TABLE_WIDTH = 120
SIDES: tuple[Side, Side] = ("ours", "peer")

Samples = Mapping[Side, Sequence[Sample]]


@dataclass(frozen=True)
class Measured:
    """What counts of one workload.

    Attributes:
        samples: One per counted trigger.
        cpu_ms: CPU time a batch, one per counted turn.
    """

    samples: Samples
    cpu_ms: Mapping[Side, Sequence[float]]


Step = Callable[[str, int], None]

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


class DisagreementError(RuntimeError):
    """The engines do not hold the same state after the same batch: their times must not be compared."""


@app.command()
def main(
    only: Annotated[str, typer.Option(help="Only these, e.g. [b]a,c[/b]; writes results/main-partial.json.")] = "",
    quick_run: Annotated[
        bool, typer.Option("--quick", help="Smoke test, no targets; writes results/main-quick.json.")
    ] = False,
    keep: Annotated[bool, typer.Option(help="Keep the working folder with both engines' logs.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a target is missed.")] = False,
) -> None:
    """Measure Stillstate against Spark's stateful operators: same machine, same run, same classes, same data.

    Example: [b]python -m benchmarks.main --only d[/b]
    """
    console = _console()
    chosen = _chosen(only)
    if quick_run:
        chosen = [quick(workload) for workload in chosen]
    results: dict[str, Measured] = {}
    folder = Path(tempfile.mkdtemp(prefix="stillstate-bench-"))
    try:
        with _progress_display(console) as progress:
            for workload in chosen:
                step = _steps_shown(progress, workload)
                results[workload.key] = measure(workload, folder / workload.key, usable_cores(), step)
                step("done", 0)
    except (WorkerFailed, DisagreementError) as error:
        console.print(f"[red]benchmark failed:[/red] {error}", highlight=False)
        raise typer.Exit(1) from error
    finally:
        if keep:
            console.print(f"working folder: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)

    report = _report(chosen, results)
    name = "main-quick" if quick_run else "main-partial" if only else "main"
    write_json(report, RESULTS / f"{name}.json")
    console.print(render_table(report))
    console.print(f"written: benchmarks/results/{name}.json")
    if strict and not report.holds:
        raise typer.Exit(1)


def measure(workload: Workload, folder: Path, cores: int, step: Step) -> Measured:
    """Run one workload: pre-fill and warm both engines, then let them take turns.

    Returns:
        The counted samples of each side, without pre-fill, warm-up and (`drop_first`) the first of each turn, and
        the CPU time of the turns after the warm-up.

    Raises:
        WorkerFailed: An engine failed.
        DisagreementError: The engines disagree on the state.
    """
    step("writing input", 0)
    files = tuple(write_data(workload, folder / "input"))
    counted: dict[Side, list[Sample]] = {side: [] for side in SIDES}
    everything: dict[Side, list[Sample]] = {side: [] for side in SIDES}
    cpu_ms: dict[Side, list[float]] = {side: [] for side in SIDES}
    with ExitStack() as stack:
        workers: dict[Side, Worker] = {}
        for side in SIDES:
            step(f"starting {side}", 0)
            plan = WorkerPlan(side, workload, folder / side, cores, files)
            workers[side] = stack.enter_context(Worker(plan))
            workers[side].wait_ready()

        def turn(side: Side, batches: int, text: str) -> Turn:
            step(f"{side} {text}", 0)
            settle(list(workers.values()))
            done = workers[side].run(batches, BATCH_TIMEOUT_S * batches)
            everything[side].extend(done.samples)
            step(f"{side} {text}", batches)
            return done

        for side in SIDES:
            turn(side, workload.prefill_batches + workload.turns[side].warm, "warm-up")
        for number in range(workload.rounds):
            # The order changes every round, so that neither engine always follows the other's last turn.
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                batches = workload.turns[side].per_round
                done = turn(side, batches, f"round {number + 1}/{workload.rounds}")
                counted[side].extend(done.samples[1:] if workload.drop_first else done.samples)
                cpu_ms[side].append(done.cpu_ms / batches)
    check_agreement(workload, everything)
    return Measured(counted, cpu_ms)


def check_agreement(workload: Workload, samples: Samples) -> None:
    """Compare what both engines hold after the same batch of the same input.

    Raises:
        DisagreementError: In some batch they read a different number of rows, or hold a different number of state
            rows after it.
    """
    uncounted = dict(workload.peer_conf).keys() & dict(NO_ROW_COUNT).keys()
    what_to_compare = ("input_rows",) if uncounted else ("input_rows", "state_rows")
    peer = {sample.batch_id: sample for sample in samples["peer"]}
    for ours in samples["ours"]:
        theirs = peer.get(ours.batch_id)
        if theirs is None:
            continue
        for what in what_to_compare:
            if getattr(ours, what) != getattr(theirs, what):
                raise DisagreementError(
                    f"workload {workload.key}, batch {ours.batch_id}: {what} is {getattr(ours, what)} in ours "
                    f"and {getattr(theirs, what)} in the peer; the engines did not do the same work"
                )


def figures_of(workload: Workload, measured: Measured) -> list[Figure]:
    """Turn what counts of one workload into its figures (medians over the triggers)."""
    samples = measured.samples
    name = f"{workload.key}: {workload.title}"
    trigger_ms = {side: median([sample.trigger_ms for sample in samples[side]]) for side in SIDES}
    if workload.measure == "rows_per_s":
        rate = {side: workload.rows / trigger_ms[side] * 1000 for side in SIDES}
        figures = [Figure(f"{name}: rows", "rows/s", rate["ours"], rate["peer"], workload.target)]
    else:
        figures = [Figure(f"{name}: trigger", "ms", trigger_ms["ours"], trigger_ms["peer"], workload.target)]
    if "checkpoint" in workload.informs:
        for q in (50, 99):
            ours, peer = (percentile([sample.checkpoint_ms for sample in samples[side]], q) for side in SIDES)
            figures.append(Figure(f"{name}: checkpoint p{q}", "ms", ours, peer))
    if "cpu" in workload.informs:
        ours, peer = (median(measured.cpu_ms[side]) for side in SIDES)
        figures.append(Figure(f"{name}: CPU time a batch", "ms", ours, peer))
    return figures


def _report(workloads: Sequence[Workload], results: Mapping[str, Measured]) -> Report:
    figures = [figure for workload in workloads for figure in figures_of(workload, results[workload.key])]
    return Report(
        name="main",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        figures=tuple(figures),
        machine=describe_machine(),
        settings={
            "both": COMMON_CONF,
            "peer": PEER_CONF,
            "workloads": {workload.key: _workload_dict(workload) for workload in workloads},
        },
        samples={
            key: {
                side: {"triggers": [asdict(s) for s in measured.samples[side]], "cpu_ms": measured.cpu_ms[side]}
                for side in SIDES
            }
            for key, measured in results.items()
        },
    )


def _workload_dict(workload: Workload) -> dict[str, object]:
    resolved = replace(workload, partitions=workload.partitions or usable_cores())
    return {**asdict(resolved), "target": None if workload.target is None else str(workload.target)}


def _steps_shown(progress: Progress, workload: Workload) -> Step:
    """Add a bar that counts the batches of both engines, and return what moves it."""
    turns = workload.turns.values()
    total = sum(workload.prefill_batches + turn.total(workload.rounds) for turn in turns)
    task = progress.add_task(f"{workload.key}: {workload.title}", total=total)

    def step(text: str, batches: int) -> None:
        progress.update(task, description=f"{workload.key}: {workload.title}: {text}", advance=batches)

    return step


def _chosen(only: str) -> list[Workload]:
    wanted = [part.strip() for part in only.split(",") if part.strip()]
    known = {workload.key: workload for workload in WORKLOADS}
    unknown = [key for key in wanted if key not in known]
    if unknown:
        raise typer.BadParameter(f"unknown workload {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[key] for key in wanted] if wanted else list(WORKLOADS)


def _console() -> Console:
    """A console on which the table does not wrap when the output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=TABLE_WIDTH)


def _progress_display(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console,
    )  # fmt: skip


if __name__ == "__main__":
    app()
