"""The public surface is what `__all__` says, and looking at snapshots needs neither Spark nor pandas."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([*(ROOT / "state_runtime").rglob("*.py"), *(ROOT / "stillstate").glob("*.py")])


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_documented_package(file: Path) -> bool:
    """An `__init__.py` with nothing but a docstring has nothing to export."""
    body = ast.parse(file.read_text()).body
    return file.name == "__init__.py" and len(body) == 1


@pytest.mark.parametrize("file", FILES, ids=lambda f: module_name(f))
def test_every_module_says_what_it_exports(file: Path) -> None:
    """`__all__` exists, is sorted (constants, classes, functions: ruff's order), and every name exists."""
    if is_documented_package(file):
        return
    module = importlib.import_module(module_name(file))
    assert isinstance(module.__all__, list), "no __all__"
    kinds = {name: 0 if name.isupper() else 1 if name[0].isupper() else 2 for name in module.__all__}
    assert module.__all__ == sorted(module.__all__, key=lambda name: (kinds[name], name))
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert hasattr(module, name), f"{name} does not exist"
        assert not name.startswith("_")


@pytest.mark.parametrize("file", FILES, ids=lambda f: module_name(f))
def test_what_other_modules_use_is_exported_or_a_constant(file: Path) -> None:
    """A name with an underscore belongs to its module."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("state_runtime"):
            private = [alias.name for alias in node.names if alias.name.startswith("_")]
            assert not private, f"{file.name}:{node.lineno} imports {private}"


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    """Lazy loading must not change what a typing error looks like."""
    import state_runtime

    with pytest.raises(AttributeError, match="has no attribute 'StreamingJbo'"):
        _ = state_runtime.StreamingJbo


def test_the_face_has_what_the_runtime_has() -> None:
    """`import stillstate` is enough: what a user finds in one of the packages is also there, and is the same."""
    import state_runtime
    import stillstate

    assert set(state_runtime.__all__) < set(stillstate.__all__)
    for name in state_runtime.__all__:
        assert getattr(stillstate, name) is getattr(state_runtime, name)
    assert set(stillstate.__all__) <= set(dir(stillstate))
    assert all(hasattr(stillstate, name) for name in stillstate.__all__)
    with pytest.raises(AttributeError, match="module 'stillstate' has no attribute 'StreamingJbo'"):
        _ = stillstate.StreamingJbo


def test_errors_are_a_tree_with_one_reaction_each() -> None:
    """Every error has the exit code and the kind of its branch. A refusal of the store is a kind of its own."""
    from state_runtime.base import errors

    branches = {
        "invalid": 2,
        "fenced": 3,
        "unavailable": 4,
        "refused": 4,
        "corrupt": 5,
        "unsupported": 6,
        "user-code": 7,
        "internal": 1,
    }
    drawn = errors.__doc__ or ""
    for name in errors.__all__:
        cls = getattr(errors, name)
        if isinstance(cls, type):
            assert issubclass(cls, errors.StillstateError)
            assert branches[cls.kind] == cls.exit_code
            assert name in drawn, "the docstring draws the tree"
            assert str(cls("what, where, what next")) == "what, where, what next"
            assert cls.__doc__


def test_one_table_says_what_kinds_of_errors_there_are() -> None:
    """Recovery, the supervisor, launchers and the command line read it: a kind or an exit code that it lacks would be
    restarted for ever by one of them, and not at all by another."""
    from state_runtime.base import errors

    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    kinds = {cls.kind: cls.exit_code for cls in classes if issubclass(cls, errors.StillstateError)}
    assert dict(errors.EXIT_OF_KIND) == kinds
    assert len(errors.REACTIONS) == len(kinds), "each kind once"
    assert [errors.kind_of_exit(code) for code in range(9)] == [
        "", "", "invalid", "fenced", "unavailable", "corrupt", "unsupported", "user-code", "",
    ]  # fmt: skip
    assert {2, 3, 5, 6, 7} == errors.FINAL_EXITS
    assert {errors.kind_of_exit(code) for code in errors.FINAL_EXITS} == errors.FINAL_KINDS


def test_the_documentation_has_the_exit_code_of_each_error() -> None:
    from state_runtime.base import errors

    rows = re.findall(r"^\| `(\w+)`.*? \| (\d) \|", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
    named = [(getattr(errors, name), int(code)) for name, code in rows if name in errors.__all__]
    assert len(named) > 20
    assert [cls.exit_code for cls, _ in named] == [code for _, code in named]


def test_the_page_of_errors_is_made_from_the_tree_and_has_every_class() -> None:
    """After a change of an error: `make reference`. A class without advice of its own has that of its branch."""
    from state_runtime.base import errors
    from stillstate.orchestration.config.reference import errors_page

    text = (ROOT / "docs/errors.md").read_text()
    assert text == errors_page()
    named = dict(re.findall(r"^\| `(\w+)` \| .*? \| (\d) \| ", text, re.MULTILINE))
    classes = {name: getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert named == {name: str(cls.exit_code) for name, cls in classes.items()}


def test_the_reference_has_every_public_name() -> None:
    """Made of the docstrings by `make docs`; errors have a page of their own."""
    import stillstate

    shown = re.findall(r"^::: stillstate\.(\w+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    assert sorted([*shown, "errors"]) == sorted(stillstate.__all__)


LOOKING = (
    "stillstate",
    "stillstate.errors",
    "stillstate.reading",
    "state_runtime",
    "state_runtime.base.errors",
    "state_runtime.store",
    "state_runtime.base.settings",
    "state_runtime.processors.declared.aggregates",
    "state_runtime.processors.user.vectorized",
    "state_runtime.base.progress",
    "state_runtime.snapshot.catalog",
    "state_runtime.snapshot.commit",
    "state_runtime.snapshot.control",
    "state_runtime.snapshot.savepoint_record",
    "state_runtime.maintenance.copy.make_savepoint",
    "stillstate.orchestration.running.make_savepoint",
    "state_runtime.snapshot.manifest",
    "state_runtime.changelog.reader",
    "state_runtime.materialize",
    "state_runtime.reading.query",
    "state_runtime.state.local",
)


def test_looking_at_snapshots_needs_no_spark() -> None:
    """The Dagster code location and the command line import these; they must start fast, and without Java."""
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    slow = sorted({'pyspark', 'pandas', 'dagster', 's3fs'} & set(sys.modules))\n"
        "    assert not slow, f'{name} imports {slow}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *LOOKING], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
