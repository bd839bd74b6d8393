"""A job root that format 2 wrote (bytes of that version of the code, below golden/) is read and gone on from.

It holds every kind of state, a base table, a delta, parts in objects of their own, a log of seen files, and a value state whose
columns changed: rows of snapshots 2 and 3 have the old ones.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import ALL_HASHES, CountingIds, FakeClock, examples

from state_runtime.base.actor import Actor
from state_runtime.base.errors import CorruptManifest, MissingFile
from state_runtime.reading.query import open_state
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.document import FORMAT_VERSION
from state_runtime.snapshot.fencing import open_run
from state_runtime.snapshot.manifest import Manifest, SchemaVersion
from state_runtime.snapshot.paths import manifest_path
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.table import StateSchema
from state_runtime.store import open_store
from tests.stored import read_source_log, read_states

GOLDEN = Path(__file__).parents[1] / "golden" / "format-2"
STARTED_MS = 1_700_000_000_000
KEYS = pa.schema([("name", pa.string())])
COUNT = StateSchema(KEYS, pa.schema([("n", pa.int64()), ("s", pa.string())]), None, "expires")
SCHEMAS = {
    "count": COUNT,
    "log": StateSchema(KEYS, pa.schema([("x", pa.string())]), pa.schema([])),
    "seen": StateSchema(KEYS, pa.schema([("v", pa.int64())]), pa.schema([("m", pa.int64())])),
    "$timers": StateSchema(KEYS, pa.schema([]), pa.schema([]), "due"),
}
# k01 and k04 were removed, k03 had expired; k06 to k11 are rows of the old columns.
COUNTS = {"k00": (100, "none"), "k02": (200, "two"), "k05": (500, None)} | {
    f"k{n:02d}": (n, "none") for n in range(6, 12)
}
LOGS = [("k00", "again"), *((f"k0{n}", f"k0{n}-{j}") for n in (1, 2) for j in (1, 2))]
SEEN = {2: 22, 3: 30}
TIMERS = [(f"k0{n}", STARTED_MS + 50_000 + n - 4) for n in (5, 6, 7)]


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A copy below the job's name, so that a test may go on from it."""
    shutil.copytree(GOLDEN, tmp_path / "golden")
    return str(tmp_path)


def rows(batch: pa.RecordBatch, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in batch.to_pylist()]


def check(states: dict[str, pa.RecordBatch]) -> None:
    """Every kind of state as it was."""
    assert {name: (n, s) for name, n, s in rows(states["count"], "key.name", "value.n", "value.s")} == COUNTS
    assert sorted(rows(states["log"], "key.name", "value.x")) == LOGS
    assert dict(rows(states["seen"], "entry.m", "value.v")) == SEEN
    assert sorted(rows(states["$timers"], "key.name", "due")) == TIMERS


def test_a_manifest_of_format_2_is_read_with_what_it_did_not_know_left_empty(store: str) -> None:
    manifest = Catalog(open_store(store), "golden").manifest(5)
    assert (manifest.format_version, manifest.epoch, manifest.shards) == (2, 0, None)
    assert [table.last_snapshot_id for layer in manifest.layers for table in layer.tables] == [0] * 6
    count = manifest.operators[0].state("count")
    assert count is not None
    assert count.history == (SchemaVersion(4, "`n` int", "", STARTED_MS + 3_000),)
    assert manifest.progress is not None
    assert (manifest.progress.input_rows, manifest.progress.epoch, manifest.progress.epochs) == (10, 0, 1)
    assert manifest.outputs[0].files[0].final == "a.parquet"
    assert len(manifest.versions["op"]) == 4 * 16


@pytest.mark.parametrize("parallelism", [1, 3, 7])
def test_every_state_of_format_2_is_read_with_any_parallelism(store: str, parallelism: int) -> None:
    """Old columns and their defaults, expired rows, removed rows, a cleared list."""
    catalog = Catalog(open_store(store), "golden")
    manifest = catalog.manifest(5)
    parts = [
        read_states(catalog.root, manifest, "op", SCHEMAS, *hash_range_of_shard(shard, parallelism))
        for shard in range(parallelism)
    ]
    check({s: pa.Table.from_batches([p[s] for p in parts]).combine_chunks().to_batches()[0] for s in SCHEMAS})


def test_format_2_is_queried(store: str) -> None:
    assert open_state(store, "golden", "count").read(key={"name": "k02"}).to_pylist()[0]["s"] == "two"
    assert open_state(store, "golden", "seen").read().num_rows == len(SEEN)
    assert open_state(store, "golden", "count", snapshot=2).read().num_rows == 12


def test_the_log_of_seen_files_goes_on(store: str) -> None:
    catalog = Catalog(open_store(store), "golden")
    lines = read_source_log(catalog.root, catalog.manifest(5), 0)
    assert [line[9:10] for line in lines] == ["a", "b", "c"]


def test_a_job_of_format_2_goes_on_in_the_new_format(store: str, clock: FakeClock) -> None:
    """The first snapshot of the next run has the same content; its number of epochs goes on from the ids."""
    catalog = Catalog(open_store(store), "golden", clock)
    empty = Manifest(FORMAT_VERSION, "", 0, 0, "", "fencing", 0, 4)
    committer = open_run(catalog, catalog.job_info(), empty, actor=Actor(clock, CountingIds(9), "h", 1))
    assert (committer.last.snapshot_id, committer.last.format_version) == (6, FORMAT_VERSION)
    check(read_states(catalog.root, catalog.manifest(6), "op", SCHEMAS, *ALL_HASHES))


@examples(60)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_flipped_bit_of_a_manifest_of_format_2_is_believed(at: int, bit: int) -> None:
    """Of its body; the header's own format is only covered by the digest since format 3."""
    data = bytearray((GOLDEN / manifest_path(5)).read_bytes())
    first = data.index(b"\n") + 1
    data[first + at % (len(data) - first)] ^= 1 << bit
    with pytest.raises(CorruptManifest):
        Manifest.decode(bytes(data), "here")


def test_a_file_of_format_2_that_is_missing_is_named(store: str) -> None:
    catalog = Catalog(open_store(store), "golden")
    manifest = catalog.manifest(5)
    gone = manifest.layers[0].tables[0].path
    (Path(store) / "golden" / gone).unlink()
    with pytest.raises(MissingFile, match=gone):
        read_states(catalog.root, manifest, "op", SCHEMAS, *ALL_HASHES)
