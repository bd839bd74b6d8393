"""`python -m benchmarks.main`: Stillstate against Spark's own stateful operators, in one table.

Runs the workloads of :mod:`benchmarks.workloads` one after the other. In each, the two engines are up at once
and take turns, so that a slow minute of the machine hits both. Prints one table and writes
benchmarks/results/main.json.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.engines import COMMON_CONF, PEER_CONF
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
from benchmarks.report import Report, describe_machine, render_table, usable_cores, write_json
from benchmarks.workers import WorkerFailed
from benchmarks.workloads import WORKLOADS, Workload, quick

__all__ = ["app"]

RESULTS = Path(__file__).parent / "results"
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
    chosen = _chosen(only)
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

    report = _report(chosen, results)
    name = "main-quick" if quick_run else "main-partial" if only else "main"
    write_json(report, RESULTS / f"{name}.json")
    console.print(render_table(report))
    console.print(f"written: benchmarks/results/{name}.json")
    if strict and not report.holds:
        raise typer.Exit(1)


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
            "workloads": {workload.key: workload_dict(workload) for workload in workloads},
        },
        samples={key: samples_dict(measured) for key, measured in results.items()},
    )


def _chosen(only: str) -> list[Workload]:
    wanted = [part.strip() for part in only.split(",") if part.strip()]
    known = {workload.key: workload for workload in WORKLOADS}
    unknown = [key for key in wanted if key not in known]
    if unknown:
        raise typer.BadParameter(f"unknown workload {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[key] for key in wanted] if wanted else list(WORKLOADS)


if __name__ == "__main__":
    app()
