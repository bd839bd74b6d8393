"""Columns of an operator's output under other names, as the projection at the end of a query gives them."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

__all__ = ["Renamed"]


@dataclass(frozen=True)
class Renamed:
    """The rows that sinks get.

    Attributes:
        made_of: for each column the one of the output that it is, or the two that are the start and end of a window.
        schema: of the rows.
    """

    made_of: tuple[tuple[str, ...], ...]
    schema: pa.Schema

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of a batch of the output."""
        columns = [_column(batch, names, field) for names, field in zip(self.made_of, self.schema, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def _column(batch: pa.RecordBatch, names: tuple[str, ...], field: pa.Field) -> pa.Array:
    found = [batch.column(name) for name in names]
    if len(found) == 1:
        return found[0] if found[0].type == field.type else found[0].cast(field.type)
    inner = [field.type.field(place) for place in range(field.type.num_fields)]
    times = [each if each.type == one.type else each.cast(one.type) for each, one in zip(found, inner, strict=True)]
    return pa.StructArray.from_arrays(times, fields=inner, mask=found[0].is_null())
