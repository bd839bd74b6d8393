"""Dataclasses as plain values for JSON; pure.

`dataclasses.asdict` copies every value below a dataclass in Python, which takes several times as long as writing the
JSON does. `json.dumps(value, default=fields_of)` asks only for the fields of each dataclass, and writes the same bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["fields_of"]

_NAMES: dict[type[Any], tuple[str, ...]] = {}


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass or of a group of settings by name, in their order; the values are not copied.

    Raises:
        TypeError: the value is neither.
    """
    kind = type(value)
    names = _NAMES.get(kind)
    if names is None:
        # `__dict__` also holds cached properties, so the fields are looked up by name.
        declared = getattr(kind, "model_fields", None)
        names = tuple(declared if declared is not None else (field.name for field in dataclasses.fields(value)))
        _NAMES[kind] = names
    return {name: getattr(value, name) for name in names}
