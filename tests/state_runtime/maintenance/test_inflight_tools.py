"""Rows in flight in every tool that meets a snapshot: they come along, are held as long as somebody names them, are looked
at, and are never lost silently."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from inflight_chains import steps_operators as operators
from inflight_root import BATCHES, InflightRoot, go_on, rows_in_flight
from inflight_world import World, results
from model import CountingIds, DictStore, FakeClock
from moved_job import WatchedStore, add_savepoint, into

from state_runtime.base.actor import Actor
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.settings import CheckpointSettings, JobSettings, MaterializationSettings
from state_runtime.changelog.parts import sha256
from state_runtime.changelog.reader import read_index, read_passes
from state_runtime.changelog.segment import build_segment
from state_runtime.driver.integrity import newest_intact
from state_runtime.maintenance.convert.into_savepoint import convert_savepoint
from state_runtime.maintenance.convert.snapshot import convert
from state_runtime.maintenance.copy.objects import copy_snapshot
from state_runtime.maintenance.delete.snapshots import delete_snapshots
from state_runtime.maintenance.gc.collect import apply_gc, plan_gc
from state_runtime.maintenance.move.execute import execute_move
from state_runtime.maintenance.move.plan import plan_move
from state_runtime.maintenance.verify.drill import drill
from state_runtime.maintenance.verify.report import VerifyReport, broken_chain
from state_runtime.maintenance.verify.roots import verify_root
from state_runtime.materialize import apply, materialize
from state_runtime.reading.inflight import ReadableInflight
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.job_info import StartedFrom
from state_runtime.snapshot.lineage import gone_back, taken_over
from state_runtime.snapshot.locate import OpenedSnapshot
from state_runtime.snapshot.manifest import Manifest, RowsLayout
from state_runtime.snapshot.savepoint_record import SavepointRecord
from state_runtime.store import Store, open_store
from tests.job_settings import job_settings
from tests.stored import read_states

Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> InflightRoot:
    """Read only. Of two operators some rows are in flight, read by several epochs; parts lie in segments and root them."""
    return rows_in_flight(tmp_path_factory.mktemp("job"), checkpoints=4, inline_bytes_max=1_500)


@pytest.fixture
def root(made: InflightRoot) -> DictStore:
    """A copy in memory."""
    store = DictStore()
    into(store, made.root)
    return store


def rows_of(root: Store, manifest: Manifest) -> Rows:
    batch = manifest.open_batch
    uids = [o.uid for o in batch.operators] if batch is not None else []
    return {uid: ReadableInflight.of(root, manifest, uid).to_arrow().to_pylist() for uid in uids}


def state_of(root: Store, manifest: Manifest) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for operator in operators():
        states = read_states(root, manifest, operator.uid, operator.state_schemas, 0, (1 << 64) - 1)
        found[operator.uid] = {name: sorted(map(str, b.to_pylist())) for name, b in states.items()}
    return found


def given(**changed: Any) -> dict[str, Any]:
    return {"clock": FakeClock(), "ids": CountingIds(prefix=7), **changed}


def clear(store: Store) -> None:
    for found in list(store.list_objects("")):
        store.delete(found.path)


def named_for_rows(manifest: Manifest) -> set[str]:
    """Segments that are held for rows."""
    return {s.path for s in manifest.open_batch.segments} if manifest.open_batch is not None else set()


def test_the_root_of_these_tests_has_what_they_are_about(made: InflightRoot, root: Store) -> None:
    """Rows of two operators, from several epochs, in parts of both kinds; some ranges of them are done with."""
    passes = read_passes(root, made.manifest)
    assert len({p.operator for p in passes}) > 1
    assert len({p.epoch for p in passes}) > 1
    assert {bool(part.part.path) for p in passes for part in p.parts} == {True, False}
    rows = rows_of(root, made.manifest)
    assert all(rows.values())
    assert sum(map(len, rows.values())) < sum(part.part.rows for p in passes for part in p.parts)


# --- they come along -------------------------------------------------------------------------------------------------


def test_a_copy_of_a_snapshot_has_its_rows_in_flight(made: InflightRoot, root: Store) -> None:
    """The source may go: a copy, and so a native savepoint, is complete by itself."""
    expected, target = rows_of(root, made.manifest), DictStore()
    copy_snapshot(root, made.manifest, target, rewrite=None, **given())
    add_savepoint(root, "held", made.manifest.snapshot_id)
    savepoint = DictStore()
    into(savepoint, root.child("savepoints/held"))
    clear(root)
    assert rows_of(target, made.manifest) == expected
    assert rows_of(savepoint, made.manifest) == expected


@pytest.mark.parametrize("mode", ["NO_CLAIM", "CLAIM"])
def test_a_job_that_is_started_from_the_snapshot_has_its_rows_in_flight(
    made: InflightRoot, root: Store, mode: Any
) -> None:
    """Under another uid: what the segments say of who wrote them still fits. So a fork too."""
    expected, target = rows_of(root, made.manifest), DictStore()
    source, info = made.manifest, Catalog.of_root(root).job_info()
    started = StartedFrom("there", "job", source.job_uid, source.snapshot_id, source.commit_id, mode)
    result = copy_snapshot(
        root, source, target, rewrite=lambda m: taken_over(m, started, replace(info, uid="other")), **given()
    )
    clear(root)
    assert result.manifest.job_uid == "other"
    assert rows_of(target, result.manifest) == expected


@pytest.mark.parametrize(("mode", "what"), [("copy", "root"), ("copy", "snapshot"), ("move", "root")])
def test_copies_and_moves_between_stores_bring_rows_in_flight(
    made: InflightRoot, root: DictStore, mode: Any, what: str
) -> None:
    """Of the whole root those of every snapshot."""
    source, target = (WatchedStore({}, lambda *_: None, name=name) for name in ("source", "target"))
    into(source, root)
    wanted = [made.manifest] if what == "snapshot" else [made.catalog.manifest(i) for i in made.catalog.snapshot_ids()]
    expected = {m.snapshot_id: rows_of(root, m) for m in wanted}
    snapshot_id = made.manifest.snapshot_id if what == "snapshot" else None
    clock = FakeClock(FakeClock().at_ms + 86_400_000)  # its run has been silent since then
    plan = plan_move(source, target, mode=mode, snapshot_id=snapshot_id, clock=clock)
    execute_move(source, target, plan, actor=Actor(clock, CountingIds(prefix=7), "here", 1), threads=1)
    clear(source)
    assert {m.snapshot_id: rows_of(target, m) for m in wanted} == expected
    assert sum(map(bool, expected.values())) >= len(wanted) - 1


def test_a_job_that_goes_back_has_the_rows_that_were_in_flight_then(made: InflightRoot, root: Store) -> None:
    """`--from-snapshot` and rollback: what follows the newest snapshot is an older one, with what was to be done then."""
    older = made.catalog.manifest(made.manifest.snapshot_id - 1)
    content = gone_back(older, made.manifest)
    assert rows_of(root, content) == rows_of(root, older) != rows_of(root, made.manifest)


# --- they are held, and go --------------------------------------------------------------------------------------------


def test_a_segment_with_rows_in_flight_is_held_as_long_as_a_snapshot_names_it(made: InflightRoot, root: Store) -> None:
    """Retention gives older snapshots up: what their rows lie in stays while the newest one names it, and goes after."""
    ids, expected = made.catalog.snapshot_ids(), rows_of(root, made.manifest)
    held = named_for_rows(made.manifest)
    only_older = set().union(*(named_for_rows(made.catalog.manifest(i)) for i in ids)) - held
    assert delete_snapshots(root, list(ids[:-1]), **given()).snapshot_ids == tuple(ids[:-1])
    left = {found.path for found in root.list_objects("")}
    assert rows_of(root, made.manifest) == expected
    assert held <= left
    gone = only_older - {s.path for s in made.manifest.segments}
    assert not gone & left


def test_a_fold_keeps_no_segment_in_the_log_and_drops_none_with_rows(made: InflightRoot, root: Store) -> None:
    """It folds what is state; the rows stay where they are, named by the open batch alone, and collection leaves them."""
    expected, states = rows_of(root, made.manifest), state_of(root, made.manifest)
    record = materialize(root, made.manifest, settings=JobSettings(), **given())
    folded = apply(made.manifest, record)
    assert folded.segments == ()
    assert folded.open_batch == made.manifest.open_batch
    following = replace(folded, snapshot_id=made.manifest.snapshot_id + 1, commit_id="following")
    root.create(f"snapshots/{following.snapshot_id:020d}/manifest.json", following.encode())
    clock = FakeClock()
    delete_snapshots(root, list(made.catalog.snapshot_ids()), clock=clock, ids=CountingIds(prefix=7))
    plan = plan_gc(root, clock=clock, min_age_s=0, unsafe_min_age=True)
    apply_gc(root, plan, clock=clock, ids=CountingIds(prefix=8), owner="me")
    assert rows_of(root, following) == expected
    assert state_of(root, following) == states
    assert verified(root).exit_code == 0


def test_a_collection_without_a_floor_takes_no_row(made: InflightRoot, root: Store) -> None:
    """Nothing of any snapshot is garbage, however old it is."""
    manifests = [made.catalog.manifest(i) for i in made.catalog.snapshot_ids()]
    expected = [rows_of(root, m) for m in manifests]
    clock = FakeClock()
    root.put("changelog/00000000000000000001/00000000000000000001-orphan.seg", b"x")
    apply_gc(
        root, plan_gc(root, clock=clock, min_age_s=0, unsafe_min_age=True), clock=clock, ids=CountingIds(), owner="me"
    )
    assert [rows_of(root, m) for m in manifests] == expected


def test_a_snapshot_of_nothing_but_rows_in_flight_is_not_empty(made: InflightRoot, root: DictStore) -> None:
    """After a cut copy the job may go back to it: there is something to go on with."""
    bare = replace(made.manifest, segments=(), layers=(), shards=None)
    for snapshot_id in made.catalog.snapshot_ids():
        root.delete(f"snapshots/{snapshot_id:020d}/manifest.json")
    cut = replace(made.manifest, snapshot_id=bare.snapshot_id + 1, commit_id="cut")
    gone = replace(cut.segments[0], path="changelog/gone.seg")
    cut = replace(cut, segments=(gone,))
    for manifest in (bare, cut):
        root.create(f"snapshots/{manifest.snapshot_id:020d}/manifest.json", manifest.encode())
    found = newest_intact(Catalog.of_root(root))
    assert found is not None
    assert found.snapshot_id == bare.snapshot_id


# --- they are looked at ----------------------------------------------------------------------------------------------


def verified(root: Store, level: Any = "full", **changed: Any) -> VerifyReport:
    return verify_root(root, level=level, threads=2, **given(**changed))


@pytest.mark.parametrize("level", ["structure", "sample", "full"])
def test_sound_rows_in_flight_are_found_sound(root: Store, level: Any) -> None:
    """At every level; and their parts are decoded at the last one."""
    report = verified(root, level)
    assert report.findings == ()
    assert report.complete


def parts_of(root: Store, manifest: Manifest) -> list[tuple[str, int, Any]]:
    return [(p.operator, p.epoch, part) for p in read_passes(root, manifest) for part in p.parts]


def test_a_damaged_part_is_named_by_operator_epoch_and_hash_range(made: InflightRoot, root: DictStore) -> None:
    """A byte of it, or all of it: whoever looks is told whose rows they are."""
    assert made.manifest.open_batch is not None
    for operator, epoch, part in parts_of(root, made.manifest):
        whole = root.objects[part.path]
        at = part.part.offset + part.part.length // 2
        root.objects[part.path] = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        report = verified(root, snapshot_ids=[made.manifest.snapshot_id])
        named = [f for f in report.findings if f.path == part.path and f.operator == operator]
        assert [(f.hash_low, f.hash_high) for f in named] == [(part.part.hash_low, part.part.hash_high)]
        assert f"epoch {epoch}" in named[0].detail
        assert verified(root, "structure").findings == ()
        del root.objects[part.path]
        report = verified(root, "structure", snapshot_ids=[made.manifest.snapshot_id])
        named = [f for f in report.findings if f.path == part.path]
        assert {f.kind for f in named} == {"missing"}
        text = " ".join(f.detail for f in named)
        if part.path == made.manifest.open_batch.listing:  # without it nobody knows more
            assert f"{operator} (since epoch" in text
        else:
            assert f"{operator!r}, epoch {epoch}, hashes {part.part.hash_low:016x}" in text
        root.objects[part.path] = whole


def named(name: str) -> Store:
    """An empty store of a name."""
    return WatchedStore({}, lambda *_: None, name=name)


def relisted(root: DictStore, manifest: Manifest, change: Callable[[Any], Any]) -> Manifest:
    """A following snapshot whose listing was written with other passes."""
    assert manifest.open_batch is not None
    entry = next(s for s in manifest.open_batch.segments if s.path == manifest.open_batch.listing)
    index = read_index(root, entry, manifest.job_uids)
    passes = tuple(
        replace(p, parts=tuple(part if part.segment else replace(part, segment=entry.path) for part in p.parts))
        for p in index.passes
    )
    body, index_bytes = build_segment(replace(index, parts=(), passes=change(passes)), [])
    path = "changelog/00000000000000000001/00000000000000000099-relisted.seg"
    root.put(path, body)
    listing = replace(
        entry, path=path, bytes=len(body), digest=sha256(body), index_bytes=index_bytes, rows=0, direct_bytes=0
    )
    batch = replace(manifest.open_batch, listing=path, segments=(*manifest.open_batch.segments, listing))
    following = replace(manifest, snapshot_id=manifest.snapshot_id + 1, commit_id="relisted", open_batch=batch)
    root.create(f"snapshots/{following.snapshot_id:020d}/manifest.json", following.encode())
    return following


def test_parts_with_other_columns_or_another_place_than_listed_are_named(made: InflightRoot, root: DictStore) -> None:
    """Every digest is right, and the listing leads elsewhere: only a look at both finds it."""
    other = RowsLayout(read_passes(root, made.manifest)[-1].layout.columns)
    first = read_passes(root, made.manifest)[0]

    def other_columns(passes: Any) -> Any:
        return (replace(passes[0], layout=other), *passes[1:])

    def other_place(passes: Any) -> Any:
        part = passes[0].parts[0]
        moved = replace(part, part=replace(part.part, offset=part.part.offset + 8))
        return (replace(passes[0], parts=(moved, *passes[0].parts[1:])), *passes[1:])

    for level, change, why in (("full", other_columns, "columns"), ("structure", other_place, "no such part")):
        store = DictStore()
        into(store, root)
        wrong = relisted(store, made.manifest, change)
        found = verified(store, level, snapshot_ids=[wrong.snapshot_id]).findings
        assert [(f.kind, f.operator) for f in found] == [("damaged", first.operator)]
        assert why in found[0].detail
        assert f"epoch {first.epoch}" in found[0].detail


def test_rows_of_a_snapshot_that_came_later_are_a_broken_chain(made: InflightRoot) -> None:
    """A manifest cannot name what was written after it."""
    batch = made.manifest.open_batch
    assert batch is not None
    late = replace(batch.segments[0], path="changelog/late.seg", snapshot_id=made.manifest.snapshot_id + 1)
    manifest = replace(made.manifest, open_batch=replace(batch, segments=(*batch.segments, late)))
    assert broken_chain(None, made.manifest) == []
    assert "newer than itself" in broken_chain(None, manifest)[0]


def test_a_drill_reads_the_rows_in_flight(made: InflightRoot, root: DictStore, tmp_path: Path) -> None:
    """A run would go on with them, so a snapshot that lacks some is not restorable."""
    into(open_store(str(tmp_path / "store")).child("job"), root)
    catalog = Catalog(open_store(str(tmp_path / "store")), "job")
    actor = Actor(FakeClock(), CountingIds(prefix=7), "host", 1)
    report = drill(catalog, made.manifest, tmp_path / "drill", backend="arrow", actor=actor)
    assert (report.problems, report.inflight_rows > 0) == ((), True)
    operator, epoch, part = next(p for p in parts_of(root, made.manifest) if p[2].part.path)
    catalog.root.delete(part.path)
    report = drill(catalog, made.manifest, tmp_path / "drill", backend="arrow", actor=actor)
    assert any(operator in p and f"epoch {epoch}" in p for p in report.problems)
    assert report.exit_code != 0


# --- conversion ------------------------------------------------------------------------------------------------------


def opened(root: Store, manifest: Manifest) -> OpenedSnapshot:
    return OpenedSnapshot(Catalog.of_root(root), Catalog.of_root(root).job_info(), manifest)


def test_the_canonical_format_has_no_place_for_rows_in_flight(made: InflightRoot, root: Store) -> None:
    """Refused before anything is written, with the way to a snapshot without; a savepoint of that format likewise."""
    assert replace(made.manifest, segments=()).snapshot_format == "incremental"
    target, before = DictStore(), {found.path for found in root.list_objects("")}
    with pytest.raises(InvalidConfiguration, match="--drain-inflight"):
        convert(opened(root, made.manifest), target, "canonical", **given())
    record = SavepointRecord("s", "u", "job", made.manifest.job_uid, "IN_PROGRESS", "user", 0, "h", 0)
    with pytest.raises(InvalidConfiguration, match="--drain-inflight"):
        convert_savepoint(root, made.manifest, target, record, lambda *_: None, FakeClock(), CountingIds())
    assert list(target.list_objects("")) == []
    assert {found.path for found in root.list_objects("")} == before


@pytest.mark.parametrize("to", ["incremental", "changelog"])
def test_other_formats_carry_them(made: InflightRoot, root: Store, to: Any) -> None:
    """The state is rewritten as the format asks; rows in flight come along as they are."""
    expected, states, target = rows_of(root, made.manifest), state_of(root, made.manifest), named("elsewhere")
    source = into(named("here"), root)
    result = convert(opened(source, made.manifest), target, to, **given())
    clear(source)
    assert rows_of(target, result.manifest) == expected
    assert state_of(target, result.manifest) == states
    assert (result.manifest.segments == ()) == (to == "incremental")
    assert verified(target).findings == ()


# --- and are processed -----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_goes_on_after_every_tool_had_its_turn(tmp_path: Path) -> None:
    """Materialized, collected, with no older snapshot, from a copy in another place, with another parallelism: what readers see
    is what an aligned run gives."""
    aligned = World(tmp_path / "aligned", random.Random(0), [list(b) for b in BATCHES])
    go_on(aligned, JobSettings(parallelism=2, local_dir=str(tmp_path / "a"), materialization=MaterializationSettings(by="dagster"), placement="off", checkpoint=CheckpointSettings(mode="aligned")))  # fmt: skip
    made = rows_in_flight(tmp_path / "job", checkpoints=4, inline_bytes_max=1_500)
    clock, ids = FakeClock(), CountingIds(prefix=9)
    copied = open_store(str(tmp_path / "elsewhere")).child("job")
    plan = plan_move(made.root, copied, mode="copy", snapshot_id=None, clock=clock)
    execute_move(made.root, copied, plan, actor=Actor(clock, ids, "here", 1), threads=1)
    materialize(copied, made.manifest, settings=JobSettings(), clock=clock, ids=ids)
    delete_snapshots(copied, list(made.catalog.snapshot_ids()[:-1]), clock=clock, ids=ids)
    (tmp_path / "job" / "store").rename(tmp_path / "before")
    (tmp_path / "elsewhere").rename(tmp_path / "job" / "store")
    go_on(made.world, job_settings(made.settings, parallelism=5, local_dir=str(tmp_path / "other")))
    assert results(made.world) == results(aligned)
