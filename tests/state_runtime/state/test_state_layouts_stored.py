"""Every layout of state through log, tables and queries: what is read back is what a plain fold of the changes gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_reader import MemoryReader, canonical
from model import (
    ALL_HASHES,
    KEY_DDL,
    OPERATOR,
    CountingIds,
    DictStore,
    HashOf,
    Key,
    colliding,
    examples,
    folded,
    key_columns,
    spread,
)
from shapes import KEYS, SHAPES, Change, batch_of_change, changes_of, plain

from state_runtime.base.errors import CorruptManifest, CorruptSegment, InvalidConfiguration, InvalidData
from state_runtime.reading.query import StateView, open_state
from state_runtime.snapshot.commit import JobInfo
from state_runtime.snapshot.document import FORMAT_VERSION, encode_document
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, StateEntry, TimeEntry
from state_runtime.snapshot.paths import JOB_FILE, manifest_path
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.keyhash import hash_key
from state_runtime.state.table import (
    StateSchema,
    slice_hash_range,
)
from tests.stored import read_states, write_segment, write_task_changes

JOB = "job"
KINDS = {"value": "value", "map": "map", "list": "list", "timers": "timers", "rows": "rows"}
shapes = st.sampled_from(sorted(SHAPES))


def entry_of_shape(shape: str) -> StateEntry:
    """How a manifest describes a state of this shape."""
    schema = SHAPES[shape]
    values = "`n` bigint, `s` string" if len(schema.values) else ""
    names = "`name` string" if schema.entries is not None and len(schema.entries) else ""
    return StateEntry(shape, KINDS[shape.split("-")[0]], values, names, schema.time)  # type: ignore[arg-type]


class Log:
    """Plays driver and tasks: each epoch is a segment, folds are layers, everything lies below one job root."""

    def __init__(self, states: Sequence[StateEntry], parallelism: int = 3) -> None:
        self.store = DictStore()
        self.root = self.store.child(JOB)
        self.ids = CountingIds()
        self.parallelism = parallelism
        self.manifest = Manifest(
            FORMAT_VERSION, "uid", 0, 1, "", "checkpoint", 0, parallelism, (OperatorEntry(OPERATOR, "test", KEY_DDL, tuple(states)),)
        )  # fmt: skip
        self.root.put(JOB_FILE, encode_document("job", JobInfo("uid", JOB, 32768, FORMAT_VERSION, 0)))

    def epoch(self, changes: dict[str, pa.RecordBatch], now_ms: int = 0) -> Manifest:
        tasks = []
        for shard in range(self.parallelism):
            low, high = hash_range_of_shard(shard, self.parallelism)
            cut = {state: slice_hash_range(batch, low, high) for state, batch in changes.items()}
            tasks.append(
                write_task_changes(
                    self.root, term=1, operator=OPERATOR, hash_range=(low, high), changes=cut, inline_bytes_max=1 << 20, ids=self.ids
                )
            )  # fmt: skip
        snapshot_id = self.manifest.snapshot_id + 1
        segment = write_segment(self.root, tasks, job_uid="uid", term=1, snapshot_id=snapshot_id, ids=self.ids)
        segments = (*self.manifest.segments, *([segment] if segment is not None else []))
        self.manifest = replace(
            self.manifest, snapshot_id=snapshot_id, segments=segments, time=TimeEntry(now_ms, max(now_ms, 0))
        )
        return self.manifest

    def fold(self, how: str) -> None:
        """ "major", or "minor" on top of the layers; nothing if there is nothing to fold."""
        if how and self.manifest.segments:
            self.manifest = folded(self.root, self.manifest, "major" if how == "major" else "minor")

    def describe(self, entry: OperatorEntry) -> None:
        """The operator's entry from the next snapshot on."""
        self.manifest = replace(self.manifest, operators=(entry,))

    def read(self, schemas: dict[str, StateSchema], bounds: tuple[int, int] = ALL_HASHES) -> dict[str, pa.RecordBatch]:
        return read_states(self.root, self.manifest, OPERATOR, schemas, *bounds)

    def view(self, state: str) -> StateView:
        self.root.put(manifest_path(self.manifest.snapshot_id), self.manifest.encode())
        return open_state(self.store, JOB, state, snapshot=self.manifest.snapshot_id)


