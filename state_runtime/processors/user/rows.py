"""`Row` as user code gets it."""

from __future__ import annotations

from collections import _tuplegetter  # type: ignore[attr-defined]  # what namedtuple is made of
from collections.abc import Sequence
from typing import Any

from pyspark.sql import Row

__all__ = ["row_class_of"]


def row_class_of(names: Sequence[str]) -> type[Row]:
    """A `Row` class for one schema, several times faster than `Row` and used like it.

    Instances are made in C (`tuple.__new__`), and a field is read by a C descriptor, as in a namedtuple, where `Row`
    searches its list of names in Python on every access. Names that a tuple has already (`count`, `index`) stay the
    tuple's, as in Row.
    """
    members: dict[str, Any] = {"__fields__": list(names)}
    for position, name in enumerate(names):
        if name.isidentifier() and not hasattr(Row, name):
            members[name] = _tuplegetter(position, name)
    return type("Row", (Row,), members)
