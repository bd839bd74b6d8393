"""Job roots that formats 3 and 4 wrote (bytes of those versions of the code, below golden/; `make_golden.py` made them) are read, by this
version and by a reader that was written from docs/format.md alone, and gone on from.

They hold every kind of state, a base table, deltas, parts in objects of their own, several epochs in one segment, a log of seen files, changed
columns, a dropped state, an operator that was given up, and files of shards; of format 4 also a boundary, a pin and another job's segment.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_golden import COUNT_2, LOG, SEEN, SPANS, STARTED_MS, TIMERS
from model import CountingIds, FakeClock, examples
from second_reader import Damaged, Root

from state_runtime.base.actor import Actor
from state_runtime.base.errors import CorruptManifest
from state_runtime.reading.query import open_state
from state_runtime.reading.references import references
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.document import FORMAT_VERSION
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.fencing import open_run
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import manifest_path
from state_runtime.snapshot.pins import read_pins
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.table import time_of_entry
from state_runtime.store import open_store
from tests.stored import read_source_log, read_states

GOLDEN = Path(__file__).parents[1] / "golden"
DOCUMENT = Path(__file__).parents[3] / "docs" / "format.md"
FORMATS = (3, 4)
SCHEMAS = {"count": COUNT_2, "log": LOG, "seen": SEEN, "$timers": TIMERS, "spans": SPANS}
DUE = STARTED_MS + 50_000
NEWEST = {3: 7, 4: 8}

Rows = dict[str, Any]


def expected(version: int) -> Rows:
    """k01 and k07 were removed, k04 was and has been since the columns changed, k03 has expired; the others keep what they had."""
    count = {
        **{f"k{n:02d}": (n, "none") for n in range(8, 12)},
        None: (-1, "none"),
        "k00": (100, "none"),
        "k02": (200, "two"),
        "k05": (500, None),
        "k06": (61, "none"),
    }
    if version >= 4:
        count["k08"] = (800, "of the parent")
    return {
        "count": count,
        "log": [("k00", "again"), *((f"k0{n}", f"k0{n}-{j}") for n in (1, 2) for j in (1, 2)), ("k03", "shown")],
        "seen": {("k00", 2): 22, ("k00", 3): 30},
        "$timers": [(f"k0{n}", DUE + n - 4) for n in (5, 6, 7)],
        "spans": {("k00", -60_000): (2.5, [], DUE + 1), ("k05", STARTED_MS): (None, None, None)},
    }


def by_this_version(root: Path, parallelism: int = 1) -> Rows:
    catalog = Catalog.of_root(open_store(str(root)))
    manifest = catalog.latest()
    assert manifest is not None
    found: dict[str, list[dict[str, Any]]] = {state: [] for state in SCHEMAS}
    for shard in range(parallelism):
        parts = read_states(catalog.root, manifest, "op", SCHEMAS, *hash_range_of_shard(shard, parallelism))
        for state, batch in parts.items():
            found[state] += batch.to_pylist()

    def place(row: dict[str, Any]) -> int:
        return int(time_of_entry(pa.array([row["entry"]], pa.uint64()).to_numpy())[0])

    return {
        "count": {r["key.name"]: (r["value.n"], r["value.s"]) for r in found["count"]},
        "log": sorted((r["key.name"], r["value.x"]) for r in found["log"]),
        "seen": {(r["key.name"], r["entry.m"]): r["value.v"] for r in found["seen"]},
        "$timers": sorted((r["key.name"], r["due"]) for r in found["$timers"]),
        "spans": {(r["key.name"], place(r)): (r["value.total"], r["value.tags"], r["due"]) for r in found["spans"]},
    }


def by_the_second(root: Path) -> Rows:
    second = Root(root)
    manifest = second.newest()
    found = {state: second.state(manifest, "op", state) for state in SCHEMAS}

    def place(row: dict[str, Any]) -> int:
        return int(row["entry"] ^ (1 << 63)) - (0 if row["entry"] >> 63 else 1 << 64)

    return {
        "count": {r["key"]["name"]: (r["value"]["n"], r["value"]["s"]) for r in found["count"]},
        "log": sorted((r["key"]["name"], r["value"]["x"]) for r in found["log"]),
        "seen": {(r["key"]["name"], r["entry_key"]["m"]): r["value"]["v"] for r in found["seen"]},
        "$timers": sorted((r["key"]["name"], r["time"]) for r in found["$timers"]),
        "spans": {
            (r["key"]["name"], place(r)): (r["value"]["total"], r["value"]["tags"], r["time"]) for r in found["spans"]
        },
    }


@pytest.mark.parametrize("version", FORMATS)
def test_the_root_is_of_its_format(version: int) -> None:
    """A golden root that newer code wrote would show nothing."""
    manifests = sorted((GOLDEN / f"format-{version}" / "on" / "snapshots").rglob("manifest.json"))
    assert manifests
    assert all(f'"format": {version},'.encode() in m.read_bytes() for m in manifests)


@pytest.mark.parametrize("parallelism", [1, 3, 7])
@pytest.mark.parametrize("version", FORMATS)
def test_every_state_is_read_with_any_parallelism(version: int, parallelism: int) -> None:
    assert by_this_version(GOLDEN / f"format-{version}" / "on", parallelism) == expected(version)


@pytest.mark.parametrize("version", FORMATS)
def test_a_reader_written_from_the_document_reads_the_same(version: int) -> None:
    """What the document does not say, it cannot know."""
    assert by_the_second(GOLDEN / f"format-{version}" / "on") == expected(version)


@pytest.mark.parametrize("version", FORMATS)
def test_the_log_of_seen_files_is_whole_and_in_order(version: int) -> None:
    root = GOLDEN / f"format-{version}" / "on"
    catalog = Catalog.of_root(open_store(str(root)))
    manifest = catalog.latest()
    assert manifest is not None
    lines = read_source_log(catalog.root, manifest, 0)
    assert [line[20:21] for line in lines] == [
        str(n) for n in ((0, 1, 2, 3, 4, 5) if version < 4 else (0, 1, 2, 3, 4, 6, 5))
    ]
    second = Root(root)
    assert second.seen_files(second.newest(), 0) == lines


COUNTS = {f"key-{n:03d}": (4, 3, 2, 2, 2)[n] if n < 5 else 1 for n in range(60)}


@pytest.mark.parametrize("name", ["off", "off-rocksdb"])
@pytest.mark.parametrize("version", FORMATS)
def test_files_of_shards_are_read(version: int, name: str) -> None:
    shutil_root = GOLDEN / f"format-{version}"
    table = open_state(str(shutil_root), name, "aggregate").read()
    (value,) = [column for column in table.column_names if column != "k"]
    assert {row["k"]: row[value] for row in table.to_pylist()} == COUNTS


@pytest.mark.parametrize("version", FORMATS)
def test_a_reader_written_from_the_document_reads_files_of_shards(version: int) -> None:
    second = Root(GOLDEN / f"format-{version}" / "off")
    manifest = second.newest()
    rows = second.state(manifest, "counts", "aggregate")
    assert {row["key"]["k"]: next(iter(row["value"].values())) for row in rows} == COUNTS


@pytest.mark.parametrize("name", ["on", "off", "off-rocksdb"])
@pytest.mark.parametrize("version", FORMATS)
def test_everything_that_a_snapshot_needs_is_there(version: int, name: str) -> None:
    """What copies, deletion and verification go by."""
    root = open_store(str(GOLDEN / f"format-{version}" / name))
    catalog = Catalog.of_root(root)
    manifest = catalog.latest()
    assert manifest is not None
    found = list(references(root, manifest))
    assert {r.kind for r in found} >= (
        {"segment", "direct", "table", "source-log"} if name == "on" else {"listing", "shard-file"}
    )
    assert all(root.size(r.path) == r.bytes for r in found if r.bytes > 0)


def test_the_boundary_and_the_pin_of_format_4_are_read() -> None:
    root = open_store(str(GOLDEN / "format-4" / "on"))
    boundary = read_boundary(root)
    assert (boundary.sequence, boundary.snapshot_id, boundary.kept) == (2, 4, (3,))
    assert Catalog.of_root(root).snapshot_ids() == [3, 5, 6, 7, 8] == Root(GOLDEN / "format-4" / "on").snapshot_ids()
    (pin,) = read_pins(root)
    assert (pin.snapshot_id, pin.reason, pin.note) == (5, "user", "kept")


@pytest.mark.parametrize("version", FORMATS)
def test_a_job_goes_on_in_the_newest_format(version: int, tmp_path: Path, clock: FakeClock) -> None:
    """The first snapshot of the next run has the same content."""
    shutil.copytree(GOLDEN / f"format-{version}" / "on", tmp_path / "renamed")
    catalog = Catalog.of_root(open_store(str(tmp_path / "renamed")), clock)
    empty = Manifest(FORMAT_VERSION, "", 0, 0, "", "fencing", 0, 4)
    committer = open_run(catalog, catalog.job_info(), empty, actor=Actor(clock, CountingIds(9), "h", 1))
    assert (committer.last.snapshot_id, committer.last.format_version) == (NEWEST[version] + 1, FORMAT_VERSION)
    assert committer.term.term == 2
    assert by_this_version(tmp_path / "renamed") == expected(version) == by_the_second(tmp_path / "renamed")


@pytest.mark.parametrize("version", FORMATS)
@examples(60)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_flipped_bit_of_a_manifest_is_believed(version: int, at: int, bit: int) -> None:
    """By neither reader, wherever it is: since format 3 the digest covers kind and format too."""
    whole = (GOLDEN / f"format-{version}" / "on" / manifest_path(NEWEST[version])).read_bytes()
    first = whole.index(b"\n") + 1
    data = bytearray(whole)
    data[first + at % (len(data) - first)] ^= 1 << bit
    with pytest.raises(CorruptManifest):
        Manifest.decode(bytes(data), "here")
    with pytest.raises((Damaged, ValueError)):
        Root(GOLDEN).document("manifest", "here", bytes(data))


@pytest.mark.parametrize("version", [1, 2])
def test_a_reader_written_from_the_document_reads_the_older_formats_too(version: int) -> None:
    """By what the document says that they do not have."""
    root = GOLDEN / f"format-{version}"
    second = Root(root)
    manifest = second.newest()
    (operator,) = manifest["operators"]
    ours = open_state(str(GOLDEN), root.name, "count").read()
    names = [n for n in ours.column_names if n not in ("expires",)]
    theirs = second.state(manifest, operator["uid"], "count")
    shown = [{**r["key"], **r["value"]} for r in theirs]
    # As text: NaN is a key too.
    assert sorted(repr([row[n] for n in names]) for row in shown) == sorted(
        repr([row[n] for n in names]) for row in ours.to_pylist()
    )


def test_the_document_names_every_kind_and_the_newest_format() -> None:
    """Part by part it grows with the code."""
    text = DOCUMENT.read_text()
    assert f"Format version {FORMAT_VERSION};" in text
    source = "\n".join(p.read_text() for p in (Path(__file__).parents[3] / "state_runtime").rglob("*.py"))
    kinds = set(re.findall(r"(?:encode|decode)_document\(\s*\"([a-z-]+)\"", source))
    assert kinds >= {"manifest", "boundary", "pin", "shard-files"}
    assert not [kind for kind in kinds if f"`{kind}`" not in text]
