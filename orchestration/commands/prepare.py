"""`stillstate prepare`: make drivers of this host start faster."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console

from stillstate.orchestration.commands.base import guarded

__all__ = ["register"]


@guarded
def prepare(
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the prepared files of all versions of Java and Spark.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Also if it is there already.")] = False,
) -> None:
    """Let drivers start faster, on this host.

    Keeps the classes that Spark's Java loads in an archive, for this user.

    Java reads and checks some 20,000 classes at each start. Once they are in an archive (about 200 MB, in the user's
    cache folder) it maps them instead, which shortens the time from a restart to its first checkpoint by a third. Do it
    once for each version of Java and Spark; it takes about a minute with low priority, and running jobs are not
    disturbed. If Java, Spark or the class path no longer fits the archive, Java starts as without it.
    """
    from stillstate.orchestration.running.prepare import archive_of_host, make_archive, remove_archives
    from stillstate.orchestration.text import bytes_text, duration_text

    if remove:
        for removed in remove_archives():
            print(f"removed: {removed}")
        return
    known = archive_of_host()
    if known is not None and not force:
        print(f"prepared already: {known}")
        return
    begun_s = time.monotonic()
    with Console(stderr=True).status("running a small job, and writing the classes that it loads"):
        archive = make_archive()
    took = duration_text(time.monotonic() - begun_s)
    print(f"prepared in {took}: {archive} ({bytes_text(archive.stat().st_size)}); drivers use it from their next start")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: stillstate prepare")(prepare)
