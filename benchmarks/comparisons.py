"""What the commands that compare workloads with a peer share: which ones to run, and the report of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import typer
from rich.console import Console

from benchmarks.engines import COMMON_CONF, PEER_CONF
from benchmarks.measure import Measured, figures_of, samples_dict, workload_dict
from benchmarks.report import Report, describe_machine, render_table, write_json
from benchmarks.workloads import Workload

__all__ = ["chosen_workloads", "publish", "report_of"]

RESULTS = Path(__file__).parent / "results"


def chosen_workloads(only: str, known: Sequence[Workload]) -> list[Workload]:
    """Those that `--only` names, in its order; all, if it is empty.

    Raises:
        BadParameter: there is none of a name.
    """
    wanted = [part.strip() for part in only.split(",") if part.strip()]
    by_key = {workload.key: workload for workload in known}
    unknown = [key for key in wanted if key not in by_key]
    if unknown:
        raise typer.BadParameter(f"unknown workload {', '.join(unknown)}; there are {', '.join(by_key)}")
    return [by_key[key] for key in wanted] if wanted else list(known)


def report_of(name: str, workloads: Sequence[Workload], results: Mapping[str, Measured]) -> Report:
    """The report of measured workloads."""
    return Report(
        name=name,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        figures=tuple(figure for workload in workloads for figure in figures_of(workload, results[workload.key])),
        machine=describe_machine(),
        settings={
            "both": COMMON_CONF,
            "peer": PEER_CONF,
            "workloads": {workload.key: workload_dict(workload) for workload in workloads},
        },
        samples={key: samples_dict(measured) for key, measured in results.items()},
    )


def publish(console: Console, report: Report, *, is_quick: bool, is_partial: bool, strict: bool) -> None:
    """Write the JSON file and print the table.

    Raises:
        Exit: with 1, if a target is missed and `strict`.
    """
    name = f"{report.name}{'-quick' if is_quick else '-partial' if is_partial else ''}"
    write_json(report, RESULTS / f"{name}.json")
    console.print(render_table(report))
    console.print(f"written: benchmarks/results/{name}.json")
    if strict and not report.holds:
        raise typer.Exit(1)
