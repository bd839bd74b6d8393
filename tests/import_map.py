"""The import graph of the three packages, folder by folder: `make map` draws it, `tests/test_tidy.py` keeps it.

A *room* is a folder, or a file that lies directly in a package. Rooms are named in the order of `FLOORS`, from the roof down; an
import is an *arrow* from the room of the file that imports to the room of the file that is imported. Arrows go down the list only.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("state_runtime", "assets", "orchestration", "stillstate")

FLOORS = (
    # What a person or Dagster calls.
    "stillstate",
    "stillstate/testing",
    "stillstate/reading",
    "stillstate/errors",
    "orchestration",
    "orchestration/component",
    "orchestration/definitions",
    "orchestration/submitted",
    "orchestration/cli",
    "orchestration/supervisor",
    "orchestration/commands",
    "orchestration/sensors",
    "orchestration/jobs/shared",
    "orchestration/jobs",
    "assets",
    "orchestration/resources",
    "orchestration/workers",
    "orchestration/show",
    "orchestration/metrics",
    "orchestration/probes",
    "orchestration/notify",
    "orchestration/starter",
    "orchestration/upkeep",
    "orchestration/migration",
    "orchestration/running",
    "orchestration/materialization",
    "orchestration/recovery",
    "orchestration/launchers",
    "orchestration/config",
    "orchestration/standby",
    "orchestration/run_statuses",
    "orchestration/run_phases",
    "orchestration/text",
    # What runs a job and keeps its snapshots.
    "state_runtime",
    "state_runtime/job",
    "state_runtime/importing",
    "state_runtime/driver",
    "state_runtime/maintenance/move",
    "state_runtime/maintenance/gc",
    "state_runtime/maintenance/retention",
    "state_runtime/maintenance/convert",
    "state_runtime/maintenance/verify",
    "state_runtime/maintenance/delete",
    "state_runtime/maintenance/output",
    "state_runtime/maintenance/copy",
    "state_runtime/maintenance",
    "state_runtime/reading",
    "state_runtime/sinks",
    "state_runtime/sources",
    "state_runtime/materialize",
    "state_runtime/task",
    "state_runtime/placement",
    "state_runtime/pipeline",
    "state_runtime/processors/builtin",
    "state_runtime/processors/user",
    "state_runtime/processors/declared",
    "state_runtime/processors",
    "state_runtime/restore",
    "state_runtime/changelog",
    "state_runtime/spark",
    "state_runtime/snapshot",
    "state_runtime/state",
    "state_runtime/store",
    "state_runtime/base",
)


@dataclass(frozen=True)
class Import:
    """One import of one of our files by another.

    Attributes:
        file, imported: paths from the root, with "/".
        line: of the import statement.
    """

    file: str
    imported: str
    line: int


def our_files(root: Path = ROOT) -> list[Path]:
    found = (file for package in PACKAGES for file in (root / package).rglob("*.py"))
    return sorted(file for file in found if file.resolve() == file)  # `stillstate` holds links to two of the others


def module_of(file: Path, root: Path = ROOT) -> str:
    """The dotted name of a file's module; `assets` and `orchestration` are imported below `stillstate`."""
    name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    return f"stillstate.{name}" if name.split(".")[0] in ("assets", "orchestration") else name


def imports_of(tree: ast.AST, known: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Our files that a file imports, also inside functions, with the lines.

    Args:
        known: paths by dotted names of modules.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((known[a.name], node.lineno) for a in node.names if a.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                yield known.get(f"{node.module}.{alias.name}", known[node.module]), node.lineno


def all_imports(root: Path = ROOT) -> list[Import]:
    files = {module_of(file, root): file for file in our_files(root)}
    known = {name: str(file.relative_to(root)) for name, file in files.items()}
    return [
        Import(known[name], imported, line)
        for name, file in files.items()
        for imported, line in imports_of(ast.parse(file.read_text()), known)
    ]


def room_of(path: str) -> str:
    """The room of a file: its folder, or itself if it lies beside the packages' folders."""
    parts = path.removesuffix(".py").split("/")
    if parts[-1] == "__init__" or len(parts) > 2 or parts[0] == "assets":
        return "/".join(parts[:-1])
    return "/".join(parts)


def arrows(imports: Iterable[Import]) -> Counter[tuple[str, str]]:
    """From room to room, with how many imports; none from a room to itself."""
    found = Counter((room_of(i.file), room_of(i.imported)) for i in imports)
    return Counter({arrow: count for arrow, count in found.items() if arrow[0] != arrow[1]})


def upward(imports: Iterable[Import], floors: tuple[str, ...] = FLOORS) -> list[Import]:
    """Imports of a room that stands above; rooms that `floors` does not name count as above all others."""
    level = {room: number for number, room in enumerate(floors)}
    return [
        i
        for i in imports
        if room_of(i.file) != room_of(i.imported)
        and level.get(room_of(i.imported), -1) <= level.get(room_of(i.file), len(floors))
    ]


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Rooms (or files) that reach each other: the strongly connected parts with more than one member."""
    to: dict[str, set[str]] = {}
    for start, end in edges:
        to.setdefault(start, set()).add(end)
        to.setdefault(end, set())
    reached = {start: _reached(start, to) for start in to}
    found = {frozenset({a, *(b for b in reached[a] if a in reached[b])}) for a in to}
    return sorted(sorted(group) for group in found if len(group) > 1)


def _reached(start: str, to: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for end in to[waiting.pop()] - seen:
            seen.add(end)
            waiting.append(end)
    return seen


def main() -> int:
    imports = all_imports()
    found = arrows(imports)
    rooms = sorted({room_of(str(f.relative_to(ROOT))) for f in our_files()}, key=_floor)
    width = max(map(len, rooms))
    for room in rooms:
        below = sorted((end for start, end in found if start == room), key=_floor)
        print(f"{room:<{width}}  {'→ ' + ', '.join(_short(room, end) for end in below) if below else ''}".rstrip())
    against = upward(imports)
    knots = circles(found)
    print(f"\n{len(rooms)} rooms, {len(found)} arrows, {len(knots)} circles, {len(against)} imports upwards")
    for i in against:
        print(f"  upwards: {i.file}:{i.line} imports {i.imported}")
    for knot in knots:
        print(f"  circle: {', '.join(knot)}")
    for group in circles((i.file, i.imported) for i in imports):
        print(f"  circle of files: {', '.join(group)}")
    return 1 if against or knots else 0


def _floor(room: str) -> int:
    return FLOORS.index(room) if room in FLOORS else -1


def _short(room: str, end: str) -> str:
    """Without the package's name, if it is the room's own."""
    package = room.split("/")[0]
    return end.removeprefix(f"{package}/")


if __name__ == "__main__":
    sys.exit(main())
