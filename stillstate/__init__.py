"""The package by which Stillstate's Dagster side is imported, so that its names do not collide with your packages.

`assets` and `orchestration` are at the top of the checkout and are imported as `stillstate.assets` and
`stillstate.orchestration`: the folder in which Dagster is started may well have packages of these names. A wheel holds
their files in this folder; a checkout has links to them.

The names below import Dagster when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stillstate.assets.mount import Translator
    from stillstate.orchestration.component import StillstateComponent
    from stillstate.orchestration.definitions import build_definitions
    from stillstate.orchestration.resources import StillstateResource

__all__ = ["StillstateComponent", "StillstateResource", "Translator", "build_definitions"]

_HOMES = {
    "StillstateComponent": "stillstate.orchestration.component",
    "StillstateResource": "stillstate.orchestration.resources",
    "Translator": "stillstate.assets.mount",
    "build_definitions": "stillstate.orchestration.definitions",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
