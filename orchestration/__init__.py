"""What happens when: the configuration file, the command line, launchers, and the Dagster jobs and sensors.

Thin on purpose: every action is a plain function that also works from the command line and from a test
without Dagster. Nothing here imports pyspark while loading, so the code location loads without Java.

The names below are for code locations of your own; they import Dagster when they are first used, so that the command
line does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from assets.mount import Translator
    from orchestration.component import StillstateComponent
    from orchestration.definitions import build_definitions
    from orchestration.resources import StillstateResource

__all__ = ["StillstateComponent", "StillstateResource", "Translator", "build_definitions"]

_HOMES = {
    "StillstateComponent": "orchestration.component",
    "StillstateResource": "orchestration.resources",
    "Translator": "assets.mount",
    "build_definitions": "orchestration.definitions",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
