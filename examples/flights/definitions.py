"""The Dagster code location that a clone opens as it stands: the flights example's jobs.

The root's `workspace.yaml` names this module. `$STILLSTATE_CONFIG` opens another file's jobs in their place.
"""

import os
from pathlib import Path

import dagster as dg

from stillstate.orchestration.config.spec import CONFIG_ENV
from stillstate.orchestration.definitions import build_definitions

__all__ = ["defs"]


@dg.definitions
def defs() -> dg.Definitions:
    """Loaded by Dagster; the path does not depend on the folder that Dagster was started in."""
    return build_definitions(os.environ.get(CONFIG_ENV) or Path(__file__).with_name("stillstate.yaml"))
