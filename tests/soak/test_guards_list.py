"""The list of guards that `make guards` takes out is true: a guard that moved would be removed by nothing."""

from __future__ import annotations

import ast

import pytest

from tests.soak.guards import GUARDS, ROOT, Guard, without


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_each_guard_is_where_the_list_says_and_has_a_law(guard: Guard) -> None:
    """Its code is in the file exactly once, what is left without it can be imported, and the test that fails then exists."""
    compile(without(guard, (ROOT / guard.file).read_text()), guard.file, "exec")
    path, _, name = guard.law.partition("::")
    tests = [n.name for n in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(n, ast.FunctionDef)]
    assert name.partition("[")[0] in tests, f"{guard.name}: {path} has no {name}"


def test_guards_have_names_of_their_own() -> None:
    names = [guard.name for guard in GUARDS]
    assert sorted(set(names)) == sorted(names)


def test_a_guard_that_moved_is_told() -> None:
    """Else its law would be green with it in place, or red for another reason."""
    guard = Guard("moved", "a.py", "if x:", "if False:", "t.py::test")
    assert without(guard, "if x:\n    y()\n") == "if False:\n    y()\n"
    for text in ("", "if x:\n    if x:\n        y()\n"):
        with pytest.raises(LookupError, match=r"moved: a\.py has its code"):
            without(guard, text)
