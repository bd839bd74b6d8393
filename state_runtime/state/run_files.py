"""The files of the Arrow backend's runs: one sorted batch each, as Arrow IPC, mapped into memory when it is read."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import xxhash

from state_runtime.state.pieces import RunData, due_order_of
from state_runtime.state.runs import RunFile
from state_runtime.state.sealed_files import open_new_private
from state_runtime.state.table import StateSchema, hashes_of

__all__ = ["encode_run", "is_unaltered", "read_run", "write_run"]

_DUE_ORDER = "due_order"  # only in local files: positions of the rows in order of `due`, see RunData


def write_run(path: Path, batch: pa.RecordBatch, schema: StateSchema, *, digest: bool) -> tuple[RunFile, RunData]:
    """Write a sorted batch, which is not empty, as a new file.

    Args:
        digest: compute the SHA-256 while writing: the file will be stored elsewhere, under its digest.
    """
    order = due_order_of(batch) if schema.time == "due" else None
    data = RunData(batch, order)
    if order is not None:
        batch = pa.RecordBatch.from_arrays([*batch.columns, order], schema=_stored_schema(schema))
    with open_new_private(path) as file:
        written = _HashedFile(file, digest)
        with pa.ipc.new_file(pa.PythonFile(written, "w"), batch.schema) as writer:
            writer.write_batch(batch)
    hashes = hashes_of(batch)
    described = RunFile(
        file=path.name,
        rows=batch.num_rows,
        bytes=written.bytes,
        digest=written.digest,
        low=int(hashes[0]),
        high=int(hashes[-1]),
        check=written.check,
    )
    return described, data


def encode_run(batch: pa.RecordBatch, schema: StateSchema) -> pa.Buffer:
    """Return the bytes of a run's file."""
    if schema.time == "due":
        batch = pa.RecordBatch.from_arrays([*batch.columns, due_order_of(batch)], schema=_stored_schema(schema))
    return _encoded(batch)


def _encoded(batch: pa.RecordBatch) -> pa.Buffer:
    # The size is counted first: a buffer that grows is copied each time.
    counted = pa.MockOutputStream()
    with pa.ipc.new_file(counted, batch.schema) as writer:
        writer.write_batch(batch)
    body = pa.allocate_buffer(counted.size())
    with pa.ipc.new_file(pa.FixedSizeBufferWriter(body), batch.schema) as writer:
        writer.write_batch(batch)
    return body


def read_run(source: pa.NativeFile | pa.Buffer, run: RunFile, schema: StateSchema) -> RunData:
    """Decode a run: the inverse of `encode_run`; the digest was compared before.

    Raises:
        ValueError, pyarrow.ArrowException: not such a file.
    """
    reader = pa.ipc.open_file(source)
    if reader.num_record_batches != 1:
        raise ValueError(f"{run.file} has {reader.num_record_batches} batches")
    batch = reader.get_batch(0)
    if not batch.schema.equals(_stored_schema(schema)) or batch.num_rows != run.rows:
        raise ValueError(f"{run.file} has other columns or rows")
    if schema.time != "due":
        return RunData(batch)
    return RunData(pa.RecordBatch.from_arrays(batch.columns[:-1], schema=schema.arrow), batch.columns[-1])


def is_unaltered(body: pa.Buffer, file: RunFile) -> bool:
    """Return whether these bytes are those that were written."""
    if file.check:
        return bool(xxhash.xxh3_128_hexdigest(body) == file.check)
    return hashlib.sha256(body).hexdigest() == file.digest


class _HashedFile:
    """A file that is written once, with the check values of its bytes: nothing is copied on the way."""

    def __init__(self, file: BinaryIO, digest: bool) -> None:
        self._file = file
        self._check = xxhash.xxh3_128()
        self._digest = hashlib.sha256() if digest else None
        self.bytes = 0
        self.closed = False

    def write(self, data: pa.Buffer | bytes) -> int:
        size = self._file.write(data)
        self._check.update(data)
        if self._digest is not None:
            self._digest.update(data)
        self.bytes += size
        return size

    def flush(self) -> None:
        """Do nothing: the owner of the file flushes it."""

    def close(self) -> None:
        """Only mark this object as closed: the owner of the file closes it."""
        self.closed = True

    @property
    def check(self) -> str:
        return self._check.hexdigest()

    @property
    def digest(self) -> str:
        return self._digest.hexdigest() if self._digest is not None else ""


def _stored_schema(schema: StateSchema) -> pa.Schema:
    """Return the columns of a local file."""
    return schema.arrow.append(pa.field(_DUE_ORDER, pa.int64())) if schema.time == "due" else schema.arrow
