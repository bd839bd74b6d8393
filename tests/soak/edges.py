"""Every edge of a job is killed in each of its steps, and each row is counted: `make soak-edges`.

    python -m tests.soak.edges --kills 200 --seed 7
    python -m tests.soak.edges --life 7-12               # one life again: the same draws, other moments
    python -m tests.soak.edges --only delta iceberg      # without a server
    python -m tests.soak.edges --kills 0 --jobs 1        # a whole job alone

A *life* is a target (a Delta or an Iceberg table, a topic of a real Kafka broker, a table of a real PostgreSQL; rows are
appended, or merged by key) and eight disturbances: a driver dies at a step of its own or of the sink, or at a drawn
moment; the broker or the database dies at such a step, or at a moment, with the driver or alone; a driver sleeps at a
step (SIGSTOP) and wakes up beside its successor or behind it. The next driver goes on from what the newest manifest
names. At the end a driver is left alone, an old one publishes all again, and the target must have each epoch's rows
once: those that were staged by the driver whose manifest names them, in order where the sink promises an order; merged
ones are what a dict keeps.

These drivers are processes without Spark: they call sinks by their public port, in the order in which a run does. Each
disturbance of a target comes once before any comes again. Behind them come whole jobs, with Spark, Kafka in and every
sink out (`edges_jobs.py`), whose driver, broker and database die; each target is compared with the input.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.table import Table

from examples.servers.kafka import KafkaBroker
from examples.servers.postgres import PostgresServer
from tests.soak.edges_lives import Blow, LawBroken, Life, Server, live, name_of, target_of
from tests.soak.edges_targets import TARGETS, Target

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "tests" / "soak" / "reports" / "edges.json"
_TOLD_EVERY_S = 20.0


@dataclass
class Report:
    """What was played; every life held the law.

    Attributes:
        kills: by target, then by kind, then by step. Zombies are among them: drivers that were stopped and woke up.
        rows: in the targets, each there once.
    """

    seed: int
    lives: int = 0
    jobs: int = 0
    seconds: float = 0.0
    kills_in_all: int = 0
    rows: int = 0
    epochs: int = 0
    lost: int = 0
    doubled: int = 0
    of_kinds: dict[str, int] = field(default_factory=dict)
    kills: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)

    @property
    def so_far(self) -> str:
        return f"{self.kills_in_all} kills so far, {self.lost} rows lost, {self.doubled} doubled"

    def add(self, target: str, kills: Counter[tuple[str, str]], rows: int) -> None:
        """Take note of a target whose readers saw each row once."""
        self.rows += rows
        self.kills_in_all += kills.total()
        for (kind, point), times in sorted(kills.items()):
            self.of_kinds[kind] = self.of_kinds.get(kind, 0) + times
            steps = self.kills.setdefault(target, {}).setdefault(kind, {})
            steps[point] = steps.get(point, 0) + times

    def note(self, life: Life) -> None:
        """Take note of what else happened in a life."""
        self.lives += 1
        self.epochs += life.epochs
        self.notes = dict(sorted((Counter(self.notes) + life.notes).items()))


class _Servers:
    """Real ones, each started when a life needs it; all end with the soak."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    @cached_property
    def broker(self) -> KafkaBroker:
        return self._stack.enter_context(KafkaBroker(self._folder / "broker"))

    @cached_property
    def database(self) -> PostgresServer:
        server = PostgresServer()
        self._stack.callback(server.close)
        return server

    def of(self, kind: str) -> tuple[Server | None, str]:
        """The server of a kind and its address; of none if the kind is empty."""
        if kind == "broker":
            return self.broker, self.broker.bootstrap
        return (self.database, self.database.url()) if kind else (None, "")


