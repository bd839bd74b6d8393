"""The pieces that all progress displays share."""

from __future__ import annotations

import ast
import io
import json
import sys
from pathlib import Path

import pytest
from job_roots import FakeClock
from rich.console import Console

from state_runtime.snapshot.savepoint_record import SavepointRecord
from stillstate import orchestration
from stillstate.orchestration.show.materializations import materialization_view
from stillstate.orchestration.show.progress import Pace, bytes_bar, count_bar, form_of
from stillstate.orchestration.show.runs import progress_view
from stillstate.orchestration.show.savepoints import SavepointBar, SavepointJson, SavepointSilence, savepoint_view


class Terminal(io.StringIO):
    """A stream that rich takes for a terminal."""

    def isatty(self) -> bool:
        return True


def record(state: str, copied: int) -> SavepointRecord:
    made = object.__new__(SavepointRecord)  # only what is shown: a record has 20 more fields
    shown = {"name": "s", "state": state, "message": "", "attempts": 1, "total_bytes": 100, "copied_bytes": copied}
    for name, value in shown.items():
        object.__setattr__(made, name, value)
    return made


def test_a_program_gets_json_a_person_a_bar_and_a_file_lines() -> None:
    terminal, file = Console(file=io.StringIO(), force_terminal=True), Console(file=io.StringIO())
    assert [form_of(terminal), form_of(file)] == ["bar", "lines"]
    assert [form_of(where, as_json=True) for where in (terminal, file)] == ["json", "json"]


def test_only_shared_pieces_ask_whether_somebody_looks() -> None:
    """Who asks elsewhere chooses a form by itself, and the displays begin to differ."""
    folder = Path(orchestration.__file__).parent
    asking = [
        str(file.relative_to(folder))
        for file in sorted(folder.rglob("*.py"))
        if any(isinstance(n, ast.Attribute) and n.attr == "is_terminal" for n in ast.walk(ast.parse(file.read_text())))
    ]
    # The other one chooses a width for tables.
    assert asking == ["commands/base.py", "show/progress.py"]


def test_who_acts_does_not_show() -> None:
    """Running and folding tell callbacks how it goes: they work the same for a person, Dagster and a notebook."""
    folder = Path(orchestration.__file__).parent
    for file in [*folder.glob("running/*.py"), *folder.glob("folding/*.py")]:
        modules = {
            n.module for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ImportFrom) and n.module
        }
        assert not [m for m in modules if m.split(".")[0] == "rich" or m.startswith("stillstate.orchestration.show")], (
            file
        )


def test_lines_keep_their_pace_and_the_last_one_is_printed_however_soon(clock: FakeClock) -> None:
    pace = Pace(clock)
    seen = []
    for _ in range(5):
        seen.append(pace.allows())
        clock.advance_s(0.4)
    assert seen == [True, False, False, True, False]
    assert pace.allows(at_all_events=True)
    assert not pace.allows()


def test_a_bar_on_stderr_is_for_people_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for made in (lambda: count_bar("delete flights", "objects"), lambda: bytes_bar("copy flights")):
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        with made() as show:
            assert show is None
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", Terminal())
        with made() as show:
            assert show is not None
            show(0, 0)
            show(3, 8)
        assert "flights" in sys.stderr.getvalue()


def test_a_savepoint_is_shown_to_people_and_programs_and_not_to_log_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(savepoint_view("flights", as_json=False), SavepointSilence)
    view = savepoint_view("flights", as_json=True)
    assert isinstance(view, SavepointJson)
    for state, copied in (("IN_PROGRESS", 1), ("IN_PROGRESS", 50), ("COMPLETED", 100)):
        view.show(record(state, copied))
    view.close()
    seen = capsys.readouterr()
    assert seen.out == ""
    assert [json.loads(line)["state"] for line in seen.err.splitlines()] == ["IN_PROGRESS", "COMPLETED"]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    view = savepoint_view("flights", as_json=False)
    assert isinstance(view, SavepointBar)
    view.close()


def test_every_topic_chooses_by_the_same_rule() -> None:
    terminal, file = Console(file=io.StringIO(), force_terminal=True), Console(file=io.StringIO())
    made = {}
    for topic, view in (("run", progress_view), ("fold", materialization_view)):
        for where, as_json in ((terminal, False), (file, False), (terminal, True)):
            chosen = view("flights", console=where, as_json=as_json)
            chosen.close()
            made.setdefault(topic, []).append(type(chosen).__name__)
    assert made == {
        "run": ["LiveLine", "PlainLines", "JsonLines"],
        "fold": ["MaterializationBar", "MaterializationLines", "MaterializationJson"],
    }
