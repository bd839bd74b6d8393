"""The answers to a look-up of many rows, collected from the places where they were found; pure and vectorised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from state_runtime.state.table import Mask, Positions, is_plain, plain_numbers

__all__ = ["Answers"]

_WHOLE_MAX = 2
"""A column with at most this many rows per wanted row is read whole: copying it takes a fraction of the time to pick
rows from it, and rows are picked once more when all are found."""


@dataclass(frozen=True)
class _Part:
    """For some wanted rows, where in some columns their values are."""

    wanted: Positions
    columns: Sequence[pa.Array]
    at: Positions


class Answers:
    """The answers as they are found, batch after batch. Values are read when all are found, column by column."""

    def __init__(self, count: int) -> None:
        """Args:
        count: how many rows are looked up.
        """
        self.found: Mask = np.zeros(count, dtype=np.bool_)
        self._parts: list[_Part] = []

    def add(self, wanted: Positions, columns: Sequence[pa.Array], at: Positions) -> None:
        """Add, for some wanted rows, ascending, the values at some positions of columns."""
        if len(wanted):
            self.found[wanted] = True
            self._parts.append(_Part(wanted, columns, at))

    def columns(self, types: Sequence[pa.DataType]) -> list[pa.Array]:
        """Return the columns, aligned with the wanted rows; null where a row was not found."""
        if not self._parts:
            return [pa.nulls(len(self.found), kind) for kind in types]
        validity = None if bool(self.found.all()) else pa.array(self.found).buffers()[1]
        return [self._column(number, kind, validity) for number, kind in enumerate(types)]

    def _column(self, number: int, kind: pa.DataType, validity: pa.Buffer | None) -> pa.Array:
        if len(self._parts) == 1 and validity is None:
            return self._parts[0].columns[number].take(pa.array(self._parts[0].at))
        numbers = self._numbers(number) if is_plain(kind) else None
        if numbers is None:
            return self._any_column(number)
        return pa.Array.from_buffers(kind, len(self.found), [validity, pa.py_buffer(numbers)])

    def _numbers(self, number: int) -> Any:
        """Return the column's numbers, each moved once to its place; None if some are null."""
        numbers = None
        for part in self._parts:
            taken = _numbers_at(part.columns[number], part.at)
            if taken is None:
                return None
            if numbers is None:
                numbers = np.zeros(len(self.found), dtype=taken.dtype)
            numbers[part.wanted] = taken
        return numbers

    def _any_column(self, number: int) -> pa.Array:
        position = np.zeros(len(self.found), dtype=np.int64)
        before, pieces = 0, []
        for part in self._parts:
            piece, at = part.columns[number], part.at
            if len(piece) > _WHOLE_MAX * len(at):
                piece, at = piece.take(pa.array(at)), np.arange(len(at))
            position[part.wanted] = before + at
            before += len(piece)
            pieces.append(piece)
        whole = pa.concat_arrays(pieces) if len(pieces) > 1 else pieces[0]
        return whole.take(pa.array(position, mask=~self.found))


def _numbers_at(column: pa.Array, at: Positions) -> Any:
    plain = plain_numbers(column)
    # Nulls are in tombstones only, and no tombstone was found.
    return plain[at] if plain is not None else plain_numbers(column.take(pa.array(at)))
