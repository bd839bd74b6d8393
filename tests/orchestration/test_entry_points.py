"""Entry points: what is missing, and what is there instead."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from state_runtime.base.errors import InvalidConfiguration, UserCodeError
from stillstate.orchestration.config.entry_point import load_entry_point


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "entry_pkg"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "flights.py").write_text(
        "limit = 5\ndef build(context): return context\nclass K:\n    def make(c): return c\n"
    )
    (folder / "needs.py").write_text("import not_installed_anywhere\n")
    (folder / "raises.py").write_text("1 / 0\n")
    (folder / "syntax.py").write_text("def (\n")
    (folder / "name.py").write_text("from entry_pkg.flights import bulid\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [n for n in sys.modules if n.split(".")[0] == "entry_pkg"]:
        del sys.modules[name]


def test_modules_beside_the_configuration_are_found(package: Path) -> None:
    assert load_entry_point("entry_pkg.flights:build", package)(7) == 7
    assert load_entry_point("entry_pkg.flights:K.make", package)(7) == 7


@pytest.mark.parametrize(
    ("entry_point", "error", "what"),
    [
        ("entry_pkg.flihgts:build", InvalidConfiguration, "no module 'entry_pkg.flihgts'.*flights"),
        ("entry_pgk.flights:build", InvalidConfiguration, "no module 'entry_pgk'.*entry_pkg"),
        ("entry_pkg.flights:biuld", InvalidConfiguration, "has no 'biuld'.*build"),
        ("entry_pkg.flights:limit", InvalidConfiguration, "is a int, not a function"),
        ("entry_pkg.needs:build", InvalidConfiguration, "needs 'not_installed_anywhere'"),
        ("entry_pkg.name:build", InvalidConfiguration, "cannot be imported"),
        ("entry_pkg.raises:build", UserCodeError, "ZeroDivisionError"),
        ("entry_pkg.syntax:build", UserCodeError, "SyntaxError"),
    ],
)
def test_mistakes_are_typed_and_say_what_is_there(
    package: Path, entry_point: str, error: type[Exception], what: str
) -> None:
    with pytest.raises(error, match=what):
        load_entry_point(entry_point, package)
