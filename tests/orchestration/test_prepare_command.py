"""`stillstate prepare`: an archive appears whole or not at all, and Java uses it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stillstate.orchestration.cli import app
from stillstate.orchestration.running import memory, prepare


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


def test_what_a_killed_one_left_goes_with_the_next_but_not_while_it_may_run(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "require_java", lambda: Path("/usr/bin/java"))
    monkeypatch.setattr(prepare.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    cache.mkdir(parents=True, mode=0o700)
    for name in (".making-old", ".making-new"):
        (cache / name).mkdir()
        (cache / name / "classes.jsa").write_bytes(b"half")
    os.utime(cache / ".making-old", (0, 0))
    assert call().exit_code == 4
    assert [left.name for left in cache.iterdir()] == [".making-new"]


def test_a_full_disk_is_said_as_what_it_is(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare, "require_java", lambda: Path("/usr/bin/java"))
    monkeypatch.setattr(prepare, "make_private_folder", full)
    failed = call()
    assert failed.exit_code == 4
    assert "the archive of classes cannot be made" in failed.stderr


def classes_from_the_archive(log: Path) -> int:
    """How many classes of Spark a session's Java takes from it. In a process of its own: this one has Java already."""
    driver = (
        "from state_runtime.spark.session import build_session\n"
        f"said = '-Xlog:class+load:file={log}'\n"
        "conf = {'spark.ui.enabled': 'false', 'spark.driver.extraJavaOptions': said}\n"
        "assert build_session('t', 'local[1]', conf).range(10).count() == 10\n"
    )
    said = subprocess.run([sys.executable, "-c", driver], capture_output=True, text=True, timeout=300, check=False)
    assert said.returncode == 0, said.stderr[-2000:]
    loaded = (line for line in log.read_text().splitlines() if " org.apache.spark." in line)
    return sum("shared objects file (top)" in line for line in loaded)


@pytest.mark.spark
@pytest.mark.long
def test_java_takes_its_classes_from_the_archive_and_starts_without_one_that_is_damaged(
    cache: Path, tmp_path: Path
) -> None:
    archive = prepare.make_archive()
    assert classes_from_the_archive(tmp_path / "whole.log") > 1_000
    body = bytearray(archive.read_bytes())
    body[len(body) // 2] ^= 1
    archive.chmod(0o600)
    archive.write_bytes(body)
    assert classes_from_the_archive(tmp_path / "flipped.log") == 0
    archive.write_bytes(body[: len(body) // 2])
    assert classes_from_the_archive(tmp_path / "cut.log") == 0


def test_it_is_made_unasked_by_one_process_and_where_memory_is_left(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty supervisors of one host start within a minute; and a container may have little more than its job takes."""
    monkeypatch.setattr(prepare, "require_java", lambda: Path("/usr/bin/java"))
    monkeypatch.setattr(prepare, "archive_of_host", lambda: None)
    monkeypatch.setattr(prepare, "free_memory_bytes", lambda: prepare.ROOM_BYTES)
    assert prepare.is_wanted_by_itself()
    (cache / ".making-by-another").mkdir(parents=True)
    assert not prepare.is_wanted_by_itself()
    os.utime(cache / ".making-by-another", (0, 0))
    assert prepare.is_wanted_by_itself(), "that one was killed long ago"
    monkeypatch.setattr(prepare, "free_memory_bytes", lambda: prepare.ROOM_BYTES - 1)
    assert not prepare.is_wanted_by_itself()
    monkeypatch.setattr(prepare, "free_memory_bytes", lambda: prepare.ROOM_BYTES)
    monkeypatch.setattr(prepare, "archive_of_host", lambda: cache / "made.jsa")
    assert not prepare.is_wanted_by_itself()


@pytest.mark.parametrize(("limit", "free"), [("max", None), ("1000", 400), (None, None)])
def test_a_limit_of_the_container_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: Any, free: Any
) -> None:
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("600\n")
    found = memory.free_memory_bytes()
    assert found == free if free is not None else found > 1000