@contextmanager
def _all_servers() -> Iterator[_Servers]:
    folder = Path(tempfile.mkdtemp(prefix="soak-edges-servers-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield _Servers(folder, stack)


class Told:
    """A line for what is done, and one each while for what is under way, by a thread of its own."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.under_way = ""
        self._told_s = self.begun_s = time.monotonic()
        self._is_over = threading.Event()

    def __enter__(self) -> Told:
        threading.Thread(target=self._tick, name="told", daemon=True).start()
        return self

    def __exit__(self, *why: object) -> None:
        self._is_over.set()

    def say(self, text: str) -> None:
        self._told_s = time.monotonic()
        self.console.print(f"{self._told_s - self.begun_s:6.0f} s  {text}", highlight=False, soft_wrap=True)

    def _tick(self) -> None:
        while not self._is_over.wait(1):
            if time.monotonic() - self._told_s > _TOLD_EVERY_S:
                self.say(f"under way: {self.under_way}")


def play_lives(names: Iterator[str], kills: int, servers: _Servers, report: Report, told: Told) -> None:
    """Play lives until there were so many kills.

    Raises:
        LawBroken: names the life.
    """
    for name in names:
        target = target_of(name)

        def tell(blow: Blow, name: str = name, target: Target = target) -> None:
            told.under_way = f"life {name}, {target.name}: {blow.kind} at {blow.point}"

        with _named(f"--life {name}"):
            life = live(name, *servers.of(target.server), tell=tell)
        shutil.rmtree(life.place.folder)
        report.add(target.name, life.kills, life.rows)
        report.note(life)
        told.say(f"life {name}, {target.name}: {life.kills.total()} kills, {life.rows} rows; {report.so_far}")
        if report.kills_in_all >= kills:
            return


def play_jobs(numbers: Iterable[int], servers: _Servers, report: Report, told: Told) -> None:
    """Play whole jobs.

    Raises:
        LawBroken: names the job.
    """
    from tests.soak.edges_jobs import live_job

    for number in numbers:

        def tell(blow: str, number: int = number) -> None:
            told.under_way = f"job {number}: {blow}"
            told.say(told.under_way)

        with _named(f"--job {number} --seed {report.seed}"):
            job = live_job(report.seed, number, servers.broker, servers.database, tell)
        shutil.rmtree(job.folder)
        report.add("a whole job", job.kills, job.rows)
        report.jobs += 1
        told.say(f"job {number}: {job.kills.total()} kills, {job.rows} rows; {report.so_far}")


@contextmanager
def _named(again: str) -> Iterator[None]:
    try:
        yield
    except LawBroken as error:
        raise LawBroken(f"{error}\nAgain: {again}") from error


def table_of(report: Report) -> Table:
    """The kills by target and kind, and in brackets how many different steps they met."""
    table = Table(
        title=f"{report.kills_in_all} kills, {report.rows:,} rows: {report.lost} lost, {report.doubled} doubled"
    )
    kinds = list(report.of_kinds)
    for column in ("target", *kinds):
        table.add_column(column)
    for target, of_kinds in report.kills.items():
        cells = [of_kinds.get(kind, {}) for kind in kinds]
        table.add_row(target, *(f"{sum(steps.values())} ({len(steps)})" if steps else "" for steps in cells))
    table.add_row("in all", *(str(report.of_kinds[kind]) for kind in kinds))
    return table


def _numbers(only: list[str]) -> Iterator[int]:
    chosen = {number for number, target in enumerate(TARGETS) if not only or target.name.partition(",")[0] in only}
    return (number for number in count() if number % len(TARGETS) in chosen)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.edges", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, help="of drivers without Spark, at least (200)")
    parser.add_argument("--jobs", type=int, default=2, help="whole jobs behind them, of about ten kills each (2)")
    parser.add_argument("--seed", type=int, default=None, help="what is drawn (STILLSTATE_TEST_SEED, or a new one)")
    parser.add_argument("--life", default="", help="play one life again, by the name in the error")
    parser.add_argument("--job", type=int, default=None, help="play one job again, by its number and --seed")
    parser.add_argument("--only", nargs="*", default=[], choices=sorted({t.name.partition(",")[0] for t in TARGETS}))
    parser.add_argument("--report", type=Path, default=REPORT, help="JSON with the counts")
    given = parser.parse_args(argv)
    wanted = os.environ.get("STILLSTATE_TEST_SEED", "")
    drawn = int(wanted) if wanted else random.SystemRandom().randrange(1 << 32)
    report = Report(drawn if given.seed is None else given.seed)
    console = Console() if sys.stdout.isatty() else Console(width=160)
    is_again = bool(given.life) or given.job is not None
    names = iter([given.life]) if given.life else (name_of(report.seed, n) for n in _numbers(given.only))
    jobs = [given.job] if given.job is not None else range(0 if given.life or given.only else given.jobs)
    code = 0
    with Told(console) as told, _all_servers() as servers:
        told.say(f"seed {report.seed}")
        try:
            if given.job is None and given.kills > 0:
                play_lives(names, given.kills, servers, report, told)
                if not is_again:
                    write(report, given.report, told)
            play_jobs(jobs, servers, report, told)
        except LawBroken as error:
            console.print(str(error), style="red", markup=False)
            code = 1
    console.print(table_of(report))
    if code == 0 and not is_again:
        write(report, given.report, told)
    return code


def write(report: Report, place: Path, told: Told) -> None:
    """Write what was played so far, all of which held the law."""
    report.seconds = round(time.monotonic() - told.begun_s, 1)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(asdict(report), indent=2) + "\n")
    told.say(f"written to {place.name}")


if __name__ == "__main__":
    sys.exit(main())
