"""Jobs on real flights under a real Dagster daemon, disturbed for half an hour: `make soak-dagster`.

    python -m tests.soak.under_dagster --minutes 30 --seed 7

Two jobs read the flights of 2013 as they are delivered, a third has a store that accepts and never answers. Every
schedule of the product runs each few minutes, every sensor at its own pace. A seed says in which order drivers, Python
workers, executors and the daemon are killed, a driver sleeps until another has its place, and the disk of local copies
is full; the next begins when the job has made a checkpoint again.

At the end the jobs are stopped and the laws are held: the output is that of a recomputation by a Spark batch, every
snapshot verifies in full, nothing is left that a collection would not take, events of Dagster and ticks are within
their bounds, and no process is left. Writes tests/soak/reports/dagster.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import dagster as dg
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "orchestration"))

from black_holes import black_hole  # noqa: E402

from examples.flights.oracle import OracleReport  # noqa: E402
from state_runtime.base.clock import SYSTEM_CLOCK  # noqa: E402
from state_runtime.base.errors import StillstateError  # noqa: E402
from tests.soak.aftermath import Record, Root, checked_output, checked_root, record_of  # noqa: E402
from tests.soak.disturbances import plan  # noqa: E402
from tests.soak.disturber import CHECKPOINT_S, Disturber, Failed, Recovered, choices, wait_for  # noqa: E402
from tests.soak.flights_folder import JOBS, PERIOD_MIN, UNREACHABLE, Feeder, FlightsFolder, FlightsStopped, days_per_s  # noqa: E402

REPORT: Final = ROOT / "tests" / "soak" / "reports" / "dagster.json"
PROCESSES_END_S: Final = 180.0
"""Runs of Dagster that are under way when the daemon is asked to end come to their end."""


class Lines:
    """What goes on, with the time."""

    def __init__(self) -> None:
        self._console = Console() if sys.stdout.isatty() else Console(width=160)
        self.began_s = SYSTEM_CLOCK.monotonic_s()

    def __call__(self, text: str) -> None:
        self._console.print(f"{self.elapsed_s():7.1f} s  {text}", soft_wrap=True, highlight=False, markup=False)

    def elapsed_s(self) -> float:
        return SYSTEM_CLOCK.monotonic_s() - self.began_s

    def table(self, rows: Iterator[tuple[str, str]]) -> None:
        table = Table(title=f"soak under Dagster, {self.elapsed_s():.0f} s")
        table.add_column("what")
        table.add_column("found")
        for what, found in rows:
            table.add_row(what, found)
        self._console.print(table)


@dataclass
class Found:
    """What a soak has found so far.

    Attributes:
        not_played: disturbances that this machine does not allow, and why.
        told: messages of the failures sensor, by state and what they are about.
        left: processes that did not end.
        problems: what does not hold.
    """

    seed: int
    minutes: float
    patience_s: float
    recovered: list[Recovered] = field(default_factory=list)
    not_played: dict[str, str] = field(default_factory=dict)
    fed: int = 0
    daemon_began_s: float = 0.0
    daemon_ended_s: float = 0.0
    roots: list[Root] = field(default_factory=list)
    outputs: dict[str, OracleReport] = field(default_factory=dict)
    record: Record | None = None
    told: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def document(self, seconds: float) -> dict[str, Any]:
        """For the report."""
        waits = [r.checkpoint_s for r in self.recovered]
        return {
            "seed": self.seed,
            "minutes": self.minutes,
            "patience_s": self.patience_s,
            "seconds": round(seconds, 1),
            "flights": self.fed,
            "disturbances": dict(sorted(Counter(r.kind for r in self.recovered).items())),
            "not_played": self.not_played,
            "brought_back_by": dict(sorted(Counter(r.by for r in self.recovered).items())),
            "to_checkpoint_s": {
                "p50": round(statistics.median(waits), 1) if waits else None,
                "max": max(waits, default=None),
            },
            "output": {
                job: {"rows": o.legs_found, "expected": o.legs_expected, "keys": o.keys_found, "equal": o.equal}
                for job, o in self.outputs.items()
            },
            "roots": [asdict(root) for root in self.roots],
            "dagster": None if self.record is None else asdict(self.record),
            "told": self.told,
            "processes_left": self.left,
            "problems": self.problems,
            "played": [asdict(r) for r in self.recovered],
        }


# --- the soak ------------------------------------------------------------------------------------------------------


def soak(folder: FlightsFolder, found: Found, say: Lines) -> None:
    """All of it, up to the laws.

    Raises:
        Failed, FlightsStopped, StillstateError: it cannot go on.
    """
    why_not = folder.mount_local()
    if why_not:
        found.not_played["full disk"] = f"the disk of local copies cannot be one of its own here: {why_not}"
    found.daemon_began_s = SYSTEM_CLOCK.now_ms() / 1000
    folder.start_daemon()
    feeder = Feeder(folder, days_per_s(found.minutes))
    feeder.start()
    for job in JOBS:
        started = folder.command("start", job)
        if started.returncode != 0:
            raise Failed(f"{job} did not start: exit code {started.returncode}: {started.stderr[-2000:]}")
        say(f"{job} runs")
    try:
        with _dagster(folder) as instance:
            disturber = Disturber(folder, instance, seed=found.seed, began_s=say.began_s, patience_s=found.patience_s)
            disturb(disturber, folder, found, say)
    finally:
        found.fed = feeder.stop()
    wind_up(folder, found, say)


def disturb(disturber: Disturber, folder: FlightsFolder, found: Found, say: Lines) -> None:
    """Until the time is up; it begins when the jobs work."""
    disturber.first_checkpoints()
    say("each job has made a checkpoint; now they are disturbed")
    ends_s = say.elapsed_s() + found.minutes * 60
    for disturbance in plan(found.seed, choices(with_disk="full disk" not in found.not_played)):
        if say.elapsed_s() > ends_s:
            return
        if folder.daemon_exit() is not None:
            raise Failed(f"the daemon ended by itself with exit code {folder.daemon_exit()}")
        say(f"{disturbance} …")
        recovered = disturber.play(disturbance)
        found.recovered.append(recovered)
        note = f"; {recovered.note}" if recovered.note else ""
        say(f"  checkpoint after {recovered.checkpoint_s:g} s, brought back by {recovered.by}{note}")


def wind_up(folder: FlightsFolder, found: Found, say: Lines) -> None:
    """All input processed, both jobs stopped, Dagster ended.

    Raises:
        Failed: a job did not get there.
    """
    say(f"{found.fed:,} flights were fed; waiting until all are processed")
    for job in JOBS:
        _process_all(folder, job, found)
    for job in JOBS:
        stopped = folder.command("stop", job)
        if stopped.returncode != 0:
            raise Failed(f"{job} did not stop: exit code {stopped.returncode}: {stopped.stderr[-2000:]}")
        say(f"{job}: stopped")
    found.daemon_ended_s = SYSTEM_CLOCK.now_ms() / 1000
    folder.stop_daemon()
    try:
        wait_for("the end of all processes", lambda: not folder.ours(), PROCESSES_END_S)
    except Failed:
        found.left = [f"{p.pid} {' '.join(p.cmdline())[:200]}" for p in folder.ours()]


def _process_all(folder: FlightsFolder, job: str, found: Found) -> None:
    """Each step forward begins the wait anew."""
    while (seen := folder.rows_of(job)) < found.fed:
        wait_for(
            f"more than {seen:,} of {found.fed:,} flights in the output of {job}",
            lambda seen=seen: folder.rows_of(job) > seen,  # type: ignore[misc]
            found.patience_s,
            poll_s=1.0,
        )


# --- the laws ------------------------------------------------------------------------------------------------------


def hold_the_laws(folder: FlightsFolder, found: Found, say: Lines) -> None:
    """Everything that must hold at the end, each for itself: one that does not hides no other."""
    say("verifying, collecting and verifying again")
    found.roots = [checked_root(folder, job) for job in JOBS]
    for root in found.roots:
        found.problems += root.problems()
        status = folder.status(root.job)
        if status is None or status.state != "stopped":
            found.problems.append(f"{root.job} was stopped, and is {status and status.state}")
    say("recomputing the flights with a Spark batch")
    found.outputs = checked_output(folder, found.fed)
    for job, report in found.outputs.items():
        if not report.equal or report.legs_expected != found.fed:
            found.problems.append(f"the output of {job} is not that of the recomputation: {report}")
    say("reading Dagster's record")
    found.record = record_of(folder, found.roots, found.daemon_began_s, found.daemon_ended_s)
    found.problems += found.record.problems(has_had_each_schedule=found.minutes >= 2 * PERIOD_MIN)
    found.told = _told(folder)
    if found.minutes >= PERIOD_MIN and not any(UNREACHABLE in what for what in found.told):
        found.problems.append(f"nobody was told of {UNREACHABLE}, whose store never answers")
    found.problems += (f"process left: {text}" for text in found.left)


def _told(folder: FlightsFolder) -> dict[str, int]:
    lines = folder.told.read_text().splitlines() if folder.told.exists() else []
    messages = [json.loads(line) for line in lines if line]
    return dict(sorted(Counter(f"{m['state']}: {m['what']} of {m['stream']}" for m in messages).items()))


def rows(found: Found) -> Iterator[tuple[str, str]]:
    """For the table."""
    document = found.document(0)
    waits = document["to_checkpoint_s"]
    yield "disturbances", ", ".join(f"{n} {kind}" for kind, n in document["disturbances"].items())
    yield "brought back by", ", ".join(f"{who} {n}" for who, n in document["brought_back_by"].items())
    yield "to the next checkpoint", f"p50 {waits['p50']} s, max {waits['max']} s"
    for job, report in found.outputs.items():
        verdict = "equal to the recomputation" if report.equal else "different"
        yield f"output of {job}", f"{report.legs_found:,} rows, {report.keys_found} keys: {verdict}"
    for root in found.roots:
        yield (
            f"root of {root.job}",
            f"{root.terms} runs, {root.made} snapshots made, {root.left} left, {root.savepoints} savepoints, "
            f"{len(root.findings)} findings, {root.orphans} orphans collected, {root.past_floor} past the floor",
        )
    if found.record is not None:
        for job, kinds in sorted(found.record.runs.items()):
            said = (
                f"{kind} {', '.join(f'{n} {how}' for how, n in sorted(c.items()))}" for kind, c in sorted(kinds.items())
            )
            yield f"runs of {job}", "; ".join(said)
        yield "failed ticks", f"{len(found.record.failed_ticks)} of {sum(found.record.ticks.values())}"
        for bound in found.record.bounds:
            yield f"events of {bound.what}", f"{bound.events}, at most {bound.most}"
    yield "told", "; ".join(f"{n} {what}" for what, n in found.told.items()) or "nothing"
    yield "processes left", str(len(found.left))
    for kind, why in found.not_played.items():
        yield f"not played: {kind}", why


@contextmanager
def _dagster(folder: FlightsFolder) -> Iterator[dg.DagsterInstance]:
    os.environ["DAGSTER_HOME"] = str(folder.home)
    with dg.DagsterInstance.get() as instance:
        yield instance


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="of disturbances (30)")
    parser.add_argument("--seed", type=int, default=None, help="what is drawn; a new one each time by default")
    patience = f"seconds to a job's next checkpoint ({CHECKPOINT_S:g}); more where the machine has other work"
    parser.add_argument("--patience-s", type=float, default=CHECKPOINT_S, help=patience)
    parser.add_argument("--report", type=Path, default=REPORT, help="JSON with the counts")
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if asked.seed is None else asked.seed
    made = Path(tempfile.mkdtemp(prefix=f"soak-dagster-{seed}-"))
    found, say = Found(seed, asked.minutes, asked.patience_s), Lines()
    # Whoever ends the soak early must not leave its drivers and its mount behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    say(f"seed {seed}, in {made}")
    with black_hole() as hole:
        folder = FlightsFolder(made / "house", hole)
        try:
            soak(folder, found, say)
            hold_the_laws(folder, found, say)
        except (Failed, FlightsStopped, StillstateError, subprocess.TimeoutExpired) as failed:
            found.problems.append(f"{type(failed).__name__}: {failed}")
        finally:
            folder.close()
    say.table(rows(found))
    asked.report.parent.mkdir(parents=True, exist_ok=True)
    asked.report.write_text(json.dumps(found.document(say.elapsed_s()), indent=2) + "\n")
    if found.problems:
        for problem in found.problems:
            say(f"does not hold: {problem}")
        say(f"All files and logs stay in {made}; again: --seed {seed}")
        return 1
    shutil.rmtree(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
