"""The pieces of a long benchmark: each is measured by itself and kept as JSON, so that a failure loses nothing.

A run of some pieces leaves those of earlier runs where they are; the table is made of all that there are at the same scale.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.engines import COMMON_CONF, PEER_CONF
from benchmarks.measure import new_console, progress_display
from benchmarks.report import Figure, Report, describe_machine, render_table, write_json

__all__ = ["Benchmark", "Options", "Pieces", "Runner", "chosen_pieces", "load_now", "report_of", "run_pieces"]

Piece = Mapping[str, Any]


@dataclass(frozen=True)
class Pieces:
    """The folder of a benchmark's pieces at one scale.

    A piece is a JSON object: what was measured, beside `date`, `minutes` and `load` (the machine's load average before it).
    """

    folder: Path

    def write(self, name: str, piece: Piece) -> None:
        """Keep a piece; it replaces an earlier one whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{name}.tmp"
        temporary.write_text(json.dumps(piece, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self._path(name))

    def read(self, names: Sequence[str]) -> dict[str, Piece]:
        """Those that there are, in the order of `names`."""
        paths = {name: self._path(name) for name in names}
        return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}

    def drop(self, name: str) -> None:
        """Forget a piece: it is about to be measured again, and must not be taken for new if that fails."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"


Runner = Callable[[str, Path], Piece]
"""Measures the piece of a name in an empty folder."""


def run_pieces(
    names: Sequence[str], run: Runner, pieces: Pieces, work: Path, console: Console, *, keep: bool
) -> list[str]:
    """Measure pieces one after the other; one that fails is reported and does not stop the others.

    Args:
        keep: leave the working folders (stores, inputs, logs of the engines) behind.

    Returns:
        The names of those that failed.
    """
    failed: list[str] = []
    for number, name in enumerate(names, 1):
        console.print(f"[bold]{number}/{len(names)} {name}[/bold]", highlight=False)
        pieces.drop(name)
        folder = work / name
        began, load = datetime.now(UTC), load_now()
        try:
            piece = run(name, folder)
        except Exception as error:
            failed.append(name)
            console.print(f"[red]{name} failed:[/red] {type(error).__name__}: {error}", highlight=False, markup=True)
            continue
        finally:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)
        minutes = (datetime.now(UTC) - began).total_seconds() / 60
        pieces.write(
            name, {"date": began.isoformat(timespec="seconds"), "minutes": round(minutes, 2), "load": load, **piece}
        )
        console.print(f"{name}: {minutes:.1f} min", highlight=False)
    return failed


def report_of(name: str, figures: Sequence[Figure], found: Mapping[str, Piece], settings: Mapping[str, Any]) -> Report:
    """The report over all pieces that there are; its samples are the pieces, each epoch without its inner numbers."""
    return Report(
        name=name,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        figures=tuple(figures),
        machine=describe_machine(),
        settings={**settings, "pieces": {key: _origin(piece) for key, piece in found.items()}},
        samples={key: _slim(piece) for key, piece in found.items()},
    )


def _slim(piece: Piece) -> dict[str, Any]:
    """A piece as the report keeps it; its own file has everything."""
    samples = piece.get("samples")
    if not isinstance(samples, list):
        return {name: _slim(of) if isinstance(of, Mapping) else of for name, of in piece.items()}
    kept = [{k: v for k, v in sample.items() if k not in ("phases_ms", "numbers")} for sample in samples]
    return {**piece, "samples": kept}


def _origin(piece: Piece) -> dict[str, Any]:
    return {name: piece.get(name) for name in ("date", "minutes", "load")}


def load_now() -> float:
    """The machine's load average over the last minute: above its cores something else ran, too."""
    return round(os.getloadavg()[0], 2)


@dataclass(frozen=True)
class Options:
    """What a benchmark's command line says.

    Attributes:
        only: names of pieces with commas; empty for all.
        scale: share of keys and epochs; below 1 nothing is judged.
        table: measure nothing, make the table of what there is.
        keep: leave the working folder.
        strict: a missed target is a failure.
    """

    only: str
    scale: float
    table: bool
    keep: bool
    strict: bool


class _Measure(Protocol):
    def __call__(self, name: str, folder: Path, *, scale: float, progress: Progress) -> Piece: ...


class _FiguresOf(Protocol):
    def __call__(self, pieces: Mapping[str, Piece], *, judged: bool) -> list[Figure]: ...


@dataclass(frozen=True)
class Benchmark:
    """A benchmark that is measured in pieces.

    Attributes:
        names: of all pieces, in the order of the table.
    """

    name: str
    names: tuple[str, ...]
    measure: _Measure
    figures_of: _FiguresOf

    def run(self, options: Options, results: Path) -> None:
        """Measure, print the table, write the results.

        Raises:
            typer.Exit: with 1 if a piece failed, or a target was missed and that counts.
            typer.BadParameter: there is no piece of such a name.
        """
        console = new_console()
        chosen = [] if options.table else chosen_pieces(options.only, self.names)
        name = self.name if options.scale >= 1 else f"{self.name}-scale-{options.scale:g}"
        pieces = Pieces(results / "pieces" / name)
        failed = self._measure(chosen, pieces, options, console)
        found = pieces.read(self.names)
        figures = self.figures_of(found, judged=options.scale >= 1)
        settings = {"both": COMMON_CONF, "peer": PEER_CONF, "scale": options.scale}
        report = report_of(self.name, figures, found, settings)
        write_json(report, results / f"{name}.json")
        console.print(render_table(report))
        console.print(f"written: benchmarks/results/{name}.json")
        if failed:
            console.print(f"[red]failed: {', '.join(failed)}[/red]")
        if failed or (options.strict and not report.holds):
            raise typer.Exit(1)

    def _measure(self, chosen: Sequence[str], pieces: Pieces, options: Options, console: Console) -> list[str]:
        work = Path(tempfile.mkdtemp(prefix="stillstate-bench-"))
        try:
            with progress_display(console) as progress:
                run = partial(self.measure, scale=options.scale, progress=progress)
                return run_pieces(chosen, run, pieces, work, progress.console, keep=options.keep)
        finally:
            if options.keep:
                console.print(f"working folder: {work}")
            else:
                shutil.rmtree(work, ignore_errors=True)


def chosen_pieces(only: str, known: Sequence[str]) -> list[str]:
    """The pieces that `--only` names, in the order of the table; all, if it names none."""
    wanted = [part.strip() for part in only.split(",") if part.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise typer.BadParameter(f"unknown piece {', '.join(unknown)}; there are {', '.join(known)}")
    return [name for name in known if name in wanted or not wanted]
