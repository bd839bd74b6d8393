"""How the rows of a state become RocksDB's keys and values; pure and vectorised.

Keys, big-endian, so that a scan is in order:

    rows     2·state, key hash (8), length of the key (4), key, and in the entries layout: entry (8), entry columns
    by time  2·state + 1, due (8, sign bit flipped), and the row's key from its hash on; no value

Key and entry columns are rows of `RowCodec` in canonical form. Equal keys have equal bytes, so RocksDB itself separates
keys whose hashes collide, and no key's rows begin with another key. A value is a row of the time, if the state has one,
and the value columns. An entry of the index by time counts only if the row has the same time: an overwritten or removed
row leaves its entry behind, until the time has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from state_runtime.state.row_codec import (
    RowCodec,
    binary_of_bytes,
    join_binary,
    numbers_of_rows,
    pieces_of_rows,
)
from state_runtime.state.table import HASH_MAX, Hashes, Positions, StateSchema

__all__ = ["STATES_MAX", "StateCodec", "first_after"]

STATES_MAX = 1 << 14
"""States of one shard: a state's number takes 15 bits of a key, and the largest is never given."""

_PLACE_HASH, _PLACE_LENGTH, _PLACE_KEY = 2, 10, 14  # in a row's key
_PLACE_ROW = 10  # in an entry of the index by time
_SIGN = np.uint64(1 << 63)


class StateCodec:
    """How the rows of one state are stored: see the module's docstring.

    Args:
        number: of the state in its shard.
    """

    def __init__(self, schema: StateSchema, number: int) -> None:
        self.schema = schema
        self.row_prefix = (2 * number).to_bytes(2, "big")
        self.due_prefix = (2 * number + 1).to_bytes(2, "big")
        self._keys = RowCodec([f.type for f in schema.keys], canonical=True)
        self._entries = RowCodec([f.type for f in schema.entries or ()], canonical=True)
        times = [pa.int64()] if schema.time else []
        self.values = RowCodec([*times, *(f.type for f in schema.values)])

    def hash_prefixes(self, hashes: Hashes) -> pa.Array:
        """Return the prefixes of the rows of some hashes."""
        head = np.empty((len(hashes), _PLACE_LENGTH), dtype=np.uint8)
        head[:, :_PLACE_HASH] = np.frombuffer(self.row_prefix, dtype=np.uint8)
        head[:, _PLACE_HASH:] = _big_endian(hashes)
        return binary_of_bytes(head)

    def key_prefixes(self, hashes: Hashes, keys: Sequence[pa.Array]) -> pa.Array:
        """Return the prefixes of the rows of some keys, which rows of no other key have."""
        encoded = self._keys.encode(keys, len(hashes))
        lengths = np.array(encoded.buffers()[1]).view(np.int64) if len(hashes) else np.zeros(1, dtype=np.int64)
        head = np.diff(lengths[encoded.offset : encoded.offset + len(hashes) + 1]).astype(">u4")
        return join_binary(
            self.hash_prefixes(hashes), binary_of_bytes(head.view(np.uint8).reshape(len(hashes), 4)), encoded
        )

    def row_keys(
        self,
        hashes: Hashes,
        keys: Sequence[pa.Array],
        entries: Hashes | None = None,
        entry_columns: Sequence[pa.Array] = (),
    ) -> pa.Array:
        """Return the keys under which rows are stored."""
        prefixes = self.key_prefixes(hashes, keys)
        if entries is None:
            return prefixes
        encoded = self._entries.encode(entry_columns, len(hashes))
        return join_binary(prefixes, binary_of_bytes(_big_endian(entries)), encoded)

    def range_bounds(self, low: int, high: int) -> tuple[bytes, bytes]:
        """Return where the rows in a closed range of hashes begin and end."""
        end = self.row_prefix + (high + 1).to_bytes(8, "big") if high < HASH_MAX else first_after(self.row_prefix)
        return self.row_prefix + low.to_bytes(8, "big"), end

    def due_times(self, index: pa.Array) -> Positions:
        """Return the times of entries of the index by time."""
        return (numbers_of_rows(index, _PLACE_HASH, ">u8").astype(np.uint64) ^ _SIGN).view(np.int64)

    def row_keys_of(self, index: pa.Array) -> pa.Array:
        """Return the rows' keys in entries of the index by time."""
        rows = pieces_of_rows(index, _PLACE_ROW)
        return join_binary(_repeated(self.row_prefix, len(rows)), rows)

    def due_keys(self, due: Positions, row_keys: pa.Array) -> pa.Array:
        """Return the entries of the index by time for some rows."""
        times = binary_of_bytes(_big_endian(due.view(np.uint64) ^ _SIGN))
        return join_binary(_repeated(self.due_prefix, len(due)), times, pieces_of_rows(row_keys, _PLACE_HASH))

    def due_bound(self, through_ms: int) -> bytes:
        """Return where the entries of the index by time that are due by then end."""
        return first_after(self.due_prefix + (through_ms + (1 << 63)).to_bytes(8, "big"))

    def batch(self, rows: pa.Array, values: pa.Array) -> pa.RecordBatch:
        """Return stored rows as a batch, in the order given.

        Raises:
            ValueError: not rows of this state.
        """
        schema = self.schema
        hashes = numbers_of_rows(rows, _PLACE_HASH, ">u8").astype(np.uint64)
        lengths = numbers_of_rows(rows, _PLACE_LENGTH, ">u4").astype(np.int64)
        keys = self._keys.decode(pieces_of_rows(rows, _PLACE_KEY, lengths))
        columns = self.values.decode(values)
        entries, entry_columns = None, []
        if schema.entries is not None:
            entries = numbers_of_rows(rows, _PLACE_KEY + lengths, ">u8").astype(np.uint64)
            entry_columns = self._entries.decode(pieces_of_rows(rows, _PLACE_KEY + 8 + lengths))
        times = columns.pop(0) if schema.time else None
        return schema.batch(hashes, None, keys, columns, entries=entries, entry_columns=entry_columns, times=times)


def first_after(prefix: bytes) -> bytes:
    """Return the first key above every key with a prefix. It exists: no state has the largest number."""
    return (int.from_bytes(prefix, "big") + 1).to_bytes(len(prefix), "big")


def _big_endian(numbers: Hashes) -> Any:
    return numbers.astype(">u8").view(np.uint8).reshape(len(numbers), 8)


def _repeated(prefix: bytes, count: int) -> pa.Array:
    return binary_of_bytes(np.tile(np.frombuffer(prefix, dtype=np.uint8), (count, 1)))
