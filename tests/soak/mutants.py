"""Mutants of the runtime, drawn by a seed, each run against the tests that reach it: `make mutants`.

    python -m tests.soak.mutants --sample 200 --seed 38

A *mutant* is the runtime with one small change, as the library cosmic-ray makes them: another comparison or operator, a negated
condition, another number, another exception, a loop that does nothing, a decorator that is gone. One that no test notices
*survives*: what was changed does not matter, or a law is missing. docs/design/0041-mutants.md has the survivors of the last look.

There are far more mutants than can be run, so places in the code are drawn, and one change for each. First the quick tests of
each room run once under coverage, which says of each line which tests reach it; a mutant then runs against the tests of its line, the
quickest first, until one fails. Only code in functions is drawn: constants are sizes and times, which no law can know.

All of it happens in a copy of the tree. Processes are forked off one that has imported the libraries and nothing of ours.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from coverage import Coverage

from tests.soak.forks import ended, forked, hear_children, killed
from tests.soak.guards import ROOT, copy_of_the_tree, environment_of, refuse_another_tree

REPORT = ROOT / "tests" / "soak" / "reports" / "mutants.json"
ROOMS = ("snapshot", "driver", "changelog", "restore", "maintenance")
QUICK = "not spark and not long and not kill and not cluster and not parity"
LIBRARIES = ("hypothesis", "numpy", "pandas", "pyarrow.parquet", "pydantic_core", "pyspark.sql", "fsspec")


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        position: line and column (from 0), as Python's own tree has them.
        occurrence: of the operator in the file.
    """

    file: str
    position: tuple[int, int]
    operator: str
    occurrence: int

    def text(self, text: str) -> str:
        """The file's text with it."""
        changed = mutate_code(text, get_operator(self.operator)(), self.occurrence)
        assert changed is not None, f"{self} is not there"
        return changed


# --- which tests reach which lines -------------------------------------------------------------------------------


@dataclass
class Reach:
    """A plugin of pytest that tells coverage which test runs now, fixtures included, and how long each took."""

    coverage: Coverage
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        yield
        self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration


def reach(room: str, out: Path) -> None:
    """Run a room's tests, and write which of them reach which lines of all rooms, and their seconds.

    Raises:
        SystemExit: they are not green as it is.
    """
    coverage = Coverage(data_file=None, source=[f"state_runtime/{room}" for room in ROOMS])
    plugin = Reach(coverage)
    coverage.start()
    code = pytest.main(
        ["-q", "-x", "-p", "no:cacheprovider", "-m", QUICK, f"tests/state_runtime/{room}"], plugins=[plugin]
    )
    coverage.stop()
    if code:
        raise SystemExit(f"the tests of {room} are not green without any mutant (pytest: {code})")
    found, data = {}, coverage.get_data()
    for file in data.measured_files():
        lines = data.contexts_by_lineno(file)
        found[str(Path(file).relative_to(Path.cwd()))] = {n: [t for t in tests if t] for n, tests in lines.items()}
    out.write_text(json.dumps({"seconds": plugin.seconds, "lines": found}))


@dataclass
class Reached:
    """Of all rooms: tests by file and line, and their seconds."""

    lines: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, document: dict[str, Any]) -> None:
        self.seconds |= document["seconds"]
        for file, lines in document["lines"].items():
            for line, tests in lines.items():
                self.lines[file, int(line)].update(tests)

    def tests(self, mutant: Mutant, text: str, seconds_max: float) -> list[str]:
        """Those that reach the statement that a mutant changes, the quickest first: the first of them, and more as long
        as all take no longer than that."""
        found: set[str] = set()
        for line in statement_lines(text, mutant.position[0]):
            found |= self.lines[mutant.file, line]
        quickest = sorted(found, key=lambda test: (self.seconds[test], test))
        taken = itertools.accumulate(self.seconds[test] for test in quickest)
        return [
            test for n, (test, so_far) in enumerate(zip(quickest, taken, strict=True)) if not n or so_far <= seconds_max
        ]


def statement_lines(text: str, line: int) -> range:
    """The lines of the smallest statement around one; of one with a body, its head."""
    best = range(line, line + 1)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno if isinstance(body, list) and body else (node.end_lineno or node.lineno) + 1
            if node.lineno <= line < max(end, node.lineno + 1):
                best = range(node.lineno, max(end, node.lineno + 1))
    return best


# --- the sample ------------------------------------------------------------------------------------------------------


def mutants(file: str, text: str) -> dict[tuple[int, int], list[Mutant]]:
    """All mutants of a file's functions, by place."""
    inside, annotations = spans(text)
    tree = get_ast(text)
    found: dict[tuple[int, int], list[Mutant]] = defaultdict(list)
    for name in sorted(operator_names()):
        if "Variable" in name or "NoOp" in name:
            continue  # these need to be told which variable
        operator = get_operator(name)()
        places = [start for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node)]
        for occurrence, place in enumerate(places):
            if any(a <= place < b for a, b in inside) and not any(a <= place < b for a, b in annotations):
                found[place].append(Mutant(file, place, name, occurrence))
    return found


Span = tuple[tuple[int, int], tuple[int, int]]


def spans(text: str) -> tuple[list[Span], list[Span]]:
    """Bodies of functions, and annotations in them."""
    inside, annotations = [], []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            inside.append(_span(node.body[0], node.body[-1]))
            annotations += [_span(a.annotation) for a in ast.walk(node.args) if isinstance(a, ast.arg) and a.annotation]
            annotations += [_span(node.returns)] if node.returns else []
        elif isinstance(node, ast.AnnAssign):
            annotations.append(_span(node.annotation))
    return inside, annotations


