"""The application that `spark-submit` runs: `[--cause TEXT] run JOB --config FILE …`, which is `stillstate run` in a
driver that Spark has started.

This file is self-contained, because Spark may copy it to another machine. There the packages that it imports come from
the image, an archive, or `--py-files`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = ["CAUSE_OPTION", "SUBMITTED_ENV", "main"]

CAUSE_OPTION: Final = "--cause"
SUBMITTED_ENV: Final = "STILLSTATE_SUBMITTED"


def main(arguments: Sequence[str]) -> None:
    """Run the command; end by `SystemExit` with its exit code."""
    _import_from_packages_only()
    if arguments[:1] == [CAUSE_OPTION]:
        os.environ["STILLSTATE_START_CAUSE"] = arguments[1]
        arguments = arguments[2:]
    os.environ[SUBMITTED_ENV] = "1"
    from stillstate.orchestration.cli import app

    app(args=list(arguments), prog_name="stillstate")


def _import_from_packages_only() -> None:
    """Remove this script's folder from Python's search path if it is the package's own folder. Python searches a
    script's folder first; here that would let Stillstate's `text` or `config` replace a module of the same name of the
    user's job. If the script is a copy, its folder has the shipped modules and must stay in the path."""
    here = Path(__file__).resolve().parent
    if (here / "__init__.py").exists():
        sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]


if __name__ == "__main__":
    main(sys.argv[1:])
