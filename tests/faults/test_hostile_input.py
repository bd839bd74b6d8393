"""Input that nobody of ours wrote: bombs, odd JSON, names that meet; and a bucket that forgets nothing."""

from __future__ import annotations

import hashlib
import json
import os
import random
import tracemalloc
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from local_job import LocalJob
from model import OPERATOR, CountingIds, DictStore, FakeClock, empty_manifest
from test_restore import changes

from state_runtime.base.actor import Actor
from state_runtime.base.errors import CorruptData, CorruptManifest, CorruptSegment
from state_runtime.base.limits import MANIFEST_BYTES_MAX, MIB
from state_runtime.changelog.parts import PartEntry, decode_part, sha256
from state_runtime.changelog.reader import read_table
from state_runtime.snapshot import fencing
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.document import FORMAT_VERSION
from state_runtime.snapshot.manifest import Manifest, TableEntry
from state_runtime.snapshot.paths import manifest_path
from state_runtime.snapshot.term_files import claim_term
from state_runtime.state.table import StateSchema
from state_runtime.store import Created, open_store
from tests.s3_server import CountingServer


def manifest_of(body: bytes) -> bytes:
    """A manifest with a right digest around any body: what somebody writes who knows the format."""
    covered = f"manifest {FORMAT_VERSION}\n".encode()
    digest = hashlib.sha256(covered + body).hexdigest()
    header = {"stillstate": "manifest", "format": FORMAT_VERSION, "sha256": digest, "bytes": len(body)}
    return json.dumps(header).encode() + b"\n" + body + b"\n"


GOOD = json.loads(empty_manifest().encode().partition(b"\n")[2])
ENTRY = '{"path":"changelog/a","bytes":1,"digest":"","index_bytes":1,"snapshot_id":1,"rows":1,"direct_bytes":0}'


def good(**changed: Any) -> bytes:
    return json.dumps({**GOOD, "format_version": FORMAT_VERSION, **changed}).encode()


def test_a_manifest_of_a_hundred_megabytes_is_not_taken_into_memory(tmp_path: Path) -> None:
    """The bound holds where it is read; nothing is parsed."""
    store = open_store(str(tmp_path))
    fencing.open_job_root(store, "job", clock=FakeClock(), ids=CountingIds())
    store.put(manifest_path(1), b"x")
    os.truncate(tmp_path / manifest_path(1), 100 * MIB)
    tracemalloc.start()
    with pytest.raises(CorruptData, match="larger than"):
        Catalog.of_root(store).latest()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * MANIFEST_BYTES_MAX


@pytest.mark.parametrize(
    "body",
    [
        good(segments=[json.loads(ENTRY)] * 70_000),
        good(versions={f"{n:x}": "" for n in range(600_000)}),
        good(abandoned=[[n, n] for n in range(400_000)]),
    ],
    ids=["segments", "versions", "abandoned"],
)
def test_as_many_entries_as_a_manifest_can_hold_are_parsed_in_bounded_memory(body: bytes) -> None:
    """The bound on bytes is the bound on entries; what they become in memory is a small multiple of it."""
    data = manifest_of(body)
    assert len(data) <= MANIFEST_BYTES_MAX
    tracemalloc.start()
    Manifest.decode(data, "m")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 * MANIFEST_BYTES_MAX


@pytest.mark.parametrize(
    "body",
    [
        good().replace(b'"snapshot_id": 0', b'"snapshot_id": ' + b"9" * 5_000),
        good().replace(b'"snapshot_id": 0', b'"snapshot_id": 1e400'),
        good().replace(b'"snapshot_id": 0', b'"snapshot_id": NaN'),
        good().replace(b'"segments": []', b'"segments": ' + b"[" * 1_000_000),
        good().replace(b'"versions": {}', b'"versions": ' + b'{"a":' * 1_000_000),
        b"\xef\xbb\xbf" + good(),
        good().replace(b'"job-1"', b'"\xff\xfe"'),
        good().replace(b'"job-1"', b'"\\ud800"'),
        good() + b"{}",
        good(format_version=FORMAT_VERSION - 1),
    ],
    ids=["huge", "infinite", "nan", "nested lists", "nested objects", "bom", "not utf-8", "surrogate", "two", "format"],
)
def test_odd_json_is_a_typed_error(body: bytes) -> None:
    with pytest.raises(CorruptManifest, match="where"):
        Manifest.decode(manifest_of(body), "where")


def test_fields_that_nobody_knows_and_fields_that_come_twice_change_nothing_else() -> None:
    """A field more says nothing to this version (what must not be passed over raises the format's number); of two the last counts."""
    more = good(surprise={"path": "../../etc"}).replace(b'"snapshot_id": 0', b'"snapshot_id": 5, "snapshot_id": 0')
    assert Manifest.decode(manifest_of(more), "m") == Manifest.decode(manifest_of(good()), "m")


