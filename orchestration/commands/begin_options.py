"""Options of `run` and `start` that say where a run begins."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["ClaimOption", "FromOption", "FromSnapshotOption"]

FromOption = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="PLACE",
        help="Where a job without snapshots begins: STORE/JOB, STORE/JOB@ID, or the folder of a savepoint. "
        "What it needs is copied.",
        show_default=False,
    ),
]
ClaimOption = Annotated[
    bool,
    typer.Option(
        "--claim", help="Take the place over: nobody else runs it, and it is removed after the first checkpoint."
    ),
]
FromSnapshotOption = Annotated[
    int | None,
    typer.Option(
        "--from-snapshot",
        metavar="ID",
        min=1,
        help="Go back to an older snapshot of this job. Output since then stays, and what comes again has higher "
        "epochs.",
        show_default=False,
    ),
]
