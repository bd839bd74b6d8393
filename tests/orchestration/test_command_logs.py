"""Where log lines go: warnings to stderr, everything of a run to its log file."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_roots import SECRET, JobRoot
from typer.testing import CliRunner, Result

from state_runtime.base.errors import Fenced, Unavailable
from stillstate.orchestration.cli import app

RUNTIME = logging.getLogger("state_runtime.driver.epochs")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


class Ended:
    """What a run that ends well returns."""

    state, last_snapshot_id, epochs = "finished", 3, 2


@pytest.fixture
def says(write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`stillstate run flights` with a run that logs something and ends as told."""

    def run(*arguments: str, ends: Exception | None = None, extra: str = "", before: str = "") -> Result:
        def run_job(*_: Any, begin_log: Callable[[], int | None], **__: Any) -> Any:
            descriptor = begin_log()
            if descriptor is not None:
                os.write(descriptor, b"a line of Java\n")
            RUNTIME.info("shard 3: restored from stale local")
            RUNTIME.warning("the fold failed with %s", SECRET)
            logging.getLogger("py4j.clientserver").error("There was an exception", exc_info=ValueError("of py4j"))
            file, said = "/lib/py4j/java_gateway.py", "the gateway, in the root logger's name: of py4j"
            logging.getLogger().handle(logging.LogRecord("root", logging.ERROR, file, 1, said, (), None))
            try:
                raise KeyError("inner")
            except KeyError:
                RUNTIME.exception("the progress callback failed")
            if ends is not None:
                raise ends
            return Ended()

        monkeypatch.setattr("stillstate.orchestration.running.run.run_job", run_job)
        config = write_config(extra=f"storage_options: {{key: {SECRET}}}\n{extra}")
        return call(*filter(None, [before]), "run", "flights", *arguments, "-c", str(config))

    return run


def log_of(folder: Path) -> str:
    (file,) = (folder / "logs").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    return file.read_text()


def test_a_run_has_a_log_file_that_is_named_at_the_start(says: Callable[..., Result], tmp_path: Path) -> None:
    """What a shard was restored from, and tracebacks, were never seen by anybody."""
    result = says()
    assert result.exit_code == 0, result.output
    (file,) = (tmp_path / "logs").iterdir()
    assert result.stderr.splitlines()[0] == f"log: {file}"
    text = log_of(tmp_path)
    for line in (
        "INFO state_runtime.driver.epochs: shard 3: restored",
        "a line of Java",
        "KeyError: 'inner'",
        "of py4j",
    ):
        assert line in text
    assert SECRET not in text


def test_warnings_are_on_stderr_and_information_is_not(says: Callable[..., Result]) -> None:
    """A warning that only a file has is not seen; a traceback in a terminal hides what matters."""
    told = says().stderr
    assert "warning: the fold failed" in told
    assert "error: the progress callback failed (KeyError: 'inner')" in told
    for line in ("restored from", "Traceback", "There was an exception"):
        assert line not in told


@pytest.mark.parametrize(("before", "after"), [("--verbose", []), ("", ["--verbose"]), ("-v", [])])
def test_verbose_says_what_is_done(says: Callable[..., Result], before: str, after: list[str]) -> None:
    assert "info: shard 3: restored from stale local" in says(*after, before=before).stderr


def test_a_driver_whose_stderr_is_the_log_opens_no_other(says: Callable[..., Result], tmp_path: Path) -> None:
    """The launcher gave it a file as its stderr; that one has all."""
    told = says("--log-file", "-").stderr
    assert not (tmp_path / "logs").exists()
    assert all(line in told for line in ("info: shard 3: restored", "Traceback", "There was an exception"))


def test_a_log_can_be_put_elsewhere_and_is_appended_to(says: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "mine.log"
    file.write_text("before\n")
    assert says("--log-file", str(file)).exit_code == 0
    assert file.read_text().startswith("before\n")
    assert "restored from stale local" in file.read_text()


def test_a_log_that_cannot_be_written_does_not_keep_a_job_from_running(
    says: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "logs").write_text("a file")
    result = says()
    assert result.exit_code == 0
    assert "warning: this run has no log file: job 'flights': launcher.log_dir" in result.stderr


def test_an_error_is_one_message_and_the_name_of_the_log(says: Callable[..., Result], tmp_path: Path) -> None:
    """The reader of a terminal wants to know what, and what next; whoever looks deeper opens the file."""
    result = says(ends=Fenced("term 2 took the job over"))
    assert result.exit_code == 3
    (file,) = (tmp_path / "logs").iterdir()
    assert result.stderr.splitlines()[-2:] == ["Fenced: term 2 took the job over", f"log: {file}"]
    assert "Traceback" in log_of(tmp_path)
    assert json.loads(says("--json", ends=Unavailable("x")).stderr.splitlines()[-1])["error"]["notes"][0].startswith(
        "log"
    )


def test_what_nobody_foresaw_is_one_message_too(says: Callable[..., Result], tmp_path: Path) -> None:
    """A raw error of a library says neither what happened to the data nor what to do."""
    result = says(ends=ZeroDivisionError(f"deep inside {SECRET}\nsecond line"))
    assert result.exit_code == 1
    assert "not foreseen: ZeroDivisionError: deep inside ***" in result.stderr or SECRET not in result.stderr
    assert "Traceback" not in result.stderr
    assert "second line" not in result.stderr
    assert "ZeroDivisionError" in log_of(tmp_path)


def test_what_nobody_foresaw_keeps_its_traceback_where_no_file_has_it(says: Callable[..., Result]) -> None:
    result = says("--log-file", "-", ends=ZeroDivisionError("deep"))
    assert isinstance(result.exception, ZeroDivisionError)


def test_a_driver_that_is_turned_away_takes_no_place_among_the_logs(
    write_config: Callable[..., Path], flights: JobRoot, tmp_path: Path
) -> None:
    """Only the newest logs are kept: whoever tries again and again would push out the log of the run that lives."""
    flights.clock.at_ms = __import__("time").time_ns() // 1_000_000
    flights.host = "elsewhere"
    flights.start()
    flights.beat("running")
    assert call("run", "flights", "-c", str(write_config())).exit_code == 3
    assert not (tmp_path / "logs").exists()


def test_logging_is_as_before_when_a_command_is_over(says: Callable[..., Result]) -> None:
    """Programs that call commands of ours have logging of their own."""
    before = list(logging.getLogger().handlers)
    says("--verbose")
    assert logging.getLogger().handlers == before
    assert logging.getLogger("state_runtime").level == logging.NOTSET