def _span(first: Any, last: Any = None) -> Span:
    last = last or first
    return (first.lineno, first.col_offset), (last.end_lineno, last.end_col_offset)


def sample(tree: Path, rooms: list[str], size: int, seed: int) -> tuple[list[Mutant], int, int]:
    """Places drawn by a seed, and one change for each; and how many places and mutants there are."""
    by_place = {}
    for room in rooms:
        for path in sorted((tree / "state_runtime" / room).rglob("*.py")):
            file = str(path.relative_to(tree))
            by_place.update({(file, p): found for p, found in mutants(file, path.read_text()).items()})
    rng = random.Random(seed)
    drawn: list[Mutant] = []
    for place in rng.sample(sorted(by_place), len(by_place)):
        if len(drawn) == size:
            break
        mutant = rng.choice(by_place[place])
        if can_be_made(mutant, (tree / mutant.file).read_text()):
            drawn.append(mutant)
    return drawn, len(by_place), sum(map(len, by_place.values()))


def can_be_made(mutant: Mutant, text: str) -> bool:
    """Whether it is Python: the library takes the two stars before a mapping for an operator, and stumbles over an
    exception's name with a dot."""
    try:
        ast.parse(mutant.text(text))
    except (SyntaxError, AttributeError):
        return False
    return True


# --- the runs --------------------------------------------------------------------------------------------------------


def verdict(mutant: Mutant, reached: Reached, seconds_max: float) -> dict[str, Any]:
    """What became of one: killed, hung, survived, or out of reach of every quick test."""
    path = Path(mutant.file)
    text = path.read_text()
    changed = mutant.text(text)
    tests = reached.tests(mutant, text, seconds_max)
    before, after = changed_lines(text, changed)
    said = {"file": mutant.file, "line": mutant.position[0], "operator": mutant.operator.partition("/")[2]}
    said |= {"before": before, "after": after, "tests": len(tests)}
    if not tests:
        return {**said, "verdict": "not reached"}
    path.write_text(changed)
    try:
        pid = forked(partial(run, tests))
        code = ended(pid, 60 + 5 * sum(reached.seconds[test] for test in tests))
        if code is None:
            killed(pid)
    finally:
        path.write_text(text)
    return {**said, "verdict": "hung" if code is None else "survived" if code == 0 else "killed"}


def run(tests: list[str]) -> None:
    """In a process of its own; its exit code says how it went."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    # A module that cannot even be imported is noticed, too.
    os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])))


def changed_lines(text: str, changed: str) -> tuple[str, str]:
    """The first line that differs, as it was and as it is."""
    pairs = zip(text.splitlines(), changed.splitlines(), strict=False)
    return next(((a.strip(), b.strip()) for a, b in pairs if a != b), ("", ""))


def look(asked: argparse.Namespace) -> None:
    """Draw mutants and run them, in a copy of the tree that is the folder of this process."""
    hear_children()
    for library in LIBRARIES:
        import_module(library)
    drawn, places, possible = sample(Path(), asked.rooms, asked.sample, asked.seed)
    print(f"seed {asked.seed}: {len(drawn)} of {places:,} places, which have {possible:,} mutants", flush=True)
    reached = reached_by(asked.rooms, asked.reached)
    found, ends_s = [], time.monotonic() + asked.minutes * 60
    for mutant in drawn:
        if time.monotonic() > ends_s:
            break
        found.append(verdict(mutant, reached, asked.seconds))
        print("{verdict:12} {file}:{line} {operator}: {before}  →  {after}".format(**found[-1]), flush=True)
        counts = Counter(f["verdict"] for f in found)
        document = {"seed": asked.seed, "places": places, "possible": possible, "counts": counts, "mutants": found}
        asked.report.write_text(json.dumps(document, indent=1) + "\n")


def reached_by(rooms: list[str], kept: Path) -> Reached:
    """Of each room's tests; those that are in `kept` already are not run again, and those of other rooms count too."""
    for room in sorted({room.partition("/")[0] for room in rooms}):
        out = kept / f"{room}.json"
        if not out.exists():
            command = [sys.executable, "-m", "tests.soak.mutants", "--reach", room, str(out)]
            subprocess.run(command, env=environment_of(Path.cwd()), check=True)
    reached = Reached()
    for out in sorted(kept.glob("*.json")):
        reached.add(json.loads(out.read_text()))
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=200, help="places that are drawn (200)")
    parser.add_argument("--seed", type=int, default=None, help="what is drawn; a new one each time by default")
    parser.add_argument("--rooms", nargs="*", default=[*ROOMS], help=f"of state_runtime ({' '.join(ROOMS)})")
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests for one mutant, about (60)")
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="after which no other mutant begins (a day)")
    parser.add_argument("--reached", type=Path, default=None, help="folder that keeps what tests reach, for more looks")
    parser.add_argument("--report", type=Path, default=REPORT, help="JSON with every mutant")
    parser.add_argument("--reach", nargs=2, metavar=("ROOM", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.reach:
        return reach(asked.reach[0], Path(asked.reach[1]))
    if asked.here:
        return look(asked)
    seed = random.SystemRandom().randrange(1 << 32) if asked.seed is None else asked.seed
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = copy_of_the_tree(Path(folder) / "tree")
        refuse_another_tree(tree)
        given = {"seed": seed, "sample": asked.sample, "seconds": asked.seconds, "minutes": asked.minutes}
        given |= {"report": asked.report.resolve(), "reached": (asked.reached or Path(folder)).resolve()}
        command = [sys.executable, "-m", "tests.soak.mutants", "--here", "--rooms", *asked.rooms]
        command += [f"--{name}={value}" for name, value in given.items()]
        sys.exit(subprocess.run(command, cwd=tree, env=environment_of(tree)).returncode)


if __name__ == "__main__":
    main()
