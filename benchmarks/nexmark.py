"""`python -m benchmarks.nexmark`: NEXMark's queries, each beside Spark's own streaming query, in one table.

First every query is run on a few thousand events and compared, row by row, with Spark's batch query; then both engines take
turns, as in the other benchmarks. Prints one table and writes benchmarks/results/nexmark.json.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.comparisons import chosen_workloads, publish, report_of
from benchmarks.measure import (
    Measured,
    measure,
    new_console,
    progress_display,
    steps_shown,
)
from benchmarks.nexmark_answers import answer_all
from benchmarks.nexmark_queries import QUERIES
from benchmarks.report import Target, usable_cores
from benchmarks.workers import WorkerFailed
from benchmarks.workloads import Turns, Workload, quick

__all__ = ["WORKLOADS", "app"]

# Stateless, aggregates, joins, user code in rows: what is aimed at, ours ÷ Spark's.
_BOUNDS = {"stateless": 1.0, "aggregate": 2.0, "join": 3.0, "rows": 8.0}
_KINDS = {
    **dict.fromkeys(("q3", "q8", "q9", "q20"), "join"),
    **dict.fromkeys(("q15", "q19", "q23"), "rows"),
}

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


def _workload(name: str) -> Workload:
    query = QUERIES[name]
    kind = "stateless" if query.sink else _KINDS.get(name, "aggregate")
    # A job that runs, not one that starts: Java still compiles for hundreds of batches (docs/design/0037-handover.md).
    ours = Turns(warm=100, per_round=5)
    return Workload(
        key=name,
        title=query.title,
        operator=name,
        rows=100_000,
        keys=0,
        prefill_batches=0,
        rounds=3,
        turns={"ours": ours, "peer": Turns(warm=2, per_round=1) if kind == "rows" else ours},
        measure="rows_per_s",
        target=Target(">=", _BOUNDS[kind]),
        data="nexmark",
        compare=(),
        peer_reads=query.reads,
        sink=query.sink,
    )


WORKLOADS = tuple(map(_workload, QUERIES))


@app.command()
def main(
    only: Annotated[
        str, typer.Option(help="Only these, e.g. [b]q5,q17[/b]; writes results/nexmark-partial.json.")
    ] = "",
    quick_run: Annotated[
        bool, typer.Option("--quick", help="Smoke test, no targets; writes results/nexmark-quick.json.")
    ] = False,
    check: Annotated[bool, typer.Option(help="Compare all answers with Spark's batch queries first.")] = True,
    keep: Annotated[bool, typer.Option(help="Keep the working folder with both engines' logs.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a target is missed.")] = False,
) -> None:
    """Measure NEXMark: same machine, same run, same events as Spark's own streaming queries.

    Example: [b]python -m benchmarks.nexmark --only q5,q17[/b]
    """
    console = new_console()
    chosen = chosen_workloads(only, WORKLOADS)
    if quick_run:
        chosen = [quick(workload) for workload in chosen]
    results: dict[str, Measured] = {}
    folder = Path(tempfile.mkdtemp(prefix="stillstate-nexmark-"))
    try:
        with progress_display(console) as progress:
            if check:
                task = progress.add_task("answers", total=1)
                _check([workload.key for workload in chosen], folder / "answers")
                progress.update(task, advance=1)
            for workload in chosen:
                step = steps_shown(progress, workload)
                results[workload.key] = measure(workload, folder / workload.key, usable_cores(), step)
                step("done", 0)
                shutil.rmtree(folder / workload.key, ignore_errors=not keep)
    except WorkerFailed as error:
        console.print(f"[red]benchmark failed:[/red] {error}", highlight=False)
        raise typer.Exit(1) from error
    finally:
        if keep:
            console.print(f"working folder: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    publish(console, report_of("nexmark", chosen, results), is_quick=quick_run, is_partial=bool(only), strict=strict)


def _check(names: Sequence[str], folder: Path) -> None:
    """In a process of its own, because a session cannot be had twice in one.

    Raises:
        WorkerFailed: an answer is wrong.
    """
    context = multiprocessing.get_context("spawn")
    wrong = context.Queue()
    process = context.Process(target=answer_all, args=(list(names), folder, wrong), daemon=False)
    process.start()
    process.join()
    if process.exitcode:
        raise WorkerFailed(f"the queries could not be checked: exit code {process.exitcode}")
    told = wrong.get(timeout=60)
    if told:
        raise WorkerFailed("answers differ from Spark's batch query: " + "; ".join(told))


if __name__ == "__main__":
    app()
