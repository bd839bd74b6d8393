"""`make test-versions`: which versions it runs, and that a failure on one of them is one of the whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import versions
from tests.versions import Outcome, counted, main, others, table

ROOT = Path(__file__).resolve().parent.parent
REPORT = (
    """<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10" time="4.5"/></testsuites>"""
)


def test_make_runs_each_supported_version_before_the_newest() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = re.search(r"(?m)^VERSIONS \?= (.+)$", makefile)
    assert named is not None
    assert named[1].split() == others() == ["4.1", "4.2"]


def test_ci_runs_the_oldest_one_and_fails_with_it() -> None:
    """Not by what cuts a kind for want of time, and before those."""
    script = (ROOT / ".ci" / "run").read_text()
    assert "\nmake test-oldest\n" in script
    assert script.index("make test-oldest") < script.index("as_far_as_time_allows() {")
    oldest = re.search(r"(?m)^test-oldest:.*\n\t(.*)$", (ROOT / "Makefile").read_text())
    assert oldest is not None
    assert f"VERSIONS={others()[0]} " in oldest[1]


def test_a_report_is_counted_with_what_failed_before_its_tests(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert counted(tmp_path / "report.xml") == (4, 3, 3)
    assert counted(tmp_path / "none.xml") == (0, 0, 0)


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((0, 1), 1), ((1, 0), 1), ((5,), 1)])
def test_a_failure_on_one_version_is_a_failure(
    codes: tuple[int, ...], expected: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has them all; no test at all (pytest's 5) is a failure, too."""
    asked: list[tuple[str, list[str]]] = []

    def run(version: str, arguments: list[str]) -> Outcome:
        asked.append((version, list(arguments)))
        return Outcome(version, 7, codes[len(asked) - 1], 1, 60.0, codes[len(asked) - 1])

    monkeypatch.setattr(versions, "run", run)
    names = [f"4.{number}" for number in range(1, len(codes) + 1)]
    assert main([*names, "--", "-m", "a -- b", "file"]) == expected
    assert asked == [(name, ["-m", "a -- b", "file"]) for name in names]
    printed = capsys.readouterr().out.strip().splitlines()
    assert [line.split()[0] for line in printed[-len(names) :]] == names


def test_the_table_names_an_exit_code_that_is_not_0() -> None:
    first, second = Outcome("4.1.4", 10, 0, 2, 61.0, 0), Outcome("4.2.1", 9, 1, 2, 59.6, 1)
    assert table([first, second]).splitlines() == [
        "Spark       passed  failed  skipped       time",
        "4.1.4           10       0        2       61 s",
        "4.2.1            9       1        2       60 s   exit code 1",
    ]
