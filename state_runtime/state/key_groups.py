"""Which shard owns a key: hash → key group → shard, in SQL for Spark and in Python for all other code; pure.

The *key group* of a key is the top 15 bits of its hash, so there are 32768 of them. Shard s of P owns the groups g with
floor(g·P / 32768) = s. These are neighbours, so a shard owns one closed range of hashes, and the ranges of all shards
cover all hashes. Both forms are in this file because the state must be in the shard to which the SQL sends the rows.

Stored state is sorted by hash and independent of this, except for the parallelism that a snapshot was written with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from state_runtime.base.errors import check
from state_runtime.base.limits import KEY_GROUP_BITS, MAX_PARALLELISM

__all__ = [
    "first_hash_sql",
    "hash_range_of_shard",
    "key_hash_sql",
    "overlaps",
    "shard_of_hash",
    "shard_sql",
    "shards_of_hashes",
    "top_bits_sql",
]

_HASH_BITS = 64

# --- in SQL ------------------------------------------------------------------------------------------------------


def key_hash_sql(columns: Sequence[str]) -> str:
    """Return the SQL for the hash of a key: a signed 64-bit number. `state/keyhash.py` computes the same, unsigned.

    Args:
        columns: SQL expressions, used unchanged, in the operator's order.
    """
    return f"xxhash64({', '.join(columns)})"


def top_bits_sql(hash_sql: str, bits: int) -> str:
    """Return the SQL for the top `bits` bits of a hash, at least one, as a number from 0 on."""
    return f"shiftrightunsigned({hash_sql}, {_HASH_BITS - bits})"


def shard_sql(hash_sql: str, parallelism: int) -> str:
    """Return the SQL for the shard that owns a signed hash: `shard_of_hash` in SQL."""
    return f"CAST({top_bits_sql(hash_sql, KEY_GROUP_BITS)} * {parallelism} DIV {MAX_PARALLELISM} AS INT)"


def first_hash_sql(shard: str, parallelism: int) -> str:
    """Return the SQL for the lowest hash that a shard owns, signed as in Spark: the first of `hash_range_of_shard`.

    Args:
        shard: its number in SQL, a long.
    """
    first = f"({shard} * {MAX_PARALLELISM} + {parallelism - 1}) DIV {parallelism}"
    return f"shiftleft({first}, {_HASH_BITS - KEY_GROUP_BITS})"


# --- in Python ---------------------------------------------------------------------------------------------------


def shard_of_hash(key_hash: int, parallelism: int) -> int:
    """Return the shard that owns an unsigned hash: `shard_sql` in Python."""
    return _shard_of_group(key_hash >> (_HASH_BITS - KEY_GROUP_BITS), parallelism)


def shards_of_hashes(hashes: npt.NDArray[np.uint64], parallelism: int) -> npt.NDArray[np.int64]:
    """Return the shards that own many hashes: `shard_of_hash` of each."""
    groups = (hashes >> np.uint64(_HASH_BITS - KEY_GROUP_BITS)).astype(np.int64)
    shards: npt.NDArray[np.int64] = groups * parallelism // MAX_PARALLELISM
    return shards


def hash_range_of_shard(shard: int, parallelism: int) -> tuple[int, int]:
    """Return the closed range of unsigned key hashes that a shard owns."""
    first, end = _groups_of_shard(shard, parallelism)
    shift = _HASH_BITS - KEY_GROUP_BITS
    return first << shift, (end << shift) - 1


def overlaps(shard: int, parallelism: int, other_parallelism: int) -> Iterator[tuple[int, float]]:
    """Yield the shards of another parallelism that own a part of a shard's range, in order.

    Yields:
        Each with the share of its own key groups that belongs to the shard, above 0 and up to 1.
    """
    first, end = _groups_of_shard(shard, parallelism)
    for other in range(_shard_of_group(first, other_parallelism), _shard_of_group(end - 1, other_parallelism) + 1):
        other_first, other_end = _groups_of_shard(other, other_parallelism)
        yield other, (min(end, other_end) - max(first, other_first)) / (other_end - other_first)


def _shard_of_group(group: int, parallelism: int) -> int:
    return group * parallelism // MAX_PARALLELISM


def _groups_of_shard(shard: int, parallelism: int) -> tuple[int, int]:
    """Return the first key group that a shard owns, and the one after its last."""
    check(
        0 <= shard < parallelism <= MAX_PARALLELISM,
        f"there is no shard {shard} at parallelism {parallelism}: shards are counted from 0, and there are at most "
        f"{MAX_PARALLELISM}",
    )
    return -(-shard * MAX_PARALLELISM // parallelism), -(-(shard + 1) * MAX_PARALLELISM // parallelism)
