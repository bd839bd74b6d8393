"""Batches that wait on the host's disk, in files without a name: a killed task leaves no file."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from state_runtime.base.ids import Ids
from state_runtime.state.sealed_files import make_private_folder, open_new_private

__all__ = ["mapped"]


def mapped(batch: pa.RecordBatch, folder: Path, ids: Ids) -> pa.RecordBatch:
    """Return the same batch, mapped from a file: none of it is in private memory.

    Raises:
        OSError: the disk is full or read-only, or the folder belongs to another user.
    """
    make_private_folder(folder)
    path = folder / f".spill-{ids.uid()}.arrow"
    try:
        with open_new_private(path) as file, pa.ipc.new_file(pa.PythonFile(file, "w"), batch.schema) as writer:
            writer.write_batch(batch)
        return pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
    finally:
        path.unlink(missing_ok=True)