def real(key: Key) -> int:
    return hash_key(key_columns([key]))


steps = shapes.flatmap(
    lambda shape: st.tuples(
        st.just(shape),
        st.lists(st.tuples(changes_of(shape), st.sampled_from(["", "minor", "major"])), min_size=1, max_size=6),
    )
)


@given(
    steps, st.sampled_from([spread, colliding, real]), st.sampled_from([1, 3]), st.lists(st.integers(0, 4), max_size=6)
)
@examples(120)
def test_any_layout_read_back_from_log_and_tables_is_the_plain_fold(
    written: tuple[str, list[tuple[Change, str]]], hash_of: HashOf, parallelism: int, ticks: list[int]
) -> None:
    """Tombstones, clear markers and expiry, over any sequence of folds, for shards of any parallelism."""
    shape, epochs = written
    log = Log([entry_of_shape(shape)], parallelism)
    batches: list[pa.RecordBatch] = []
    now_ms = 0
    for number, (change, how) in enumerate(epochs):
        now_ms += ticks[number] if number < len(ticks) else 0
        batch = batch_of_change(shape, change, hash_of)
        log.epoch({shape: batch}, now_ms)
        batches.insert(0, batch)
        model = MemoryReader(SHAPES, {shape: batches}, now_ms)
        is_folded = bool(log.manifest.segments)
        log.fold(how)
        # Without new segments there is nothing to fold, and the layers stay as they are.
        if how == "major" and is_folded and len(log.manifest.layers) == 1:
            live = sum(t.rows for t in log.manifest.layers[0].tables)
            assert live == len(model.rows(shape)), "a base holds nothing that nobody can see"
    expected = model.rows(shape)
    found = log.read({shape: SHAPES[shape]})[shape]
    assert plain(found.to_pylist()) == plain(expected)
    order = [(row["key_hash"], row.get("entry", 0)) for row in found.to_pylist()]
    assert order == sorted(order)
    parts = [log.read({shape: SHAPES[shape]}, hash_range_of_shard(s, 4))[shape].to_pylist() for s in range(4)]
    assert plain([row for part in parts for row in part]) == plain(expected)


