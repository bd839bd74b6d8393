"""Copies of rows in flight on a host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from model import CountingIds, DictStore, FakeClock

from state_runtime.changelog.inflight import RowsPart
from state_runtime.changelog.parts import PartEntry, encode_part, sha256
from state_runtime.changelog.rows import rows_batch
from state_runtime.task.host_rows import HostRows

PATH = "changelog/rows.seg"
ROWS = pa.RecordBatch.from_pydict({"n": list(range(9))})
BODY = encode_part(rows_batch(np.arange(9, dtype=np.uint64), np.arange(9, dtype=np.int64), ROWS), "none").to_pybytes()
PART = PartEntry("rows", "a", "", "", 0, len(BODY), sha256(BODY), 9, len(BODY), 0, 8)


def flipped(body: bytes) -> bytes:
    return bytes([*body[:-200], body[-200] ^ 0x40, *body[-199:]])


@pytest.mark.parametrize(
    "damage",
    [flipped, lambda body: body[:-1], lambda body: body + b"x", lambda _: b"", lambda _: None],
    ids=["flipped", "cut", "longer", "empty", "gone"],
)
def test_a_damaged_copy_of_rows_in_flight_is_passed_over(
    tmp_path: Path, damage: Callable[[bytes], bytes | None]
) -> None:
    """The store has the same rows: a host's disk never ends a job, and the store is not told to be damaged. What was read
    there is the host's copy from then on."""
    store = DictStore()
    store.put(PATH, BODY)
    HostRows(tmp_path, "e", lambda: store, FakeClock(), CountingIds(), keeps=True).keep(PART, BODY)
    (copy,) = tmp_path.iterdir()
    damaged = damage(copy.read_bytes())
    copy.unlink()
    if damaged is not None:
        copy.write_bytes(damaged)
    host = HostRows(tmp_path, "e", lambda: store, FakeClock(), CountingIds(), keeps=True)
    for read_bytes in (len(BODY), len(BODY)):  # the second time from the copy
        assert host.read(RowsPart(PATH, PART)).rows.equals(ROWS)
        assert host.bytes_read == read_bytes
