"""The figures of a benchmark: what they are, whether they hold, the table and the JSON file.

Pure apart from :func:`write_json` and :func:`describe_machine`; knows nothing of Spark jobs, so every
benchmark of the project can use it.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

__all__ = [
    "Figure",
    "Report",
    "Target",
    "describe_machine",
    "median",
    "percentile",
    "render_table",
    "write_json",
]

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Target:
    """What the ratio ours / peer (or ours, without a peer) must be: at least (throughput) or at most (time) a bound."""

    sense: Literal[">=", "<="]
    bound: float

    def holds(self, ratio: float) -> bool:
        """Tell whether `ratio` meets the bound; the bound itself is good enough."""
        return ratio >= self.bound if self.sense == ">=" else ratio <= self.bound

    def __str__(self) -> str:
        return f"{self.sense} {self.bound:g}"


@dataclass(frozen=True)
class Figure:
    """One measured figure of both engines, or (peer None) one of ours that is judged by itself.

    `ratio` is always ours / peer, so a throughput wants it large and a duration small; the target says which.
    A figure without a target is information: `holds` is then None.
    """

    figure: str
    unit: str
    ours: float
    peer: float | None
    target: Target | None = None

    def __post_init__(self) -> None:
        for side, value in (("ours", self.ours), ("peer", self.peer)):
            if value is not None and (not math.isfinite(value) or value < 0):
                raise ValueError(f"figure {self.figure!r}: {side} is {value!r}, not finite or negative")

    @property
    def ratio(self) -> float | None:
        """Ours / peer, or None when there is no peer or it measured zero: no ratio exists."""
        return self.ours / self.peer if self.peer else None

    @property
    def holds(self) -> bool | None:
        """Whether the target is met; None without a target. A missing ratio never meets a target."""
        if self.target is None:
            return None
        judged = self.ours if self.peer is None else self.ratio
        return judged is not None and self.target.holds(judged)

    def to_json_dict(self) -> dict[str, Any]:
        """Return exactly the keys figure, unit, ours, peer, ratio, target, holds."""
        return {
            "figure": self.figure,
            "unit": self.unit,
            "ours": _rounded(self.ours),
            "peer": None if self.peer is None else _rounded(self.peer),
            "ratio": None if self.ratio is None else round(self.ratio, 4),
            "target": None if self.target is None else str(self.target),
            "holds": self.holds,
        }


@dataclass(frozen=True)
class Report:
    """A whole run: the figures, where they were taken, and the single measurements behind them."""

    name: str
    date: str
    figures: tuple[Figure, ...]
    machine: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    samples: Mapping[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """True if no target is missed."""
        return all(figure.holds is not False for figure in self.figures)

    def to_json_dict(self) -> dict[str, Any]:
        """Return the content of benchmarks/results/<name>.json."""
        return {
            "format_version": FORMAT_VERSION,
            "name": self.name,
            "date": self.date,
            "machine": dict(self.machine),
            "figures": [figure.to_json_dict() for figure in self.figures],
            "settings": dict(self.settings),
            "samples": dict(self.samples),
        }


def median(values: Sequence[float]) -> float:
    """Return the median; the mean of the middle two for an even count.

    Raises:
        ValueError: `values` is empty.
    """
    return percentile(values, 50)


def percentile(values: Sequence[float], q: float) -> float:
    """Return the `q`-th percentile (0..100) with linear interpolation between neighbours.

    Raises:
        ValueError: `values` is empty or `q` is outside 0..100.
    """
    if not values:
        raise ValueError("no values: a percentile needs at least one measurement")
    if not 0 <= q <= 100:
        raise ValueError(f"percentile {q!r} is outside 0..100")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q / 100
    low = math.floor(rank)
    high = math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def render_table(report: Report) -> Table:
    """Build the one table that a benchmark prints."""
    machine = report.machine
    table = Table(
        title=f"stillstate benchmark: {report.name}",
        caption=f"{report.date} · {machine.get('cores')} cores · "
        + " · ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items()),
        caption_justify="left",
    )
    table.add_column("figure")
    for name in ("ours / peer", "target"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("holds")
    for name in ("ours", "peer"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("unit")
    for figure in report.figures:
        table.add_row(
            figure.figure,
            "-" if figure.ratio is None else f"{figure.ratio:.2f}",
            "-" if figure.target is None else str(figure.target),
            {True: "[green]yes[/green]", False: "[red]no[/red]", None: "-"}[figure.holds],
            _human(figure.ours),
            "-" if figure.peer is None else _human(figure.peer),
            figure.unit,
        )
    return table


def write_json(report: Report, path: Path) -> None:
    """Write the report beside its table; the file is replaced whole, never left half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    text = json.dumps(report.to_json_dict(), indent=2, ensure_ascii=False)
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)


def describe_machine() -> dict[str, Any]:
    """Return cores, platform and the versions that a figure depends on. Runs `java -version`."""
    return {
        "cores": usable_cores(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            "pyspark": _version("pyspark"),
            "pyarrow": _version("pyarrow"),
            "pandas": _version("pandas"),
            "java": _java_version(),
            "stillstate": _version("stillstate"),
        },
    }


def usable_cores() -> int:
    """Count the cores this process may use, which a container can limit below what the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        # Running from a checkout that was never installed is normal for `stillstate` itself.
        return "not installed"


def _java_version() -> str:
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if not java:
        return "not found"
    text = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=60).stderr
    found = re.search(r'version "([^"]+)"', text)
    return found.group(1) if found else "unknown"


def _rounded(value: float) -> float:
    """Drop digits that would pretend a precision which timing does not have."""
    return round(value, 1) if value >= 100 else round(value, 3)


def _human(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
