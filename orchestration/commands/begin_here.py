"""`stillstate init`, `stillstate schema` and `stillstate dagster`: the first minutes with Stillstate."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import psutil
import typer
from rich.markup import escape

from state_runtime.base.errors import InvalidConfiguration
from stillstate.orchestration.commands.base import ConfigOption, JsonOption, console, guarded, print_json
from stillstate.orchestration.config.spec import CONFIG_ENV, load_spec

__all__ = ["free_port", "register"]

_HOME_ENV: Final = "DAGSTER_HOME"
_USUAL_PORT: Final = 3000
_PATIENCE_S: Final = 20.0
_DEFINITIONS: Final = "stillstate.orchestration.definitions"


@guarded
def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder, or the one you are in.")] = Path(),
    as_json: JsonOption = False,
) -> None:
    """Write a folder to begin with.

    It has a job, stillstate.yaml, some input, and Dagster's settings.

    Nothing that exists is overwritten.
    """
    from stillstate.orchestration.starter import write_folder

    written = write_folder(folder)
    if as_json:
        return print_json({"folder": str(folder.absolute()), "files": [str(path) for path in written]})
    out = console()
    for path in written:
        out.print(f"  {escape(str(path))}", highlight=False)
    out.print("\nNext:", highlight=False)
    if folder != Path():
        out.print(f"  cd {escape(str(folder))}", highlight=False)
    out.print("  stillstate run legs       # in this terminal, until Ctrl-C", highlight=False)
    out.print("  python feed.py            # in another one: flights that keep arriving", highlight=False)
    out.print("  stillstate dagster        # the jobs as assets, in the browser", highlight=False)


@guarded
def schema(
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write to this file; else to the output.")
    ] = None,
) -> None:
    """Print the JSON schema of stillstate.yaml, for editors.

    Editors that use yaml-language-server take it from the first line of stillstate.yaml:
    # yaml-language-server: $schema=FILE
    """
    from stillstate.orchestration.config.reference import schema_text

    if output is None:
        return print(schema_text(), end="")
    try:
        output.write_text(schema_text(), encoding="utf-8")
    except OSError as error:
        raise InvalidConfiguration(f"{output}: cannot be written ({error.strerror}); name another file") from error


@guarded
def dagster(
    config: ConfigOption = None,
    host: Annotated[
        str, typer.Option("--host", help="Where the page listens; anyone who reaches it may act.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=1, max=65_535, help="Of the page; by default 3000, or a free one.", show_default=False
        ),
    ] = None,
) -> None:
    """Start Dagster with the jobs of stillstate.yaml.

    Its page and its daemon run until Ctrl-C.

    Its home is the folder `dagster` beside the file, made if it is missing, unless $DAGSTER_HOME names another. Drivers
    that were started there outlive Dagster: `stillstate stop JOB` ends them.
    """
    if importlib.util.find_spec("dagster_webserver") is None:
        raise InvalidConfiguration("the package dagster-webserver is not installed: pip install 'stillstate[dagster]'")
    file = load_spec(config).file  # every problem of the file is reported here, not in a Dagster page
    home = _home(file)
    port = port or free_port(host)
    console().print(f"Dagster's home: {escape(str(home))}. Its page: http://{host}:{port}", highlight=False)
    command = [sys.executable, "-m", "dagster", "dev", "-m", _DEFINITIONS, "-h", host, "-p", str(port)]
    environment = {**os.environ, CONFIG_ENV: str(file), _HOME_ENV: str(home)}
    raise typer.Exit(_run_until_it_ends(command, environment, file.parent))


def _home(file: Path) -> Path:
    """Return $DAGSTER_HOME, or the folder beside the file; create the folder and its settings if they are missing."""
    from stillstate.orchestration.starter import instance_settings

    home = Path(os.environ.get(_HOME_ENV) or file.parent / "dagster").expanduser().resolve()
    try:
        home.mkdir(parents=True, exist_ok=True)
        if not (home / "dagster.yaml").exists():
            (home / "dagster.yaml").write_text(instance_settings(), encoding="utf-8")
    except OSError as error:
        raise InvalidConfiguration(
            f"{home}: Dagster's home cannot be made ({error.strerror}); name another in ${_HOME_ENV}"
        ) from error
    return home


def free_port(host: str, usual: int = _USUAL_PORT) -> int:
    """Return the usual port, or one that is free now. If another process takes it meanwhile, Dagster reports that."""
    for wanted in (usual, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, wanted))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise InvalidConfiguration(f"--host {host}: this machine has no such address; the usual one is 127.0.0.1")


def _run_until_it_ends(command: list[str], environment: dict[str, str], folder: Path) -> int:
    """Run a command and return its exit code; 0 if it was asked to end, no matter what it was doing. Ctrl-C reaches it
    through the terminal; a SIGTERM to this process is passed on as SIGINT. If it does not end it is asked again, and
    then killed."""
    process = subprocess.Popen(command, env=environment, cwd=folder)
    asked = threading.Event()

    def pass_on(*_: object) -> None:
        asked.set()
        process.send_signal(signal.SIGINT)

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: asked.set()),
        signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
    }
    louder = iter((signal.SIGINT, signal.SIGTERM))
    try:
        while True:
            was_asked = asked.is_set()
            try:
                code = process.wait(_PATIENCE_S)
                return 0 if asked.is_set() else code
            except subprocess.TimeoutExpired:
                if was_asked:
                    _tell(process.pid, next(louder, signal.SIGKILL))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and to those of its children that Ctrl-C reaches. Drivers have process groups of their
    own and do not get it. Dagster's page loses a Ctrl-C that comes while it starts, and Dagster then waits for its page
    for ever."""
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        group, first = os.getpgid(pid), psutil.Process(pid)
        for process in (*first.children(recursive=True), first):
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getpgid(process.pid) == group:
                    process.send_signal(number)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        epilog="Example: stillstate init flights",
    )(init)
    app.command(epilog="Example: stillstate schema --output stillstate.schema.json")(schema)
    app.command(epilog="Example: stillstate dagster --port 3001")(dagster)
