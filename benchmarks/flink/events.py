"""NEXMark's events for both engines: one table of bids with plain columns, a row for every event.

Made of the files of `benchmarks.nexmark_data`. Flink 2.3 reads a struct of Parquet by a slow way that knows no times of the
kind that is written today, so the columns of a bid lie side by side here, null in other events but for the time, and both engines read
them so. Times are cut to the millisecond, which is what an event time of Flink has.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks import nexmark_data

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["COLUMNS", "READERS", "SCHEMA", "as_events", "flattened", "write_flat", "write_streams"]

COLUMNS = ("auction", "bidder", "price", "channel", "url", "date_time", "extra")
"""Of a bid."""
SCHEMA = (
    "event_type int, auction bigint, bidder bigint, price bigint, channel string, url string, date_time timestamp, "
    "extra string"
)


def write_flat(folder: Path, batches: int, rows: int, then: Sequence[int] = ()) -> list[Path]:
    """Write the events of :func:`nexmark_data.write_events` and return the files, in order."""
    files = nexmark_data.write_events(folder, batches, rows, then)
    for path in files:
        times = path.stat()
        table = flattened(pq.read_table(path))
        pq.write_table(table, path, row_group_size=(table.num_rows + 1) // 2, use_dictionary=_REPEATED)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return files


READERS = 2
"""As many files of Flink's, each in the order of time and read by one reader from its begin to its end."""


def write_streams(files: Sequence[Path], folder: Path) -> None:
    """Write the same events, row group by row group, to one file for each reader.

    Flink gives the files of a folder to its readers in whatever order the disk lists them, and rows that come after their time
    has gone are lost. Two long files, read side by side, are what two partitions of a log would be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        schema = pq.read_schema(files[0])
        writers = [
            stack.enter_context(pq.ParquetWriter(folder / f"{reader}.parquet", schema, use_dictionary=_REPEATED))
            for reader in range(READERS)
        ]
        for path in files:
            source = pq.ParquetFile(path)
            for group in range(source.num_row_groups):
                table = source.read_row_group(group)
                writers[group % READERS].write_table(table, row_group_size=max(1, table.num_rows))


_REPEATED = ["event_type", "auction", "bidder", "channel", "url", "extra"]
"""What is worth a dictionary. Not the times: Flink reads them only without."""


def flattened(events: pa.Table) -> pa.Table:
    """The events with the columns of a bid side by side."""
    person, auction, bid = (events[kind].combine_chunks() for kind in ("person", "auction", "bid"))
    columns = dict(zip(COLUMNS, bid.flatten(), strict=True))
    # As in nexmark-flink each event has a time, whatever it is.
    times = pc.coalesce(*(pc.struct_field(kind, "date_time") for kind in (bid, auction, person)))
    columns["date_time"] = times.cast(pa.timestamp("ms", "UTC"), safe=False)
    return pa.table({"event_type": events["event_type"], **columns})


def as_events(flat: DataFrame) -> DataFrame:
    """The same rows in the shape that our queries read; Spark's optimizer takes the struct away again."""
    return flat.selectExpr("event_type", f"struct({', '.join(COLUMNS)}) AS bid")
