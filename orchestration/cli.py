"""The command line, `stillstate`: combines the commands of `orchestration/commands/`.

Reading commands (`jobs`, `snapshots`, `epochs`, `describe`, `query`) read only the store, so they work from any machine
and start quickly: neither Spark nor Dagster is imported for them.
"""

from __future__ import annotations

from typing import Any, Final

import typer
import typer.core

from state_runtime.base.errors import REACTIONS, StoreRefused
from stillstate.orchestration.commands import (
    begin_here,
    compact_output,
    convert,
    deleting,
    drill,
    epochs,
    explain,
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
    source,
)
from stillstate.orchestration.commands.base import VerboseOption
from stillstate.orchestration.commands.logs import logging_to_stderr

__all__ = ["app", "main"]

HELP: Final = """Run, watch and look into streaming jobs with Stillstate.

Jobs are declared in `stillstate.yaml`: the one that --config names, else $STILLSTATE_CONFIG, else the one in this
folder or above it. `stillstate COMMAND --help` has examples.
"""
EXIT_CODES: Final = "\b\nExit codes:\n  0  done\n" + "".join(
    f"  {error.exit_code}  {error.help}\n" for error in REACTIONS if error is not StoreRefused
)

SECTIONS: Final = {
    "Begin": ("init", "schema", "dagster", "import-spark", "prepare"),
    "Run a job": ("run", "start", "stop", "migrate", "rescale", "fork", "rollback", "source"),
    "Look": ("jobs", "epochs", "metrics", "explain", "snapshots", "describe", "query", "export"),
    "Snapshots": ("savepoint", "savepoints", "pin", "unpin", "pins", "verify", "drill", "convert", "copy", "move"),
    "Upkeep": ("materialize", "compact-output", "retention", "gc", "delete"),
}
"""The commands as the help groups them."""


class Commands(typer.core.TyperGroup):
    """Shows the commands in `SECTIONS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in SECTIONS.values() for name in names]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        longest = max(len(name) for name in self.commands)
        for title, names in SECTIONS.items():
            with formatter.section(title):
                room = formatter.width - 6 - longest
                formatter.write_dl(
                    [(name.ljust(longest), self.commands[name].get_short_help_str(room)) for name in names]
                )


# Stillstate wraps its own text; rich would re-flow the table of exit codes.
app = typer.Typer(
    name="stillstate",
    cls=Commands,
    help=HELP,
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # a traceback with local variables could show storage options
)


@app.callback()
def configured(context: typer.Context, verbose: VerboseOption = False) -> None:
    """Set up logging before any command; its text for people is `HELP`."""
    context.with_resource(logging_to_stderr(verbose=verbose))


for topic in (
    begin_here,
    jobs,
    metrics,
    snapshots,
    epochs,
    explain,
    materialize,
    compact_output,
    convert,
    import_spark,
    export,
    deleting,
    plans,
    moving,
    drill,
    savepoints,
    rollback,
    source,
    migrating,
    prepare,
):
    topic.register(app)


def main() -> None:
    """Run the console script."""
    app()


if __name__ == "__main__":
    main()
