"""Opening RocksDB's databases: options, errors, and how data is written to the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    DbClosedError,
    DBCompressionType,
    Options,
    Rdict,
    WriteOptions,
)

from state_runtime.state.backend import LocalCopyUnusable

__all__ = ["block_cache", "database", "open_read_only", "reading", "settle", "unlogged", "writing"]

_BLOCK_CACHE_BYTES = 32 << 20
_BLOOM_BITS = 10
_MARKS = "marks"  # a column family, see `settle`


def open_read_only(folder: Path) -> Rdict:
    """Open a version's database for reading; closed when its last reader is gone. Raises LocalCopyUnusable."""
    # Not kept open for the next epoch: every change of a shard makes another version, so only an unchanged one would be
    # opened again. And the next task may run in another process, whose `prune` cannot close databases of this one:
    # removed tables would continue to use disk that is not counted.
    with reading(folder):
        return Rdict(str(folder), _options(), access_type=AccessType.read_only())


def settle(db: Rdict) -> None:
    """Write the memory out, and wait for the compaction under way.

    Closing a database cancels its compactions, so a compaction that takes longer than an epoch would never end. A
    manual compaction is exclusive: it begins when those under way have ended, and none begins before it. A manual
    compaction of a family that holds one key does nothing else.
    """
    db.flush()
    marks = db.get_column_family(_MARKS)
    marks.put(b"settled", b"", unlogged())
    marks.flush()
    marks.compact_range(None, None)


@lru_cache(maxsize=1)
def block_cache(process_id: int) -> Cache:
    """Return the cache of the blocks that all databases of a process have read.

    RocksDB identifies a block by the identity that its table got when it was written, which a hard link keeps: blocks
    that one version has read are cached for the next one. A block's checksum is compared when it comes from the disk.

    Args:
        process_id: of the caller: a forked process does not use its parent's cache, which may stay locked.
    """
    return Cache(_BLOCK_CACHE_BYTES)


def _options(runs_max: int = 4) -> Options:
    """Return options for raw mode: bytes only. Without it, rocksdict would load pickles."""
    options = Options(raw_mode=True)
    blocks = BlockBasedOptions()
    blocks.set_bloom_filter(_BLOOM_BITS, False)
    blocks.set_block_cache(block_cache(os.getpid()))
    options.set_block_based_table_factory(blocks)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_level_zero_file_num_compaction_trigger(max(2, runs_max))
    options.set_keep_log_file_num(1)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    return options


def unlogged() -> WriteOptions:
    """Return options without a write-ahead log: an unfinished version is thrown away."""
    options = WriteOptions()
    options.disable_wal = True  # type: ignore[assignment, method-assign]  # a property; rocksdict's stub says method
    return options


@contextmanager
def database(folder: Path, runs_max: int) -> Iterator[Rdict]:
    families = {"default": _options(runs_max), _MARKS: _options(2)}
    db = Rdict(str(folder), _options(runs_max), column_families=families)
    try:
        yield db
    finally:
        db.close()


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Raise RocksDB's errors, and errors of inconsistent data, as LocalCopyUnusable."""
    try:
        yield
    except Exception as error:
        if not _is_of_the_database(error) and not isinstance(error, ValueError | pa.ArrowException):
            raise
        raise LocalCopyUnusable(f"{folder}: {error}") from error


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise RocksDB's errors, and errors of a base that cannot be read, as OSError."""
    try:
        yield
    except Exception as error:
        if not _is_of_the_database(error) and not isinstance(error, LocalCopyUnusable):
            raise
        raise OSError(f"{folder}: {error}") from error


def _is_of_the_database(error: Exception) -> bool:
    # rocksdict raises RocksDB's errors as plain exceptions.
    return type(error) is Exception or isinstance(error, DbClosedError)
