"""Tests on other versions of Spark, each in an environment of its own: `make test-versions`, which makes those.

    python -m tests.versions 4.1 4.2 -- -m 'not kill' tests/spark/test_job.py

What is behind `--` goes to pytest, in each environment. The last lines are a table; the exit code is 1 if any test failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from state_runtime.spark.versions import NEWEST, OLDEST

ROOT: Final = Path(__file__).resolve().parent.parent
ENVIRONMENTS: Final = ROOT / ".venvs"
_LIKE_TESTS: Final = "import pyspark; print(pyspark.__version__)"


@dataclass(frozen=True)
class Outcome:
    """What the tests on one version came to.

    Attributes:
        exit_code: pytest's.
    """

    version: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    exit_code: int

    @property
    def line(self) -> str:
        """One line of the table."""
        end = "" if self.exit_code == 0 else f"   exit code {self.exit_code}"
        return f"{self.version:10}{self.passed:8}{self.failed:8}{self.skipped:9}{self.seconds:9.0f} s{end}"


def others() -> list[str]:
    """The supported versions before the newest, which the project's own environment has."""
    return [f"{NEWEST[0]}.{minor}" for minor in range(OLDEST[1], NEWEST[1])]


def python_of(version: str) -> Path:
    """The interpreter of a version's environment."""
    return ENVIRONMENTS / version / "bin" / "python"


def counted(report: Path) -> tuple[int, int, int]:
    """How many tests passed, failed and were skipped, by pytest's report; a test whose fixture failed has failed."""
    suites = [dict(each.attrib) for each in ElementTree.parse(report).iter("testsuite")] if report.exists() else []
    total, skipped, failures, errors = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "skipped", "failures", "errors")
    )
    return total - skipped - failures - errors, failures + errors, skipped


def run(version: str, arguments: Sequence[str]) -> Outcome:
    """Run pytest on one version, with its output as it comes."""
    python = str(python_of(version))
    installed = subprocess.run([python, "-c", _LIKE_TESTS], capture_output=True, text=True, check=True, cwd=ROOT)
    number = installed.stdout.strip()
    if not number.startswith(f"{version}."):
        raise SystemExit(
            f"{python} has pyspark {number}, not {version}: remove {ENVIRONMENTS / version}, and try again"
        )
    print(f"\n=== Spark {number}", flush=True)
    # What names this process's Spark and Python would reach the other ones.
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        began_s = time.monotonic()
        code = subprocess.run(command, env=own, cwd=ROOT, check=False).returncode
        return Outcome(number, *counted(report), time.monotonic() - began_s, code)


def table(outcomes: Sequence[Outcome]) -> str:
    """The table of all versions."""
    head = f"{'Spark':10}{'passed':>8}{'failed':>8}{'skipped':>9}{'time':>11}"
    return "\n".join([head, *(outcome.line for outcome in outcomes)])


def main(arguments: Sequence[str]) -> int:
    at = list(arguments).index("--")
    outcomes = [run(version, arguments[at + 1 :]) for version in arguments[:at]]
    print(f"\n{table(outcomes)}")
    return int(any(outcome.exit_code for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
