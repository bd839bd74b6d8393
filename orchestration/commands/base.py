"""The common part of all commands: arguments, errors as exit codes, and output."""

from __future__ import annotations

import functools
import json
import os
import select
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, ParamSpec

import typer
from rich.console import Console

from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import InvalidConfiguration, StillstateError
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.base.process_space import process_space
from state_runtime.base.usercode import user_traceback
from stillstate.orchestration.config.spec import JobSpec, Spec

if TYPE_CHECKING:
    from state_runtime.base.actor import Actor
    from state_runtime.snapshot.catalog import Catalog

__all__ = [
    "ConfigOption",
    "JobArgument",
    "JsonOption",
    "OptionalJob",
    "VerboseOption",
    "catalog_of",
    "console",
    "guarded",
    "job_or_only",
    "print_json",
    "print_table",
    "this_process",
]

P = ParamSpec("P")

_EXIT_OF_A_CLOSED_PIPE: Final = 141
"""The exit code that a shell reports for a program that SIGPIPE ended."""

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job in stillstate.yaml.")]
OptionalJob = Annotated[
    str | None,
    typer.Argument(metavar="JOB", help="Name of the job; may be left out if there is only one.", show_default=False),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="The configuration file.", show_default=False),
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Log each step to stderr (warnings are always logged).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables, errors too.")]


def this_process() -> Actor:
    """Return the party that reads and writes stores for this command."""
    from state_runtime.base.actor import Actor

    return Actor(SYSTEM_CLOCK, SYSTEM_IDS, socket.gethostname(), os.getpid(), process_space())


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Turn Stillstate's errors into a message on stderr and the exit code of their kind. End silently if the reader of
    the output is gone (`stillstate … | head`)."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()  # otherwise a missing reader is found when Python ends, with Python's own message
        except StillstateError as error:
            _fail(error, as_json=bool(kwargs.get("as_json")))
        except BrokenPipeError:
            if not _reader_is_gone():
                raise
            raise typer.Exit(_EXIT_OF_A_CLOSED_PIPE) from None

    return wrapped


def _reader_is_gone() -> bool:
    """Whether Stillstate's stdout broke, and not a connection to a store or to Java; then nothing more is written."""
    try:
        descriptor = sys.stdout.fileno()
    except OSError:
        return False  # a stdout in memory has no reader that could close it
    # Ask the system: a failed write may have left nothing to write again, with or without a buffer.
    pipe = select.poll()
    pipe.register(descriptor, 0)
    is_gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in pipe.poll(0))
    if is_gone:
        # The rest of the buffer would fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return is_gone


def _fail(error: StillstateError, *, as_json: bool) -> NoReturn:
    notes: list[str] = getattr(error, "__notes__", [])  # where the run's log is
    if as_json:
        body: dict[str, Any] = {
            "kind": error.kind,
            "type": type(error).__name__,
            "exit_code": error.exit_code,
            "message": str(error),
        }
        if notes:
            body["notes"] = notes
        print(json.dumps({"error": body}), file=sys.stderr)
    else:
        # Not through rich: it would wrap file:line prefixes and read brackets in paths as markup.
        message = str(error)
        gap = "\n" if "\n" in message else " "  # lines of file:line: stay where an editor finds them
        print(f"{type(error).__name__}:{gap}{message}", file=sys.stderr)
        cause = error.__cause__
        if error.kind == "user-code" and cause is not None:
            print(user_traceback(cause), file=sys.stderr)
        for note in notes:
            print(note, file=sys.stderr)
    raise typer.Exit(error.exit_code)


def job_or_only(spec: Spec, name: str | None) -> JobSpec:
    if name is not None:
        return spec.job(name)
    if len(spec.jobs) > 1:
        raise InvalidConfiguration(f"{spec.file} has several jobs; name one of: {', '.join(sorted(spec.jobs))}")
    return next(iter(spec.jobs.values()))


def catalog_of(job: JobSpec) -> Catalog:
    from state_runtime.snapshot.catalog import Catalog
    from state_runtime.store import open_store
    from stillstate.orchestration.config.job_location import location_of

    job = location_of(job)
    return Catalog(open_store(job.store, job.storage_options), job.name)


def print_json(value: Any) -> None:
    print(json.dumps(value))


def print_table(table: Any) -> None:
    console().print(table)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # `guarded` handles it; rich would end the process as if it had failed


def console() -> Console:
    # Made for each use: tests and pagers replace stdout.
    found = _Console(file=sys.stdout)
    # A pipe has no width; 80 columns would cut names that a `grep` looks for.
    return found if found.is_terminal else _Console(file=sys.stdout, width=160)
