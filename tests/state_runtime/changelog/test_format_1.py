"""A job root that format 1 wrote (bytes of that version of the code, below golden/) is read, folded and gone on from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from model import (
    ALL_HASHES,
    ALL_KEYS,
    KEY_DDL,
    OPERATOR,
    SCHEMA,
    STATE,
    VALUE_DDL,
    Changes,
    CountingIds,
    FakeClock,
    Key,
    StateWriter,
    folded,
    key_columns,
    rows_of,
)

from state_runtime.base.actor import Actor
from state_runtime.base.errors import CorruptManifest, UnsupportedFormat
from state_runtime.base.settings import MaterializationMode
from state_runtime.pipeline.compatibility import reconcile
from state_runtime.reading.query import open_state
from state_runtime.snapshot import document
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.document import FORMAT_VERSION, encode_document
from state_runtime.snapshot.fencing import open_run
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, StateEntry
from state_runtime.snapshot.paths import manifest_path
from state_runtime.state.keyhash import hash_key
from state_runtime.store import open_store
from tests.stored import read_states

GOLDEN = Path(__file__).parents[1] / "golden" / "format-1"
EXPECTED: Changes = {
    **dict.fromkeys(ALL_KEYS[2:12], (1, "old")),
    ALL_KEYS[1]: (2, "new"),
    ALL_KEYS[20]: (3, "added"),
}
NOW = OperatorEntry(OPERATOR, "test", KEY_DDL, (StateEntry(STATE, "value", VALUE_DDL),), modes="update")


def real(key: Key) -> int:
    return hash_key(key_columns([key]))


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A copy below the job's name, so that a test may go on from it."""
    for file in GOLDEN.rglob("*"):
        if file.is_file():
            to = tmp_path / "golden" / file.relative_to(GOLDEN)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(file.read_bytes())
    return str(tmp_path)


def test_a_manifest_of_format_1_is_read_with_what_it_did_not_know_left_empty(store: str) -> None:
    manifest = Catalog(open_store(store), "golden").manifest(2)
    assert manifest.format_version == 1
    assert manifest.operators == (replace(NOW, modes=""),)
    assert manifest.time is None
    assert manifest.source is not None
    assert manifest.source.batch_id == 7


def test_the_state_of_format_1_is_read_folded_and_queried(store: str) -> None:
    """A base table, a segment on top, parts in objects of their own."""
    catalog = Catalog(open_store(store), "golden")
    manifest = catalog.manifest(2)
    (entry,) = reconcile(manifest, [NOW], snapshot_id=4)
    for by in (OPERATOR, entry):
        assert rows_of(read_states(catalog.root, manifest, by, {STATE: SCHEMA}, *ALL_HASHES)[STATE]) == EXPECTED
    modes: tuple[MaterializationMode, ...] = ("minor", "major")
    for mode in modes:
        tables = folded(catalog.root, manifest, mode)
        assert rows_of(read_states(catalog.root, tables, entry, {STATE: SCHEMA}, *ALL_HASHES)[STATE]) == EXPECTED
    assert open_state(store, "golden", STATE).read().num_rows == len(EXPECTED)
    assert open_state(store, "golden", STATE, snapshot=1).read().num_rows == 12


def test_a_job_of_format_1_goes_on_in_the_new_format(store: str, clock: FakeClock) -> None:
    """From its first snapshot on; an older version then says that it is too old, and changes nothing."""
    catalog = Catalog(open_store(store), "golden", clock)
    empty = Manifest(FORMAT_VERSION, "", 0, 0, "", "fencing", 0, 4)
    committer = open_run(catalog, catalog.job_info(), empty, actor=Actor(clock, CountingIds(9), "h", 1))
    assert (committer.last.snapshot_id, committer.last.format_version) == (3, FORMAT_VERSION)
    writer = StateWriter(root=catalog.root, hash_of=real, ids=CountingIds(10), manifest=committer.last)
    writer.epoch({ALL_KEYS[2]: None})
    found = rows_of(read_states(catalog.root, writer.manifest, OPERATOR, {STATE: SCHEMA}, *ALL_HASHES)[STATE])
    assert found == {key: row for key, row in EXPECTED.items() if key != ALL_KEYS[2]}


def test_an_older_reader_refuses_the_new_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the header alone."""
    body = encode_document("manifest", Manifest(FORMAT_VERSION, "u", 1, 1, "c", "checkpoint", 0, 4))
    monkeypatch.setattr(document, "FORMAT_WITH_SOURCES", 1)
    with pytest.raises(UnsupportedFormat, match=rf"has format {FORMAT_VERSION}.*reads up to 1"):
        Manifest.decode(body, "here")


def test_header_and_body_name_the_same_format(store: str) -> None:
    """Also where both can be read: one of them was written by somebody else."""
    data = (Path(store) / "golden" / manifest_path(2)).read_bytes()
    header, _, body = data.partition(b"\n")
    altered = json.dumps({**json.loads(header), "format": 2}).encode() + b"\n" + body
    with pytest.raises(CorruptManifest, match="names format 1 inside format 2"):
        Manifest.decode(altered, "here")
