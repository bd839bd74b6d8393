"""Where log lines go: warnings to stderr, everything that a run logs to its log file. Logging is set up only here.

stderr     warnings, one line each; with --verbose also information. Tracebacks only where no file keeps them
log file   of a run: information and warnings with tracebacks, and what Spark's Java process and its Python
           processes write to stderr; a driver of the launcher has the file as its stderr
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import InvalidConfiguration, StillstateError
from state_runtime.base.ids import SYSTEM_IDS
from stillstate.orchestration.config.spec import JobSpec

__all__ = ["RunLog", "logged_run", "logging_to_stderr"]

_OURS: Final = ("state_runtime", "stillstate")
# They log a traceback of hundreds of lines for an error that Stillstate reports in one: for the file only.
_LIBRARIES: Final = ("py4j", "pyspark")
_FILE_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_LOG = logging.getLogger(__name__)


class _Stderr(logging.Handler):
    """Writes log lines for people. `sys.stderr` is looked up each time: progress displays and tests replace it."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.file_has_more = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not (self.file_has_more and _is_of_library(record)):
                print(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        line = f"{record.levelname.lower()}: {record.getMessage()}"
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            if not self.file_has_more:
                return f"{line}\n{''.join(traceback.format_exception(error)).rstrip()}"
            line += f" ({type(error).__name__}: {_first_line(error)})"
        return line


class _Redacted(logging.Formatter):
    """Removes the credentials of the job's stores from every log line, no matter which code logged them."""

    def __init__(self, job: JobSpec) -> None:
        super().__init__(_FILE_FORMAT)
        self._job = job

    def format(self, record: logging.LogRecord) -> str:
        from stillstate.orchestration.launchers.log_files import redacted

        return redacted(self._job, super().format(record))


@contextmanager
def logging_to_stderr(*, verbose: bool) -> Iterator[None]:
    """Log warnings to stderr, with `verbose` also information; restore the previous logging at the end."""
    root, handler = logging.getLogger(), _Stderr(logging.INFO if verbose else logging.WARNING)
    root.addHandler(handler)
    try:
        with _telling(verbose):
            yield
    finally:
        root.removeHandler(handler)


class RunLog:
    """The log of one run: made with the command → `begin` when the run begins → `end`.

    Attributes:
        path: of the file, once it exists.
    """

    def __init__(self, job: JobSpec, file: str | None, *, quiet: bool) -> None:
        self._job = job
        self._given = file
        self._quiet = quiet
        self._file: IO[bytes] | None = None
        self._handler: logging.Handler | None = None
        self.path: Path | None = None

    def begin(self) -> int | None:
        """Open the file, show its path, and return its descriptor, for the output of Spark's processes; None without a
        file. If the log cannot be written, warn: the job runs without it."""
        from stillstate.orchestration.launchers.log_files import new_log_file

        if self._given == "-":
            return None
        try:
            if self._given is None:
                self._file = new_log_file(self._job, SYSTEM_CLOCK, SYSTEM_IDS)
            else:
                self._file = _appended(Path(self._given))
        except (OSError, InvalidConfiguration) as error:
            _LOG.warning("this run has no log file: %s", error)
            return None
        self.path = Path(self._file.name)
        self._handler = logging.FileHandler(self.path, "a", encoding="utf-8")
        self._handler.setFormatter(_Redacted(self._job))
        logging.getLogger().addHandler(self._handler)
        _mark_stderr(file_has_more=True)
        if not self._quiet:
            print(f"log: {self.path}", file=sys.stderr)
        return self._file.fileno()

    def end(self, error: BaseException | None) -> None:
        """Log how the run ended, with the whole traceback, and close the file."""
        if self._handler is not None:
            if error is not None:
                self._handler.handle(
                    _LOG.makeRecord(
                        _LOG.name, logging.ERROR, __file__, 0, "the run ended with an error", (),
                        (type(error), error, error.__traceback__),
                    )
                )  # fmt: skip
            logging.getLogger().removeHandler(self._handler)
            self._handler.close()
            _mark_stderr(file_has_more=False)
        if self._file is not None:
            self._file.close()


@contextmanager
def logged_run(job: JobSpec, file: str | None, *, verbose: bool, as_json: bool) -> Iterator[RunLog]:
    """Log a run. Any error that ends it becomes one message that names the log; the traceback is in the log.

    Args:
        file: None: a new file in `launcher.log_dir`; "-": stderr is the log.

    Raises:
        StillstateError: the run's own, with a note where the log is; also for unexpected errors.
    """
    from stillstate.orchestration.launchers.log_files import redacted

    log = RunLog(job, file, quiet=as_json)
    ended: BaseException | None = None
    try:
        with _stderr_tells(verbose=verbose or file == "-"), _telling(True):
            yield log
    except StillstateError as error:
        ended = error
        if log.path is not None:
            error.add_note(f"log: {log.path}")
        raise
    except Exception as error:
        ended = error
        if log.path is None:
            raise  # no log file exists for the traceback
        unforeseen = StillstateError(
            f"the driver of {job.name!r} ended with an error that was not foreseen: {type(error).__name__}: "
            f"{redacted(job, _first_line(error))}. Nothing that was committed is lost; start it again. If it ends like "
            "this once more, report it with the log, which has the traceback"
        )
        unforeseen.add_note(f"log: {log.path}")
        raise unforeseen from error
    except BaseException as error:
        ended = error
        raise
    finally:
        log.end(ended)


@contextmanager
def _telling(on: bool) -> Iterator[None]:
    """Let Stillstate's loggers log information. Libraries stay at warnings."""
    before = {name: logging.getLogger(name).level for name in _OURS}
    for name in _OURS if on else ():
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def _stderr_tells(*, verbose: bool) -> Iterator[None]:
    found = [(h, h.level) for h in logging.getLogger().handlers if isinstance(h, _Stderr)]
    for handler, _ in found if verbose else ():
        handler.setLevel(logging.INFO)
    try:
        yield
    finally:
        for handler, level in found:
            handler.setLevel(level)


def _mark_stderr(*, file_has_more: bool) -> None:
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Stderr):
            handler.file_has_more = file_has_more


def _is_of_library(record: logging.LogRecord) -> bool:
    """Whether one of `_LIBRARIES` logged it; part of py4j logs under the name of the root logger."""
    return record.name.split(".")[0] in _LIBRARIES or Path(record.pathname).parent.name in _LIBRARIES


def _appended(file: Path) -> IO[bytes]:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return open(file, "ab", buffering=0, opener=lambda *_: descriptor)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "without a message")
