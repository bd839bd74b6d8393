"""A job root with rows in flight as format 5 wrote it (bytes of that version, below golden/) is read, by this version and by a
reader that was written from docs/format.md alone; an earlier format cannot say what it says."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from inflight_root import BATCHES
from model import CountingIds, FakeClock
from second_reader import Damaged, Root

from state_runtime.base.errors import CorruptManifest
from state_runtime.maintenance.verify.roots import verify_root
from state_runtime.reading.inflight import ReadableInflight
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest
from state_runtime.state.keyhash import hash_key
from state_runtime.store import open_store
from tests.fuzz.targets import enveloped

GOLDEN = Path(__file__).parents[1] / "golden" / "format-5" / "inflight"


def newest() -> Manifest:
    manifest = Catalog.of_root(open_store(str(GOLDEN))).latest()
    assert manifest is not None
    return manifest


def ours(manifest: Manifest) -> list[Any]:
    root = open_store(str(GOLDEN))
    found: list[Any] = []
    for operator in manifest.open_batch.operators if manifest.open_batch is not None else ():
        for row in ReadableInflight.of(root, manifest, operator.uid).to_arrow().to_pylist():
            own = {name: row.pop(name) for name in ("_operator", "_epoch", "_key_hash", "_place")}
            found.append((own["_operator"], own["_epoch"], int(own["_key_hash"]), own["_place"], row))
    return sorted(found, key=lambda f: f[:4])


def theirs(manifest: Any) -> list[Any]:
    rows = Root(GOLDEN).rows_in_flight(manifest)
    return sorted(((r["operator"], r["epoch"], r["hash"], r["place"], r["row"]) for r in rows), key=lambda f: f[:4])


def test_both_readers_find_the_same_rows_in_flight_in_every_snapshot() -> None:
    """The document says enough to read them without a line of ours."""
    catalog, second = Catalog.of_root(open_store(str(GOLDEN))), Root(GOLDEN)
    assert second.snapshot_ids() == catalog.snapshot_ids()
    counts = []
    for snapshot_id in catalog.snapshot_ids():
        found = ours(catalog.manifest(snapshot_id))
        assert theirs(second.manifest(snapshot_id)) == found
        counts.append(len(found))
    assert counts[-1] > 0
    assert len(set(counts)) > 2


def test_rows_of_the_first_operator_are_those_of_the_input() -> None:
    """Each as it was read, at its place, with the hash of its key; none twice."""
    rows = [row for row in ours(newest()) if row[0] == "steps"]
    assert rows
    assert len({row[3] for row in rows}) == len(rows)
    for _, _, key_hash, place, row in rows:
        at: datetime = row["at"]
        assert (row["k"], row["g"], row["n"], int(at.timestamp() * 1000)) == BATCHES[0][place]
        assert key_hash == hash_key_of(row["k"])


def hash_key_of(key: str) -> int:
    return int(hash_key([pa.array([key], pa.string())]))


def test_the_golden_root_is_sound() -> None:
    """Every part of it is looked at."""
    report = verify_root(open_store(str(GOLDEN)), level="full", clock=FakeClock(), ids=CountingIds())
    assert report.findings == ()
    assert report.snapshots == (1, 2, 3, 4, 5)


def test_a_manifest_with_an_open_batch_is_of_format_5_and_of_none_before() -> None:
    """An earlier reader must refuse it: it would pass over the rows."""
    manifest = newest()
    assert manifest.format_version == 5
    fields = json.loads(manifest.encode().split(b"\n")[1])
    fields["format_version"] = 4
    with pytest.raises(CorruptManifest, match="format 4 does not have"):
        Manifest.decode(enveloped("manifest", json.dumps(fields).encode(), 4), "here")


def test_the_second_reader_refuses_rows_that_are_not_listed_as_they_lie(tmp_path: Path) -> None:
    """It checks what it says it checks."""
    second = Root(GOLDEN)
    manifest = second.manifest(second.snapshot_ids()[-1])
    manifest["open_batch"]["operators"] = manifest["open_batch"]["operators"][:1]
    with pytest.raises(Damaged, match="operators"):
        second.rows_in_flight(manifest)
