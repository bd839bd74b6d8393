"""Every edge of a job is killed in each of its steps, and each row is counted: `make soak-edges`.

    python -m tests.soak.edges --kills 200 --seed 7
    python -m tests.soak.edges --life 7-12               # one life again: the same draws, other moments
    python -m tests.soak.edges --only delta iceberg      # without a server

A *life* is a target (a Delta or an Iceberg table, a topic of a real Kafka broker, a table of a real PostgreSQL; rows are
appended, or merged by key) and eight disturbances: a driver dies at a step of its own or of the sink, or at a drawn
moment; the broker or the database dies at such a step, or at a moment, with the driver or alone; a driver sleeps at a
step (SIGSTOP) and wakes up beside its successor or behind it. The next driver goes on from what the newest manifest
names. At the end a driver is left alone, an old one publishes all again, and the target must have each epoch's rows
once: those that were staged by the driver whose manifest names them, in order where the sink promises an order; merged
ones are what a dict keeps.

Drivers are processes without Spark: they call sinks by their public port, in the order in which a run does. Each
disturbance of a target comes once before any comes again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.soak.edges_lives import Blow, LawBroken, Life, Server, live, name_of, target_of
from tests.soak.edges_targets import TARGETS

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
    seconds: float = 0.0
    kills_in_all: int = 0
    rows: int = 0
    epochs: int = 0
    lost: int = 0
    doubled: int = 0
    of_kinds: dict[str, int] = field(default_factory=dict)
    kills: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)

    def add(self, life: Life) -> None:
        """Take note of a life that held the law."""
        self.lives += 1
        self.rows += life.rows
        self.epochs += life.epochs
        self.kills_in_all += life.kills.total()
        for (kind, point), times in sorted(life.kills.items()):
            self.of_kinds[kind] = self.of_kinds.get(kind, 0) + times
            steps = self.kills.setdefault(life.target.name, {}).setdefault(kind, {})
            steps[point] = steps.get(point, 0) + times
        self.notes = dict(sorted((Counter(self.notes) + life.notes).items()))


class _Servers:
    """Real ones, each started when a life needs it; all end with the soak."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._made: dict[str, tuple[Server, str]] = {}

    def of(self, kind: str) -> tuple[Server | None, str]:
        """The server of a kind and its address; of none if the kind is empty."""
        if not kind:
            return None, ""
        if kind not in self._made:
            self._made[kind] = self._broker() if kind == "broker" else self._database()
        return self._made[kind]

    def _broker(self) -> tuple[Server, str]:
        from examples.servers.kafka import KafkaBroker

        broker = self._stack.enter_context(KafkaBroker(self._folder / "broker"))
        return broker, broker.bootstrap

    def _database(self) -> tuple[Server, str]:
        from examples.servers.postgres import PostgresServer

        server = PostgresServer()
        self._stack.callback(server.close)
        return server, server.url()


@contextmanager
def _all_servers() -> Iterator[_Servers]:
    folder = Path(tempfile.mkdtemp(prefix="soak-edges-servers-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield _Servers(folder, stack)


class _Told:
    """A line at each life, and within one if it takes long."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._told_s = self.begun_s = time.monotonic()

    def say(self, text: str) -> None:
        self._told_s = time.monotonic()
        self.console.print(f"{self._told_s - self.begun_s:6.0f} s  {text}", highlight=False, soft_wrap=True)

    def of_blow(self, name: str, blow: Blow) -> None:
        if time.monotonic() - self._told_s > _TOLD_EVERY_S:
            self.say(f"life {name}, {target_of(name).name}: {blow.kind} at {blow.point}")


def play(names: Iterator[str], kills: int, report: Report, told: _Told) -> bool:
    """Play lives until there were so many kills. Return whether all held the law."""
    with _all_servers() as servers:
        for name in names:
            server, address = servers.of(target_of(name).server)
            try:
                life = live(name, server, address, tell=partial(told.of_blow, name))
            except LawBroken as error:
                told.console.print(f"life {name}: {error}\nAgain: --life {name}", style="red", markup=False)
                return False
            shutil.rmtree(life.place.folder)
            report.add(life)
            report.seconds = round(time.monotonic() - told.begun_s, 1)
            told.say(
                f"life {name}, {life.target.name}: {life.kills.total()} kills, {life.rows} rows each there once; "
                f"{report.kills_in_all} kills so far"
            )
            if report.kills_in_all >= kills:
                return True
    return True


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
    parser.add_argument("--kills", type=int, default=200, help="how many, at least (200)")
    parser.add_argument("--seed", type=int, default=None, help="what is drawn (STILLSTATE_TEST_SEED, or a new one)")
    parser.add_argument("--life", default="", help="play one life again, by the name in the error")
    parser.add_argument("--only", nargs="*", default=[], choices=sorted({t.name.partition(",")[0] for t in TARGETS}))
    parser.add_argument("--report", type=Path, default=REPORT, help="JSON with the counts")
    given = parser.parse_args(argv)
    wanted = os.environ.get("STILLSTATE_TEST_SEED", "")
    drawn = int(wanted) if wanted else random.SystemRandom().randrange(1 << 32)
    report = Report(drawn if given.seed is None else given.seed)
    console = Console() if sys.stdout.isatty() else Console(width=160)
    told = _Told(console)
    names = iter([given.life]) if given.life else (name_of(report.seed, n) for n in _numbers(given.only))
    told.say(f"life {given.life} again" if given.life else f"seed {report.seed}, at least {given.kills} kills")
    held = play(names, given.kills, report, told)
    console.print(table_of(report))
    if held and not given.life:
        given.report.parent.mkdir(parents=True, exist_ok=True)
        given.report.write_text(json.dumps(_as_json(report), indent=2) + "\n")
        console.print(f"written to {given.report.name}")
    return 0 if held else 1


def _as_json(report: Report) -> dict[str, Any]:
    return {**asdict(report), "of_kinds": dict(sorted(report.of_kinds.items()))}


if __name__ == "__main__":
    sys.exit(main())
