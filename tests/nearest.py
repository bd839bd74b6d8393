"""The tests that stand nearest to a file: `make test-of FILE=state_runtime/store/local.py` runs them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

from tests.import_map import PACKAGES, ROOT, all_imports, imports_of, module_of

SELECTION = "not long and not parity and not spark_suite and not kill and not cluster and not browser and not servers"
"""Those that `make test` runs."""
NEAREST_MAX = 20
NO_TESTS_RAN = 5


def files_of_tests(root: Path = ROOT) -> list[str]:
    return sorted(file.relative_to(root).as_posix() for file in (root / "tests").rglob("test_*.py"))


def nearest(file: str, root: Path = ROOT) -> list[str]:
    """Files of tests for a file: the one itself, those with its name in the folder that mirrors its own, those that name it
    (import, run or read it), from the same folder first, then those of that folder that name a file that imports it.

    Args:
        file: path from the root, with "/".
    """
    tests = files_of_tests(root)
    if file in tests:
        return [file]
    home = _mirrored_folder(file, root)
    stem = PurePosixPath(file).stem
    named = [t for t in tests if t.startswith(f"{home}/") and _is_named_after(t, stem)]
    users = [t for t in tests if t not in named and _uses(root / t, {file}, root)]
    users.sort(key=lambda t: (-_shared_parts(t, f"{home}/"), t))
    importers = {i.file for i in all_imports(root) if i.imported == file}
    behind = [
        t for t in tests if t.startswith(f"{home}/") and t not in named + users and _uses(root / t, importers, root)
    ]
    return named + users + behind


def _mirrored_folder(file: str, root: Path) -> str:
    """`tests/` and the folders of the file, as many of them as there are."""
    folder = PurePosixPath(file).parent
    mirrored = folder if folder.parts[:1] == ("tests",) else PurePosixPath("tests") / folder
    return next(str(f) for f in (mirrored, *mirrored.parents) if (root / f).is_dir())


def _is_named_after(test: str, stem: str) -> bool:
    name = PurePosixPath(test).stem.removeprefix("test_")
    return f"_{stem}_" in f"_{name}_"


def _uses(test: Path, files: Collection[str], root: Path) -> bool:
    """Whether a test imports one of the files, or has its name in it: of what it reads, or runs as a process."""
    text = test.read_text()
    modules = {module_of(root / file, root): file for file in files if _is_product(file)}
    if any(re.search(rf"\b{re.escape(module)}\b(?!\.\w)", text) for module in modules):
        return True
    tree = ast.parse(text)
    packages = {module.rpartition(".")[0]: "" for module in modules}
    if any(imported in files for imported, _ in imports_of(tree, {**packages, **modules})):
        return True
    others = [PurePosixPath(file) for file in files if not _is_product(file)]
    return any(o.name in text if o.suffix != ".py" else o.stem in _last_names(tree) for o in others)


def _is_product(file: str) -> bool:
    return file.endswith(".py") and file.split("/")[0] in PACKAGES


def _last_names(tree: ast.AST) -> Iterator[str]:
    """Last parts of what a test imports: files beside the tests are imported by their names alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[-1] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")[-1:]
            yield from (alias.name for alias in node.names)


def _shared_parts(test: str, home: str) -> int:
    pairs = zip(PurePosixPath(test).parts, PurePosixPath(home).parts, strict=False)
    return sum(a == b for a, b in pairs)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not arguments[0]:
        print("Name one file: make test-of FILE=state_runtime/store/local.py", file=sys.stderr)
        return 2
    path = Path(arguments[0]).resolve()
    if not path.is_file() or not path.is_relative_to(ROOT):
        print(f"{arguments[0]} is not a file of this project", file=sys.stderr)
        return 2
    file = path.relative_to(ROOT).as_posix()
    found = nearest(file, ROOT)
    if not found:
        print(f"No test is named after {file} and no test imports it; run `make test`", file=sys.stderr)
        return 2
    chosen = found[:NEAREST_MAX]
    left = len(found) - len(chosen)
    more = f"; {left} more use it, `make test` runs them" if left else ""
    print(
        f"{len(chosen)} file{'s' if len(chosen) > 1 else ''} of tests for {file}{more}:",
        *chosen,
        sep="\n  ",
        flush=True,
    )
    done = subprocess.run([sys.executable, "-m", "pytest", "-m", SELECTION, *chosen], cwd=ROOT, check=False)
    if done.returncode == NO_TESTS_RAN:
        print(f"All tests of {file} have a mark that `make test` leaves out; run its files as above", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