def test_a_table_that_says_it_is_a_billion_rows_is_refused_before_it_is_decompressed(tmp_path: Path) -> None:
    """A few kilobytes of Parquet can decode to gigabytes; the manifest says how many rows there are."""
    rows = 20_000_000
    zeros = pa.DictionaryArray.from_arrays(pa.array(bytes(rows), pa.int8()), pa.array([0], pa.int64()))
    pq.write_table(pa.table({"key_hash": zeros}), tmp_path / "bomb", compression="zstd", row_group_size=rows)
    data = (tmp_path / "bomb").read_bytes()
    assert len(data) < 128 * 1024
    store = DictStore({"bomb": data})
    entry = TableEntry("bomb", len(data), sha256(data), 3, OPERATOR, "count", 0, 9)
    before = pa.total_allocated_bytes()
    with pytest.raises(CorruptSegment, match=r"20,000,000 rows .* where the manifest says 3 rows"):
        read_table(store, entry)
    assert pa.total_allocated_bytes() - before < 8 * MIB


def test_no_two_generated_names_meet_on_any_store(tmp_path: Path) -> None:
    """Some file systems do not tell letters by case, some normalise Unicode: what we name ourselves is lower-case ASCII."""
    rng = random.Random(0)
    job = LocalJob(tmp_path, ("value", "map"))
    for _ in range(3):
        job.epoch(changes(rng, job))
    names = [p.relative_to(tmp_path / "store").as_posix() for p in (tmp_path / "store").rglob("*")]
    assert names
    assert all(name.isascii() for name in names)
    assert len({unicodedata.normalize("NFKC", name).casefold() for name in names}) == len(set(names))


def test_terms_may_skip_numbers() -> None:
    """Whoever dies between its claim and its first commit leaves a number that is never used; nothing counts on there being none."""
    store, clock, ids = DictStore(), FakeClock(), CountingIds()
    catalog = Catalog(store, "job", clock)
    info = fencing.open_job_root(catalog.root, "job", clock=clock, ids=ids)
    for _ in range(3):
        claim_term(catalog.root, actor=Actor(clock, ids, "h", 1))
    committer = fencing.open_run(catalog, info, empty_manifest(info.uid), actor=Actor(clock, ids, "h", 2))
    assert (committer.last.term, committer.last.snapshot_id) == (4, 1)


@pytest.fixture(scope="module")
def versioned() -> Iterator[CountingServer]:
    """A bucket that keeps every version of every object, and answers deletes with markers."""
    with CountingServer() as server:
        client = boto3.client(
            "s3",
            endpoint_url=server.options["endpoint_url"],
            aws_access_key_id="key",
            aws_secret_access_key=server.options["secret"],
            region_name="us-east-1",
        )
        client.put_bucket_versioning(Bucket=server.bucket, VersioningConfiguration={"Status": "Enabled"})
        yield server


def test_in_a_versioned_bucket_a_deleted_object_is_gone_for_us(versioned: CountingServer) -> None:
    """A delete leaves a marker: the object is not listed, not read, and its name is free; deleting it again ends too."""
    store = open_store("s3://lake/versioned", versioned.options)
    store.create("a/b", b"one")
    store.delete("a/b")
    assert store.list_names("a") == []
    assert list(store.list_objects("")) == []
    assert not store.exists("a/b")
    store.delete("a/b")
    assert store.create("a/b", b"two") is Created.MINE
    assert store.create("a/b", b"three") is Created.LOST
    assert [(o.path, o.bytes) for o in store.list_objects("")] == [("a/b", 3)]


@pytest.mark.parametrize("name", ["key.zz", "value.zz", "inner-zz"])
def test_a_name_that_is_no_text_is_damage_and_says_where(name: str) -> None:
    """Arrow hands the bytes of a name over as they are; the first look at it, anywhere, would raise its own error."""
    batch = pa.RecordBatch.from_pydict(
        {
            "hash": pa.array([1], pa.uint64()),
            "deleted": pa.array([False]),
            "key.zz": pa.array([1], pa.int64()),
            "value.zz": pa.array([1], pa.int64()),
            "value.s": pa.array([{"inner-zz": [1]}], pa.struct([("inner-zz", pa.list_(pa.int64()))])),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    body = sink.getvalue().to_pybytes()
    damaged = body.replace(name.encode(), name[:-2].encode() + b"\xff\xfe")
    assert damaged != body
    part = PartEntry("state", "op", "s", "", 0, len(damaged), sha256(damaged), 1, batch.nbytes, 0, (1 << 64) - 1)
    with pytest.raises(CorruptSegment, match=r"changelog/a\.seg.*cannot be decoded"):
        decode_part(damaged, part, "changelog/a.seg")
    with pytest.raises(CorruptSegment, match="no text"):
        StateSchema.of(pa.ipc.open_stream(damaged).schema)
