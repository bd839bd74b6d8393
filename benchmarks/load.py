"""`python -m benchmarks.load`: how long Dagster needs to load the code location of a house of 1, 50 and 200 jobs.

Each is loaded in a new process, as Dagster's server of a code location does it: import, configuration, definitions,
all jobs resolved, and the description that the web server and the daemon get. No Java, no store. Prints one table and
writes benchmarks/results/load.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from benchmarks.measure import new_console
from benchmarks.report import describe_machine

__all__ = ["app"]

RESULTS = Path(__file__).parent / "results"
JOBS = (1, 50, 200)
TIMEOUT_S = 600
app = typer.Typer(add_completion=False, rich_markup_mode="rich")

_LOAD = """
import sys, time
began = time.perf_counter()
import dagster as dg
from dagster._core.remote_representation.external_data import RepositorySnap
from dagster_shared.serdes import serialize_value
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.definitions import build_definitions
imported = time.perf_counter()
repository = build_definitions(load_spec(sys.argv[1])).get_repository_def()
repository.load_all_definitions()
loaded = time.perf_counter()
text = serialize_value(RepositorySnap.from_def(repository, defer_snapshots=True))
described = time.perf_counter()
import json
print(json.dumps({
    "import_s": imported - began,
    "load_s": loaded - imported,
    "describe_s": described - loaded,
    "described_bytes": len(text),
    "dagster_jobs": sum(not job.name.startswith("__") for job in repository.get_all_jobs()),
}))
"""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """One load, in seconds; the best of those measured, since others only add the machine's other work."""

    jobs: int
    dagster: str
    dagster_jobs: int
    import_s: float
    load_s: float
    describe_s: float
    described_bytes: int


@app.command()
def main(
    jobs: Annotated[str, typer.Option(help="Numbers of jobs.")] = ",".join(str(n) for n in JOBS),
    dagster: Annotated[str, typer.Option(help="`auto`, `per_job`, `shared`, or several with commas.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, max=20, help="Loads of each; the best counts.")] = 3,
) -> None:
    """Measure how long the code location loads.

    Example: [b]python -m benchmarks.load --dagster per_job,shared[/b]
    """
    console = new_console()
    found = [_best(int(number), kind.strip(), rounds) for number in jobs.split(",") for kind in dagster.split(",")]
    table = Table("jobs", "dagster", "jobs of Dagster", "import s", "load s", "describe s", "described MB")
    for f in found:
        table.add_row(
            str(f.jobs), f.dagster, str(f.dagster_jobs), f"{f.import_s:.2f}", f"{f.load_s:.2f}",
            f"{f.describe_s:.2f}", f"{f.described_bytes / 1e6:.1f}",
        )  # fmt: skip
    console.print(table)
    document = {
        "name": "load",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "loads": [asdict(f) for f in found],
    }
    (RESULTS / "load.json").write_text(json.dumps(document, indent=2) + "\n")
    console.print("written: benchmarks/results/load.json")


def _best(jobs: int, kind: str, rounds: int) -> Loaded:
    with tempfile.TemporaryDirectory(prefix="stillstate-bench-") as folder:
        file = Path(folder) / "stillstate.yaml"
        lines = ["version: 1", f"dagster: {{jobs: {kind}}}", "defaults:", "  entry_point: nowhere.job:build"]
        lines += ["  store: state", "jobs:", *(f"  job-{n:03}: {{}}" for n in range(jobs))]
        file.write_text("\n".join(lines) + "\n")
        measured = [_load(file) for _ in range(rounds)]
    best = min(measured, key=lambda one: one["load_s"] + one["describe_s"])
    return Loaded(jobs=jobs, dagster=kind, **best)


def _load(file: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(file)], capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise typer.BadParameter(f"the definitions do not load: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    app()
