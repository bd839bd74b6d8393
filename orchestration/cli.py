"""The command line, `stillstate`: combines the commands of `orchestration/commands/`.

Reading commands (`jobs`, `snapshots`, `epochs`, `describe`, `query`) read only the store, so they work from any machine
and start quickly: neither Spark nor Dagster is imported for them.
"""

from __future__ import annotations

from typing import Final

import typer

from state_runtime.base.errors import REACTIONS, StoreRefused
from stillstate.orchestration.commands import (
    begin_here,
    convert,
    deleting,
    drill,
    epochs,
    export,
    import_spark,
    jobs,
    materialize,
    metrics,
    migrating,
    moving,
    plans,
    prepare,
    rollback,
    savepoints,
    snapshots,
)
from stillstate.orchestration.commands.base import VerboseOption
from stillstate.orchestration.commands.logs import logging_to_stderr

__all__ = ["app", "main"]

HELP: Final = """Run, watch and look into streaming jobs with Stillstate.

Jobs are declared in `stillstate.yaml`: the one that --config names, else $STILLSTATE_CONFIG, else the one in this
folder or above it.

Exit codes:
  0  done
""" + "".join(f"  {error.exit_code}  {error.help}\n" for error in REACTIONS if error is not StoreRefused)

# Stillstate wraps its own text; rich would re-flow the table of exit codes above.
app = typer.Typer(
    name="stillstate",
    help=HELP.replace("Exit codes:\n", "\b\nExit codes:\n"),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # a traceback with local variables could show storage options
)


@app.callback()
def configured(context: typer.Context, verbose: VerboseOption = False) -> None:
    """Set up logging before any command; its text for people is `HELP`."""
    context.with_resource(logging_to_stderr(verbose=verbose))


# In the order of the help: the topics that users look for first come first.
for topic in (
    begin_here,
    jobs,
    metrics,
    snapshots,
    epochs,
    materialize,
    convert,
    import_spark,
    export,
    deleting,
    plans,
    moving,
    drill,
    savepoints,
    rollback,
    migrating,
    prepare,
):
    topic.register(app)


def main() -> None:
    """Run the console script."""
    app()


if __name__ == "__main__":
    main()
