"""`python -m benchmarks.flink`: NEXMark's queries beside Flink's SQL, and restarts of Flink, in one table.

Measured in pieces, one a query and one for each kind of restart, kept in benchmarks/results/pieces/flink as soon as they are
done; the table, and benchmarks/results/flink.json, are made of all that there are.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from benchmarks.flink import restart, throughput
from benchmarks.flink.answers import check
from benchmarks.flink.cluster import Cluster
from benchmarks.flink.distribution import FlinkMissing, found_distribution
from benchmarks.pieces import Benchmark, Options, chosen_pieces
from benchmarks.report import Figure
from benchmarks.restart import restarts_of

__all__ = ["app"]

RESULTS = Path(__file__).resolve().parents[1] / "results"
QUICK_SCALE = 0.02
TIMES = 5
_RESTARTS: Mapping[str, restart.Kind] = {f"restart-{kind}": kind for kind in restart.KINDS}
OURS = "restart-ours"
NAMES = (*throughput.WORKLOADS, OURS, *_RESTARTS)

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    only: Annotated[str, typer.Option(help="Only these pieces, e.g. [b]q5,q17[/b]; the others stay as they are.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="A fiftieth of the events, judges nothing.")] = False,
    times: Annotated[int, typer.Option(min=1, help="Kills of each kind.")] = TIMES,
    table: Annotated[bool, typer.Option("--table", help="Measure nothing, show what there is.")] = False,
    keep: Annotated[bool, typer.Option(help="Keep the working folder with the logs of both engines.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a target is missed.")] = False,
) -> None:
    """Measure NEXMark's Q5, Q7, Q11, Q17 and Q18 beside Flink's SQL, and restarts of Flink.

    Example: [b]python -m benchmarks.flink --only q5,q17[/b]
    """
    if context.invoked_subcommand is None:
        _run(Options(only, QUICK_SCALE if quick else 1.0, table, keep, strict), times)


@app.command("restart")
def restarts(times: Annotated[int, typer.Option(min=1, help="Kills of each kind.")] = TIMES) -> None:
    """Measure restarts only, ours and Flink's. Example: [b]python -m benchmarks.flink restart --times 5[/b]"""
    _run(Options(",".join((OURS, *_RESTARTS)), 1.0, table=False, keep=False, strict=False), times)


def _run(options: Options, times: int) -> None:
    # Flink's processes must not outlive this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not options.table:
        chosen_pieces(options.only, NAMES)
        try:
            found_distribution()
        except FlinkMissing as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(2) from error
    Benchmark("flink", NAMES, partial(_measure, times=times), _figures_of).run(options, RESULTS)


def _measure(name: str, folder: Path, *, scale: float, progress: Progress, times: int) -> dict[str, Any]:
    flink = found_distribution()
    task = progress.add_task(name, total=None)

    def step(text: str) -> None:
        progress.update(task, description=f"{name}: {text}")

    times = times if scale >= 1 else 1
    try:
        if name == OURS:
            step("kills of ours")
            return {"restarts": [asdict(one) for one in restarts_of("supervisor", times)]}
        if name in _RESTARTS:
            return restart.measured(_RESTARTS[name], times, flink, folder, step)
        step("answers")
        with Cluster(flink, folder / "answers-flink", throughput.settings(folder / "answers")) as cluster:
            check(cluster, [name], folder / "answers" / "input")
        workload = throughput.scaled(throughput.WORKLOADS[name], scale)
        return throughput.measured(workload, flink, folder, step)
    finally:
        progress.remove_task(task)


def _figures_of(pieces: Mapping[str, Mapping[str, Any]], *, judged: bool) -> list[Figure]:
    ours = pieces.get(OURS)
    figures: list[Figure] = []
    for name, piece in pieces.items():
        if name in _RESTARTS:
            figures += restart.figures_of(_RESTARTS[name], piece, ours)
        elif name != OURS:
            figures += throughput.figures_of(name, piece, throughput.TARGET if judged else None)
    return figures


if __name__ == "__main__":
    app()
