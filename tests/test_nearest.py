"""`make test-of`: which tests stand nearest to a file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.import_map import ROOT
from tests.nearest import NEAREST_MAX, SELECTION, main, nearest


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "state_runtime/__init__.py": "from state_runtime.store import open_store\n",
        "state_runtime/store/__init__.py": "from state_runtime.store.local import open_store\n",
        "state_runtime/store/local.py": "def open_store(): ...\n",
        "state_runtime/store/alone.py": "",
        "orchestration/cli.py": "",
        "tests/state_runtime/model.py": "",
        "tests/state_runtime/store/test_local.py": "",
        "tests/state_runtime/store/test_contract.py": "from state_runtime.store import open_store\n",
        "tests/state_runtime/test_model_user.py": "from model import Model\n",
        "tests/faults/test_disk.py": "from state_runtime.store import local\n",
        "tests/spark/test_job.py": "from state_runtime import open_store\nREAD = 'docs/guide.md'\n",
        "tests/spark/test_process.py": "COMMAND = ['-m', 'stillstate.orchestration.cli']\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (
            "state_runtime/store/local.py",
            ["tests/state_runtime/store/test_local.py", "tests/faults/test_disk.py", "tests/state_runtime/store/test_contract.py"],
        ),
        ("orchestration/cli.py", ["tests/spark/test_process.py"]),
        ("docs/guide.md", ["tests/spark/test_job.py"]),
        ("tests/state_runtime/model.py", ["tests/state_runtime/test_model_user.py"]),
        ("tests/faults/test_disk.py", ["tests/faults/test_disk.py"]),
        ("state_runtime/store/alone.py", []),
    ],
)  # fmt: skip
def test_the_nearest_tests_are_named_after_a_file_or_use_it(tree: Path, file: str, expected: list[str]) -> None:
    assert nearest(file, tree) == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "make test-of FILE="),
        ([""], "make test-of FILE="),
        (["nowhere.py"], "nowhere.py is not a file of this project"),
        ([str(ROOT / "Makefile")], "is not a file of this project"),
        (
            ["state_runtime/store/alone.py"],
            "No test is named after state_runtime/store/alone.py and no test imports it",
        ),
    ],
)
def test_what_has_no_tests_is_said(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tree)
    monkeypatch.setattr("tests.nearest.ROOT", tree)
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("users", "said"), [(1, "1 file of tests"), (NEAREST_MAX + 2, "; 2 more use it")])
def test_the_nearest_twenty_files_are_run_as_make_test_runs_them(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], users: int, said: str
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 1)

    for number in range(users):
        (tree / f"tests/faults/test_{number:02}.py").write_text("import state_runtime.store.alone\n")
    monkeypatch.chdir(tree)
    monkeypatch.setattr("tests.nearest.ROOT", tree)
    monkeypatch.setattr("tests.nearest.subprocess.run", run)
    assert main(["state_runtime/store/alone.py"]) == 1, "as the tests ended"
    assert said in capsys.readouterr().out
    assert ran[0][3:6] == ["-m", SELECTION, "tests/faults/test_00.py"]
    assert len([word for word in ran[0] if word.startswith("tests/")]) == min(users, NEAREST_MAX)


def test_make_test_of_selects_what_make_test_does() -> None:
    assert f"-m '{SELECTION}'" in (ROOT / "Makefile").read_text()
