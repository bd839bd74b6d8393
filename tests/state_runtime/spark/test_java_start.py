"""Java starts beside the driver's own beginning; whatever happens to one of the two, the other does not hang or stay."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from state_runtime.base.errors import Unavailable
from state_runtime.spark import java_start
from state_runtime.spark.java_start import JavaStart


class Java:
    """Stands for PySpark's connection to a Java process."""

    def __init__(self) -> None:
        self.proc = SimpleNamespace(stdin=io.BytesIO())
        self.is_shut = False

    def shutdown(self) -> None:
        self.is_shut = True


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What this process has of Java, and how it is launched."""
    known = SimpleNamespace(java=None, launch=lambda settings, options: Java(), launches=0)

    def launch(settings: Any, options: Any) -> Any:
        known.launches += 1
        return known.launch(settings, options)

    def use(gateway: Any) -> bool:
        known.java = known.java or gateway
        return known.java is gateway

    monkeypatch.setattr(java_start, "java_launcher", lambda: launch if known.java is None else None)
    monkeypatch.setattr(java_start, "use_java", use)
    monkeypatch.setattr(java_start, "session_with", lambda settings: settings)
    return known


def begun(**more: Any) -> JavaStart:
    return JavaStart("job", "local[2]", {"spark.driver.memory": "1g"}, **more)


def test_a_signal_to_the_drivers_group_does_not_reach_java(process: SimpleNamespace) -> None:
    """It asks the driver to stop after its epoch, and `count` of that epoch needs Java: the run ended as failed, and was
    started again, though somebody had stopped it."""
    asked: list[dict[str, Any]] = []
    process.launch = lambda settings, options: asked.append(dict(options)) or Java()
    begun().session()
    begun_with_a_log = begun(stderr=7)
    process.java = None
    begun_with_a_log.session()
    assert [options["start_new_session"] for options in asked] == [True] * len(asked)


def test_java_comes_while_other_things_are_done(process: SimpleNamespace) -> None:
    done = threading.Event()
    seen: list[dict[str, str]] = []

    def launch(settings: Any, options: Any) -> Java:
        assert done.wait(10), "the caller waited for Java"
        seen.append(dict(settings.getAll()))
        return Java()

    process.launch = launch
    start = begun()
    done.set()
    start.session()
    assert process.java is not None
    assert seen[0]["spark.driver.memory"] == "1g", "what only a start of Java can take is known then"


def test_what_java_says_goes_to_the_descriptor(process: SimpleNamespace, tmp_path: Path) -> None:
    def launch(settings: Any, options: dict[str, Any]) -> Java:
        program = [sys.executable, "-c", "import sys; print('at java.base/java.lang', file=sys.stderr)"]
        subprocess.run(program, check=True, **options)
        return Java()

    process.launch = launch
    with (tmp_path / "log").open("ab", buffering=0) as log:
        begun(stderr=log.fileno()).session()
    assert (tmp_path / "log").read_text() == "at java.base/java.lang\n"


def test_java_of_a_start_that_failed_ends(process: SimpleNamespace) -> None:
    java = Java()
    process.launch = lambda *_: java
    begun().undo()
    assert java.is_shut
    assert java.proc.stdin.closed, "what Java waits for"
    assert process.java is None


def test_why_java_did_not_start_is_told_where_it_is_waited_for(process: SimpleNamespace) -> None:
    def launch(*_: Any) -> Java:
        raise RuntimeError("JAVA_GATEWAY_EXITED")

    process.launch = launch
    start = begun()
    with pytest.raises(RuntimeError, match="JAVA_GATEWAY_EXITED"):
        start.session()
    begun().undo()  # there is nothing to end


def test_a_java_that_does_not_come_is_not_waited_for_for_ever(
    process: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    process.launch = lambda *_: over.wait(10) and Java()
    monkeypatch.setattr(java_start, "_START_S_MAX", 0.01)
    start = begun()
    with pytest.raises(Unavailable, match="did not start"):
        start.session()
    over.set()


def test_a_process_has_one_java(process: SimpleNamespace) -> None:
    process.java = Java()
    begun().session()
    JavaStart("job", "", {}).session()  # of `spark-submit`
    assert process.launches == 0


def test_if_the_jobs_code_started_java_the_other_one_ends(process: SimpleNamespace) -> None:
    java = Java()
    process.launch = lambda *_: java
    start = begun()
    theirs = process.java = Java()
    start.session()
    assert process.java is theirs
    assert java.is_shut
