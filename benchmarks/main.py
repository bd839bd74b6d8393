"""`python -m benchmarks.main`: Stillstate against Spark's own stateful operators, in one table.

Runs the workloads of :mod:`benchmarks.workloads` one after the other. In each, the two engines are up at once
and take turns, so that a slow minute of the machine hits both. Prints one table and writes
benchmarks/results/main.json.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.comparisons import chosen_workloads, publish, report_of
from benchmarks.measure import (
    DisagreementError,
    Measured,
    measure,
    new_console,
    progress_display,
    steps_shown,
)
from benchmarks.report import usable_cores
from benchmarks.workers import WorkerFailed
from benchmarks.workloads import WORKLOADS, quick

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


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
    console = new_console()
    chosen = chosen_workloads(only, WORKLOADS)
    if quick_run:
        chosen = [quick(workload) for workload in chosen]
    results: dict[str, Measured] = {}
    folder = Path(tempfile.mkdtemp(prefix="stillstate-bench-"))
    try:
        with progress_display(console) as progress:
            for workload in chosen:
                step = steps_shown(progress, workload)
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

    publish(console, report_of("main", chosen, results), is_quick=quick_run, is_partial=bool(only), strict=strict)


if __name__ == "__main__":
    app()
