"""`stillstate metrics`: metrics of the jobs for Prometheus."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from state_runtime.base.errors import InvalidConfiguration
from stillstate.orchestration.commands.base import ConfigOption, guarded
from stillstate.orchestration.config.spec import load_spec

__all__ = ["register"]


@guarded
def metrics(
    jobs: Annotated[
        list[str] | None, typer.Argument(metavar="JOB", help="These; all, if none is named.", show_default=False)
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Serve them until Ctrl-C; each request looks.", show_default=False)
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Replace this file, which is never half written.", show_default=False),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Print metrics of all jobs as Prometheus text.

    Health, checkpoints, lag, changelog and savepoints.

    Each job is probed once, as Dagster's sensors do: if a store does not answer within observation.timeout_s, the job
    is not seen (stillstate_job_seen 0), and the other jobs are still shown. --out is for the node exporter's textfile
    collector: call it from cron or a timer, with a name that ends in .prom.
    """
    from prometheus_client import generate_latest, write_to_textfile

    from stillstate.orchestration.metrics.collector import JobsCollector

    if listen and out is not None:
        raise InvalidConfiguration("--listen serves and --out writes; give one of them")
    registry = JobsCollector(lambda: load_spec(config), jobs or ()).registry()
    if listen:
        _serve(listen, registry)
    elif out is not None:
        try:
            write_to_textfile(str(out), registry)
        except OSError as error:
            raise InvalidConfiguration(f"{out} cannot be written: {error.strerror or error}") from error
    else:
        sys.stdout.write(generate_latest(registry).decode())


def _serve(listen: str, registry: object) -> None:
    from prometheus_client import start_http_server

    host, port = _address(listen)
    try:
        server, thread = start_http_server(port, host, registry)  # type: ignore[arg-type]
    except OSError as error:
        raise InvalidConfiguration(f"--listen {listen}: {error.strerror or error}") from error
    print(f"metrics at http://{host}:{server.server_port}/metrics until Ctrl-C", file=sys.stderr, flush=True)
    try:
        thread.join()
    except KeyboardInterrupt:
        server.shutdown()
        server.server_close()


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise InvalidConfiguration(f"--listen {listen!r} is no HOST:PORT; for example 127.0.0.1:9464")
    return host, int(port)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: stillstate metrics --listen 127.0.0.1:9464")(metrics)
