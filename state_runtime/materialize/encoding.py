"""The encoding of state tables: fast to read for columns whose values all have one width.

Numbers are stored byte by byte (Parquet's BYTE_STREAM_SPLIT: all first bytes of a page, then all second bytes, …),
because the high bytes of a column's values are nearly all alike. LZ4 then packs them as well as ZSTD packs whole
values, and is read four times as fast. Everything else, mainly texts, is stored unchanged and packed by ZSTD. Every
file names its encodings, so readers need not know this. Source: Apache Parquet format, Encodings.md, "Byte Stream
Split".
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["encode_table"]

_ROW_GROUP_ROWS = 131_072  # a shard of a higher parallelism reads few row groups too many
_SPLIT = {"INT32", "INT64", "FLOAT", "DOUBLE"}  # Parquet's physical types


def encode_table(batch: pa.RecordBatch) -> pa.Buffer:
    """Encode a state table as the bytes of a Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.Table.from_batches([batch]),
        sink,
        row_group_size=_ROW_GROUP_ROWS,
        write_page_checksum=True,
        use_dictionary=False,
        **_options(batch.schema),
    )
    return sink.getvalue()


def _options(schema: pa.Schema) -> dict[str, Any]:
    """Return the codec of each leaf, and the leaves that are split."""
    # An empty file shows the names of the leaves of nested columns, and how each type is stored.
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    stored = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    leaves = [(stored.column(n).path, stored.column(n).physical_type) for n in range(len(stored))]
    # A column "a.b" and a field b of a column a have one name, and options go by name.
    count = Counter(path for path, _ in leaves)
    split = [path for path, kind in leaves if kind in _SPLIT and count[path] == 1]
    codec = {path: "zstd" for path, _ in leaves} | dict.fromkeys(split, "lz4")
    return {"compression": codec, "use_byte_stream_split": split}
