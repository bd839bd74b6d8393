"""The `Row` that user code gets."""

from __future__ import annotations

from collections import _tuplegetter  # type: ignore[attr-defined]  # the descriptor of namedtuple's fields
from collections.abc import Sequence
from typing import Any

from pyspark.sql import Row

__all__ = ["row_class_of"]


def row_class_of(names: Sequence[str]) -> type[Row]:
    """Make a `Row` class for one schema, several times faster than `Row` and used like it.

    Instances are made in C (`tuple.__new__`), and a C descriptor reads a field, as in a namedtuple, where `Row`
    searches its list of names in Python on every access. Names that a tuple already has (`count`, `index`) stay the
    tuple's, as in Row.
    """
    members: dict[str, Any] = {"__fields__": list(names)}
    for position, name in enumerate(names):
        if name.isidentifier() and not hasattr(Row, name):
            members[name] = _tuplegetter(position, name)
    return type("Row", (Row,), members)
