"""`stillstate prepare`: an archive appears whole or not at all, and Java uses it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestration.cli import app
from orchestration.running import prepare


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "stillstate" / "java"


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["prepare", *arguments])


def test_it_is_made_once_and_removed_on_request(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run(command: list[str], **_: Any) -> Any:
        calls.append(command)
        Path(command[-1]).write_bytes(b"classes")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(prepare.subprocess, "run", run)
    monkeypatch.setattr(prepare, "require_java", lambda: Path("/usr/bin/java"))
    first = call()
    assert first.exit_code == 0, first.output
    (archive,) = cache.iterdir()
    assert f"{archive} (7 B); drivers use it from their next start" in first.output
    assert cache.stat().st_mode & 0o077 == 0, "Java runs what is in it: nobody else may write there"
    assert f"prepared already: {archive}" in call().output
    assert len(calls) == 1
    assert call("--force").exit_code == 0
    assert len(calls) == 2
    assert f"removed: {archive}" in call("--remove").output
    assert list(cache.iterdir()) == []
    assert "Example: stillstate prepare" in call("--help").output


@pytest.mark.parametrize("code", [0, 1])
def test_a_job_that_fails_leaves_nothing_and_says_why(cache: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Also one that ends well and whose Java wrote nothing."""

    def run(command: list[str], *, stdout: Any, **_: Any) -> Any:
        stdout.write(b"No space left on device\n")
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(prepare.subprocess, "run", run)
    monkeypatch.setattr(prepare, "require_java", lambda: Path("/usr/bin/java"))
    failed = call()
    assert failed.exit_code == 4
    assert "No space left on device" in failed.stderr
    assert list(cache.iterdir()) == []


@pytest.mark.spark
@pytest.mark.long
def test_java_maps_the_archive_that_the_small_job_made(cache: Path, tmp_path: Path) -> None:
    """In a driver's process of its own: sessions of this one have Java already."""
    archive = prepare.make_archive()
    assert archive.stat().st_size > 1 << 20
    driver = (
        "from state_runtime.spark.session import build_session\n"
        "spark = build_session('t', 'local[1]', {'spark.ui.enabled': 'false'})\n"
        "assert spark.range(10).count() == 10\n"
        "java = spark.sparkContext._gateway.proc.pid\n"
        "print('mapped' if '.jsa' in open(f'/proc/{java}/maps').read().replace('classes.jsa', '') else 'not mapped')\n"
    )
    if not Path("/proc/self/maps").exists():
        pytest.skip("Linux says what a process has mapped")
    said = subprocess.run(
        [sys.executable, "-c", driver], capture_output=True, text=True, timeout=300, env=dict(os.environ), check=False
    )
    assert said.returncode == 0, said.stderr[-2000:]
    assert said.stdout.split() == ["mapped"]
