"""The files of docs/testing.md, put into a folder as they stand there: pytest passes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = re.findall(
    r"^```python\n# (\w+\.py)\n(.*?)^```$", (ROOT / "docs/testing.md").read_text(), re.MULTILINE | re.DOTALL
)


@pytest.mark.parametrize("spark_too", [False, pytest.param(True, marks=pytest.mark.spark)], ids=["processors", "jobs"])
def test_the_tests_of_the_testing_page_pass(tmp_path: Path, spark_too: bool) -> None:
    """Those of processors without Java."""
    assert {name for name, _ in FILES} == {
        "clicks.py",
        "test_clicks.py",
        "test_rated.py",
        "shop.py",
        "test_shop.py",
        "test_sink.py",
    }
    for name, text in FILES:
        (tmp_path / name).write_text(text)
    chosen = ["test_shop.py"] if spark_too else ["test_clicks.py", "test_rated.py", "test_sink.py"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        **({} if spark_too else {"PATH": "", "JAVA_HOME": "/nowhere"}),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:]
