"""The side outputs of an operator: rows that it gives beside its main output, in schemas of their own.

They travel with the main output, in one schema: its columns, and behind them a struct column for each side output,
which is null in the rows of all other outputs. What reads an output takes its rows out of it
(`pipeline/side_outputs.py`). See docs/design/0046-side-outputs.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from state_runtime.processors.operator import ShardResult
from state_runtime.spark.columns import OUTPUT_COLUMN

__all__ = ["SideOutputs"]


@dataclass(frozen=True)
class SideOutputs:
    """The outputs of an operator of which something reads more than the main one.

    Attributes:
        main: schema of the main output.
        sides: schemas of the side outputs that are read, by name.
    """

    main: pa.Schema
    sides: Mapping[str, pa.Schema]

    @cached_property
    def schema(self) -> pa.Schema:
        """Schema of the rows of all outputs."""
        structs = [pa.field(OUTPUT_COLUMN + name, pa.struct(list(side))) for name, side in self.sides.items()]
        return pa.schema([*self.main, *structs])

    def of(self, result: ShardResult) -> Iterator[pa.RecordBatch]:
        """Yield the rows of all outputs of a shard; it takes the place of draining `result.outputs`."""
        result.sides = {name: [] for name in self.sides}
        for batch in result.outputs:
            yield self._main_rows(batch)
            yield from self._side_rows(result.sides)
        yield from self._side_rows(result.sides)

    def _main_rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        nothing = [pa.nulls(batch.num_rows, self.schema.field(OUTPUT_COLUMN + name).type) for name in self.sides]
        return pa.RecordBatch.from_arrays([*batch.columns, *nothing], schema=self.schema)

    def _side_rows(self, given: Mapping[str, list[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of side outputs that were given until now."""
        for name, batches in given.items():
            for batch in batches:
                if batch.num_rows:
                    yield self._tagged(name, batch)
            batches.clear()

    def _tagged(self, name: str, batch: pa.RecordBatch) -> pa.RecordBatch:
        fields = list(self.sides[name])
        # Spark delivers timestamps in the session's time zone, stored ones are in UTC.
        columns = [batch.column(f.name).cast(f.type) for f in fields]
        whole = pa.StructArray.from_arrays(columns, fields=fields)
        return pa.RecordBatch.from_arrays(
            [whole if f.name == OUTPUT_COLUMN + name else pa.nulls(batch.num_rows, f.type) for f in self.schema],
            schema=self.schema,
        )