def shown(shape: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a query shows of the model's rows, without positions."""
    names = {f"key.{f.name}": f.name for f in SHAPES[shape].keys}
    names |= {f"value.{f.name}": f.name for f in SHAPES[shape].values}
    if SHAPES[shape].entries is not None and len(SHAPES[shape].entries or ()):
        names |= {"key.name": "key.name", "entry.name": "entry.name"}
    names |= {"expires": "expires", "due": "due"}
    return [{names[n]: v for n, v in row.items() if n in names} for row in rows]


def as_rows(table: pa.Table) -> list[dict[str, Any]]:
    for name in {"expires", "due"} & set(table.column_names):
        at = table.column_names.index(name)
        table = table.set_column(at, name, table.column(name).cast(pa.int64()))
    return table.to_pylist()  # type: ignore[no-any-return]


@given(steps, st.sampled_from(["", "minor", "major"]), st.integers(0, 5))
@examples(60)
def test_queries_of_any_layout_show_the_live_rows(
    written: tuple[str, list[tuple[Change, str]]], last: str, now_ms: int
) -> None:
    """The whole state, and each key by itself, whether it lies in the log or in tables."""
    shape, epochs = written
    log = Log([entry_of_shape(shape)])
    batches: list[pa.RecordBatch] = []
    for change, how in epochs:
        batches.insert(0, batch_of_change(shape, change, real))
        log.epoch({shape: batches[0]}, now_ms)
        log.fold(how)
    log.fold(last)
    expected = shown(shape, MemoryReader(SHAPES, {shape: batches}, now_ms).rows(shape))
    view = log.view(shape)
    found = as_rows(view.read())
    if shape.startswith("list"):
        places: dict[Any, list[int]] = {}
        for row in found:
            places.setdefault(canonical((row["name"], row["score"])), []).append(row.pop("position"))
        assert all(place == list(range(len(place))) for place in places.values()), "elements are numbered in order"
    assert plain(found) == plain(expected)
    name = "key.name" if "entry.name" in view.columns else "name"
    for key in KEYS:
        one = as_rows(view.read(key={"name": key[0], "score": key_columns([key])[1][0]}))
        mine = [r for r in expected if (r[name], canonical(r["score"])) == canonical(key)]
        assert plain([{n: v for n, v in row.items() if n != "position"} for row in one]) == plain(mine)


def test_a_list_with_colliding_keys_is_shown_key_by_key_in_order() -> None:
    """Two keys of one hash interleave in what is stored; positions count within a key."""
    log = Log([entry_of_shape("list")], 1)
    one, other = KEYS[0], KEYS[1]
    rows = {(key, place): (place, "", None) for place in range(1, 7) for key in (one if place % 2 else other,)}
    log.epoch({"list": batch_of_change("list", Change(rows=rows), lambda key: 7)})
    found = log.view("list").read().to_pylist()
    assert [(r["name"] == one[0] and r["score"] == one[1], r["position"], r["n"]) for r in found] in (
        [(True, 0, 1), (True, 1, 3), (True, 2, 5), (False, 0, 2), (False, 1, 4), (False, 2, 6)],
        [(False, 0, 2), (False, 1, 4), (False, 2, 6), (True, 0, 1), (True, 1, 3), (True, 2, 5)],
    )


def test_one_entry_of_a_map_is_found_by_key_and_map_key() -> None:
    log = Log([entry_of_shape("map"), entry_of_shape("value")])
    rows = {(key, name): (len(name), "x", None) for key in KEYS[:3] for name in ("a", "abc")}
    log.epoch({"map": batch_of_change("map", Change(rows=rows), real)})
    view = log.view("map")
    assert view.columns == ("key.name", "score", "entry.name", "n", "s")
    key = {"name": KEYS[0][0], "score": key_columns(KEYS[:1])[1][0]}
    assert [r["n"] for r in view.read(key=key, entry=view.parse_entry(["name=abc"])).to_pylist()] == [3]
    assert [r["n"] for r in view.read(entry={"name": "a"}).to_pylist()] == [1, 1, 1]
    assert view.read(key=key, entry={"name": "b"}).num_rows == 0
    with pytest.raises(InvalidConfiguration, match="is no map"):
        log.view("value").read(entry={"name": "a"})
    with pytest.raises(InvalidConfiguration, match="the map key lacks name"):
        view.read(entry={})
    with pytest.raises(InvalidConfiguration, match="no map key column 'x'"):
        view.parse_entry(["x=1"])


def test_a_cleared_key_needs_no_older_files() -> None:
    """A clear marker ends the search for a key, as a row ends it in the value layout."""
    log = Log([entry_of_shape("list")], 1)
    key = KEYS[0]
    log.epoch({"list": batch_of_change("list", Change(rows={(key, 1): (1, "", None)}), real)})
    log.epoch({"list": batch_of_change("list", Change(frozenset([key]), {(key, 2): (2, "", None)}), real)})
    view = log.view("list")
    del log.root.objects[f"{JOB}/{log.manifest.segments[0].path}"]
    found = view.read(key={"name": key[0], "score": key_columns([key])[1][0]}).to_pylist()
    assert [row["n"] for row in found] == [2]


def test_timers_are_shown_as_times_and_expired_rows_not_at_all() -> None:
    log = Log([entry_of_shape("timers"), entry_of_shape("value-expires")])
    log.epoch(
        {
            "timers": batch_of_change("timers", Change(rows={(KEYS[0], 11): (None, None, 11)}), real),
            "value-expires": batch_of_change(
                "value-expires", Change(rows={(KEYS[0], None): (1, "", 5), (KEYS[1], None): (2, "", 6), (KEYS[2], None): (3, "", None)}), real
            ),
        },
        now_ms=5,
    )  # fmt: skip
    timers = log.view("timers").read()
    assert timers.schema.field("due").type == pa.timestamp("ms", "UTC")
    assert timers.column("due").cast(pa.int64()).to_pylist() == [11]
    for fold in ("", "minor", "major"):
        log.fold(fold)
        assert sorted(log.view("value-expires").read().column("n").to_pylist()) == [2, 3]
        found = log.read({"timers": SHAPES["timers"], "value-expires": SHAPES["value-expires"]})
        assert sorted(found["value-expires"].column("value.n").to_pylist()) == [2, 3]
    assert [t.rows for t in log.manifest.layers[0].tables if t.state == "value-expires"] == [2]


def test_struct_keys_are_found_by_their_fields() -> None:
    """From Python as a dictionary, on the command line as JSON."""
    at = pa.struct([("x", pa.int32()), ("tag", pa.string())])
    keys = pa.array([{"x": 1, "tag": "a"}, {"x": 1, "tag": None}, {"x": 2, "tag": "a"}], at)
    hashes = np.array([hash_key([keys.slice(i, 1)]) for i in range(3)], dtype=np.uint64)
    order = np.argsort(hashes)
    schema = StateSchema(pa.schema([("at", at)]), pa.schema([("n", pa.int32())]))
    batch = schema.batch(
        hashes[order], None, [keys.take(pa.array(order))], [pa.array(np.arange(3)[order].tolist(), pa.int32())]
    )
    log = Log([])
    log.describe(
        OperatorEntry(OPERATOR, "test", "`at` struct<x:int,tag:string>", (StateEntry("s", "value", "`n` int"),))
    )
    log.epoch({"s": batch})
    for how in ("", "major"):
        log.fold(how)
        view = log.view("s")
        for number, key in enumerate(keys.to_pylist()):
            assert view.read(key={"at": key}).column("n").to_pylist() == [number]
        assert view.read(key=view.parse_key(['at={"x": 1, "tag": null}'])).column("n").to_pylist() == [1]
    for wrong in ('{"x": 1, "tog": "a"}', "{", '{"x": "y"}', "5", "[" * 100_000):
        with pytest.raises(InvalidData, match="JSON"):
            view.parse_key([f"at={wrong}"])


# --- what is not believed ----------------------------------------------------------------------------------------


def hostile(batch: pa.RecordBatch, declared: StateEntry) -> Log:
    log = Log([declared])
    log.epoch({declared.name: batch})
    return log


def test_stored_columns_of_another_layout_are_corrupt() -> None:
    """Whichever way they differ from the manifest: in reading, folding and queries."""
    for stored, declared in (
        ("value", "list"),
        ("list", "value"),
        ("map", "list"),
        ("value", "value-expires"),
        ("value-due", "value-expires"),
        ("list-expires", "list"),
        ("timers", "list"),
    ):
        part = {"list": 1, "map": "a", "timers": 3}.get(stored.split("-")[0])
        batch = batch_of_change(stored, Change(rows={(KEYS[0], part): (1, "x", 3)}), real)
        log = hostile(batch, replace(entry_of_shape(declared), name=declared))
        for attempt in (
            lambda: log.read({declared: SHAPES[declared]}),  # noqa: B023 - called in this round
            lambda: log.fold("major"),  # noqa: B023
            lambda: log.view(declared).read(),  # noqa: B023
        ):
            with pytest.raises(CorruptSegment, match="columns"):
                attempt()


def test_unsorted_entries_are_corrupt() -> None:
    """Look-ups search by halves; what is out of order would be missed in silence."""
    batch = batch_of_change("list", Change(rows={(KEYS[0], 1): (1, "", None), (KEYS[0], 2): (2, "", None)}), real)
    log = hostile(batch.take(pa.array([1, 0])), entry_of_shape("list"))
    with pytest.raises(CorruptSegment, match="not sorted"):
        log.read({"list": SHAPES["list"]})


def test_a_description_that_cannot_be_is_a_damaged_manifest() -> None:
    """Since, versions, times and names are checked before anything is read by them."""
    from state_runtime.snapshot.manifest import SchemaVersion

    good = entry_of_shape("value")
    older = SchemaVersion(5, "`n` int")
    for states in (
        (good, good),
        (replace(good, history=(older, older)),),
        (replace(good, history=(older, replace(older, until=3))),),
        (replace(good, since=5, history=(older,)),),
        (replace(entry_of_shape("timers"), time=""),),
        (replace(entry_of_shape("list"), time="due"),),
    ):
        body = replace(Log(states).manifest, snapshot_id=1).encode()
        with pytest.raises(CorruptManifest, match="operator 'op'"):
            Manifest.decode(body, "here")
