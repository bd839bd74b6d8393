"""Changed pipelines over stored state: what fits is read as if it had always been so, what does not is refused first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import ALL_HASHES, ALL_KEYS, KEY_DDL, OPERATOR, Key, canonical_key, colliding, examples, key_columns, spread
from test_state_layouts_stored import Log

from state_runtime.base.errors import CorruptManifest, CorruptSegment, InvalidPipeline, StillstateError
from state_runtime.pipeline.compatibility import reconcile, usable_versions
from state_runtime.snapshot.document import FORMAT_VERSION
from state_runtime.snapshot.manifest import (
    DUE_WHEN_REMOVED,
    Manifest,
    OperatorEntry,
    SchemaVersion,
    SegmentEntry,
    StateEntry,
    TimeEntry,
)
from state_runtime.state.ddl import parse_ddl
from state_runtime.state.table import StateSchema, hashes_of, slice_hash_range
from tests.stored import read_states

KEYS = ALL_KEYS[:10]


def segment(snapshot_id: int) -> SegmentEntry:
    return SegmentEntry("changelog/x", 1, "d", 1, snapshot_id, 1)


def before_of(*operators: OperatorEntry, snapshot_id: int = 10) -> Manifest:
    """A snapshot whose oldest rows are of snapshot 3."""
    return Manifest(
        FORMAT_VERSION, "uid", snapshot_id, 1, "", "checkpoint", 0, 4, operators, (segment(3), segment(9)), time=TimeEntry(77)
    )  # fmt: skip


def operator_of(*states: StateEntry, **other: Any) -> OperatorEntry:
    return OperatorEntry(
        **{"uid": "op", "kind": "stateful-processor", "key_schema": KEY_DDL, "states": states, **other}
    )


def value_state(schema: str, **other: Any) -> StateEntry:
    return StateEntry(**{"name": "s", "kind": "value", "schema": schema, **other})


def evolved(old: StateEntry, new: StateEntry, **options: Any) -> StateEntry:
    (entry,) = reconcile(before_of(operator_of(old)), [operator_of(new)], snapshot_id=12, **options)
    return entry.states[0]


# --- what may change ---------------------------------------------------------------------------------------------


def test_the_first_run_takes_the_pipeline_as_it_is() -> None:
    now = operator_of(value_state("`n` int"))
    assert reconcile(None, [now], snapshot_id=1) == (now,)


def test_an_unchanged_pipeline_leaves_its_descriptions_as_they_are() -> None:
    """History, since and what was dropped stay as long as something older is stored."""
    state = value_state("`n` bigint", since=2, history=(SchemaVersion(5, "`n` int"),))
    old = operator_of(state, dropped={"gone": 7}, since=1, next_due_ms=5, modes="none,append")
    now = operator_of(value_state("`n` bigint"), modes="none,append")
    assert reconcile(before_of(old), [now], snapshot_id=12) == (old,)


def test_what_describes_nothing_stored_is_forgotten() -> None:
    """Manifests do not grow with the changes of years: the oldest rows are of snapshot 3."""
    old = operator_of(value_state("`n` bigint", history=(SchemaVersion(3, "`n` int"),)), dropped={"gone": 3})
    (entry,) = reconcile(before_of(old), [operator_of(value_state("`n` bigint"))], snapshot_id=12)
    assert entry.dropped == {}
    assert entry.states[0].history == ()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("`n` int", "`n` int, `s` string"),
        ("`n` int", "`n` int, `s` string DEFAULT 'none'"),
        ("`n` int, `s` string", "`n` int"),
        ("`n` int, `s` string", "`s` string, `n` int"),
        ("`n` tinyint, `f` float", "`n` bigint, `f` double"),
        ("`n` int", "`m` int"),
        ("`x` struct<a:int>", "`x` struct<a:bigint,b:string>"),
        ("`x` struct<a:int,b:string>", "`x` struct<a:int>"),
        ("`x` array<int>", "`x` array<bigint>"),
        ("`x` map<string,float>", "`x` map<string,double>"),
        ("`x` decimal(5,2)", "`x` decimal(10,3)"),
        ("`x` interval day to second, `n` int", "`n` int, `x` interval day to second"),
    ],
)
def test_added_dropped_reordered_and_widened_columns_fit(old: str, new: str) -> None:
    """The old columns are kept in the description until no row has them."""
    state = evolved(value_state(old), value_state(new))
    assert state == value_state(new, history=(SchemaVersion(12, old, "", 77),))


def test_ttl_may_be_switched_on_and_off() -> None:
    on = evolved(value_state("`n` int"), value_state("`n` int", time="expires"))
    assert on.history == (SchemaVersion(12, "`n` int", "", 77),)
    off = evolved(value_state("`n` int", time="expires"), value_state("`n` int"))
    assert off.history == (SchemaVersion(12, "`n` int", "expires", 77),)


def test_new_operators_and_states_start_at_their_first_snapshot() -> None:
    old = operator_of(value_state("`n` int"))
    extra = replace(value_state("`n` int"), name="t")
    entries = reconcile(before_of(old), [operator_of(extra, *old.states), replace(old, uid="b")], snapshot_id=12)
    assert [(e.uid, e.since) for e in entries] == [("op", 0), ("b", 12)]
    assert [(s.name, s.since) for s in entries[0].states] == [("t", 12), ("s", 0)]


@pytest.mark.parametrize("options", [{"allow_dropped_state": True}, {"dropped_by_processor": {"op": ["s"]}}], ids=str)
def test_a_state_is_given_up_only_if_that_is_said(options: dict[str, Any]) -> None:
    old = operator_of(value_state("`n` int"), replace(value_state("`n` int"), name="t"))
    now = operator_of(old.states[1])
    with pytest.raises(InvalidPipeline, match=r"operator 'op', state 's': snapshot 10 holds it.*deleteIfExists"):
        reconcile(before_of(old), [now], snapshot_id=12)
    with pytest.raises(InvalidPipeline, match="state 's'"):
        reconcile(before_of(old), [now], {"other": ["s"]}, snapshot_id=12)
    (entry,) = reconcile(before_of(old), [now], snapshot_id=12, **options)
    assert entry.dropped == {"s": 12}
    assert [s.name for s in entry.states] == ["t"]


def test_an_operator_is_given_up_only_if_that_is_said() -> None:
    old = operator_of(value_state("`n` int"))
    with pytest.raises(InvalidPipeline, match=r"operator 'op', which the pipeline no longer has.*allow_dropped_state"):
        reconcile(before_of(old), [replace(old, uid="b")], snapshot_id=12)
    (entry,) = reconcile(before_of(old), [replace(old, uid="b")], snapshot_id=12, allow_dropped_state=True)
    assert entry == replace(old, uid="b", since=12)


def test_a_state_that_its_processor_deletes_and_declares_starts_empty() -> None:
    state = evolved(value_state("`n` int"), value_state("`n` string"), dropped_by_processor={"op": {"s"}})
    assert state == value_state("`n` string", since=12)


# --- what may not ------------------------------------------------------------------------------------------------

NEXT = {"type": "Set the type back", "name": "another name", "uid": "new uid"}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("`n` bigint", "`n` int", r"column 'n' is int now, and bigint in snapshot 10.*Set the type back"),
        ("`n` int", "`n` string", r"column 'n' is string now, and int"),
        ("`n` double", "`n` float", r"column 'n' is float now, and double"),
        ("`n` int", "`n` double", r"column 'n' is double now, and int"),
        ("`x` struct<a:bigint>", "`x` struct<a:int>", r"struct<a:int> now, and struct<a:bigint>"),
        ("`x` map<int,int>", "`x` map<bigint,int>", r"column 'x' is map<bigint,int> now"),
        ("`x` decimal(10,2)", "`x` decimal(10,3)", r"decimal\(10,3\) now, and decimal\(10,2\)"),
        ("`x` interval year", "`x` interval day", r"interval day now, and interval year"),
        ("`n` int", "`N` int", r"'N' is spelled 'n' in snapshot 10"),
        ("`n` int", "`n` int, `v` variant", r"'v' of type variant cannot be added.*state of its own"),
    ],
)
def test_other_changes_of_columns_are_refused_with_both_types(old: str, new: str, says: str) -> None:
    with pytest.raises(InvalidPipeline, match=rf"operator 'op', state 's': .*{says}"):
        evolved(value_state(old), value_state(new))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ({"kind": "value"}, {"kind": "list"}, r"a list state now, and a value state in snapshot 10 .*VARIABLE_TYPE_CHANGE"),
        ({"kind": "map", "entry_schema": "`k` int"}, {"kind": "map", "entry_schema": "`k` bigint"}, "map key"),
        ({"kind": "map", "entry_schema": "`k` int"}, {"kind": "map", "entry_schema": "`j` int"}, "map key"),
        ({"kind": "rows", "time": "due"}, {"kind": "rows", "time": "expires"}, "the time 'expires' now, and 'due'"),
        ({"kind": "rows", "time": ""}, {"kind": "rows", "time": "due"}, "the time 'due' now, and 'none'"),
    ],
)  # fmt: skip
def test_another_kind_map_key_or_time_is_refused(old: dict[str, Any], new: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidPipeline, match=rf"operator 'op', state 's': .*{says}"):
        evolved(value_state("`n` int", **old), value_state("`n` int", **new))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ({"kind": "aggregate"}, {"kind": "latest-by"}, "a latest-by now, and a aggregate.*new uid"),
        (
            {"key_schema": "`a` int"},
            {"key_schema": "`a` bigint"},
            r"keys are \(`a` bigint\) now, and \(`a` int\).*new uid",
        ),
        ({"key_schema": "`a` int"}, {"key_schema": "`b` int"}, "its keys are"),
        ({"key_schema": "`a` int, `b` int"}, {"key_schema": "`b` int, `a` int"}, "its keys are"),
        ({"modes": "time=none"}, {"modes": "time=eventTime"}, "INVALID_CONFIG_AFTER_RESTART.*Set it back"),
        ({"functions": {"n": "sum"}}, {"functions": {"n": "count"}}, "'n' is count now, and sum.*another name"),
    ],
)
def test_another_kind_of_operator_key_or_mode_is_refused(old: dict[str, Any], new: dict[str, Any], says: str) -> None:
    state = value_state("`n` int")
    with pytest.raises(InvalidPipeline, match=f"operator 'op': .*{says}"):
        reconcile(before_of(operator_of(state, **old)), [operator_of(state, **new)], snapshot_id=12)


def test_windows_of_earlier_versions_are_read_and_earlier_versions_refuse_newer_ones() -> None:
    """What a pane's time means has changed; only the newer version knows both."""
    state = value_state("`n` int")
    earlier, newer = (operator_of(state, modes=f"append, size 10 us{end}") for end in ("", DUE_WHEN_REMOVED))
    (entry,) = reconcile(before_of(earlier), [newer], snapshot_id=12)
    assert entry.modes == newer.modes
    with pytest.raises(InvalidPipeline, match=r"it runs as append, size 10 us now, and as .*panes due when removed"):
        reconcile(before_of(newer), [earlier], snapshot_id=12)
    with pytest.raises(InvalidPipeline, match="that cannot change"):
        reconcile(before_of(replace(earlier, modes="append, size 11 us")), [newer], snapshot_id=12)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", "by at ascending"),
        ("by at ascending", ""),
        ("by a descending, b descending", "by b descending, a descending"),
    ],
)
def test_which_row_latest_by_keeps_cannot_change(old: str, new: str) -> None:
    """The row that the new order would have kept is gone. One descending column has no modes, in all versions."""
    state = value_state("`at` bigint")
    before, now = (replace(operator_of(state, modes=modes), kind="latest-by") for modes in (old, new))
    assert reconcile(before_of(now), [now], snapshot_id=12)[0].modes == new
    with pytest.raises(InvalidPipeline, match=f"it runs as {new or 'none'} now, and as {old or 'none'} in snapshot"):
        reconcile(before_of(before), [now], snapshot_id=12)


def test_modes_that_format_1_did_not_write_and_spellings_of_a_type_are_no_change() -> None:
    state = value_state("`n` int")
    (entry,) = reconcile(
        before_of(operator_of(state, key_schema="a INT")), [operator_of(state, key_schema="`a` int", modes="x")], snapshot_id=12
    )  # fmt: skip
    assert entry.modes == "x"
    assert entry.states == (state,)


def test_a_description_that_cannot_be_read_is_a_damaged_manifest() -> None:
    with pytest.raises(CorruptManifest, match="snapshot 10: the columns"):
        evolved(value_state("array<"), value_state("`n` int"))


def test_a_run_cannot_go_on_in_the_past() -> None:
    with pytest.raises(StillstateError, match="invariant"):
        reconcile(before_of(), [], snapshot_id=10)


def test_local_versions_serve_only_states_that_are_stored_as_they_were() -> None:
    """A local copy has the columns, and the dropped rows, of its time."""
    same, wider, anew = (operator_of(value_state("`n` int"), uid=uid) for uid in ("same", "wider", "anew"))
    before = replace(before_of(same, wider, anew), versions=dict.fromkeys(("same", "wider", "anew", "gone"), "-" * 16))
    entries = reconcile(
        before,
        [same, operator_of(value_state("`n` bigint"), uid="wider"), anew, replace(same, uid="new")],
        {"anew": {"s"}},
        snapshot_id=12,
    )
    assert usable_versions(before, entries) == {"same": "-" * 16}


# --- stored rows over many versions ------------------------------------------------------------------------------

TYPES = {"n": ("int", "bigint"), "f": ("float", "double"), "s": ("string",), "x": ("struct<a:int>", "struct<a:bigint,b:string>")}  # fmt: skip
DEFAULTS = {"n": 7, "f": 0.5, "s": "it's"}
LITERALS = {"n": "7", "f": "0.5", "s": "'it''s'"}


@dataclass(frozen=True)
class Version:
    """Columns (name, width, with default), TTL, and how the rows of the version come in."""

    columns: tuple[tuple[str, int, bool], ...]
    ttl: bool

    @property
    def ddl(self) -> str:
        return ", ".join(
            f"`{n}` {TYPES[n][w]}" + (f" DEFAULT {LITERALS[n]}" if d and n in LITERALS else "")
            for n, w, d in self.columns
        )

    @property
    def schema(self) -> StateSchema:
        keys, values = (pa.schema([(c.name, c.type) for c in (parse_ddl(t) if t else ())]) for t in (KEY_DDL, self.ddl))
        return StateSchema(keys, values, time="expires" if self.ttl else "")

    @property
    def state(self) -> StateEntry:
        return value_state(self.ddl, time="expires" if self.ttl else "")


columns = st.tuples(
    *(st.tuples(st.just(n), st.integers(0, len(t) - 1), st.booleans(), st.booleans()) for n, t in TYPES.items())
)
versions = st.tuples(columns, st.permutations(range(len(TYPES))), st.booleans())


def version_of(drawn: Any, before: Version | None) -> Version:
    """Widths never shrink while a column is there."""
    cells, order, ttl = drawn
    wide = {n: w for n, w, _ in before.columns} if before is not None else {}
    chosen = [(n, max(w, wide.get(n, 0)), d) for n, w, d, there in (cells[i] for i in order) if there]
    return Version(tuple(chosen), ttl)


def cell_of(name: str, width: int, number: int) -> Any:
    if name == "x":
        return {"a": number} if width == 0 else {"a": number, "b": str(number)}
    return {"n": number, "f": number / 2, "s": f"v{number}"}[name] if number % 5 else None


Live = dict[Key, tuple[dict[str, Any], int | None]]


def changed(live: Live, old: Version, new: Version, now_ms: int) -> Live:
    """The model: every live row becomes one of the new columns at once."""
    before = {n: w for n, w, _ in old.columns}
    after: Live = {}
    for key, (row, expires) in live.items():
        if expires is not None and expires <= now_ms:
            continue
        cells = {}
        for name, width, default in new.columns:
            cell = row[name] if name in before else DEFAULTS.get(name) if default else None
            widened = name == "x" and cell is not None and width > before[name]
            cells[name] = {**cell, "b": None} if widened else cell
        after[key] = (cells, expires if new.ttl and old.ttl else None)
    return after


def batch_of(version: Version, rows: dict[Key, Any], hash_of: Any) -> pa.RecordBatch:
    order = sorted(rows, key=hash_of)
    schema = version.schema
    return schema.batch(
        np.array([hash_of(k) for k in order], dtype=np.uint64),
        np.array([rows[k] is None for k in order], dtype=np.bool_),
        key_columns(order),
        [pa.array([None if rows[k] is None else rows[k][0][f.name] for k in order], f.type) for f in schema.values],
        times=pa.array([None if rows[k] is None else rows[k][1] for k in order], pa.int64()) if version.ttl else None,
    )


def found_rows(batch: pa.RecordBatch) -> Live:
    rows: Live = {}
    for row in batch.to_pylist():
        key = canonical_key(row["key.name"], row["key.score"])
        assert key not in rows
        cells = {n.removeprefix("value."): v for n, v in row.items() if n.startswith("value.")}
        rows[key] = (cells, row.get("expires"))
    return rows


epochs = st.lists(
    st.tuples(st.dictionaries(st.sampled_from(KEYS), st.none() | st.integers(0, 9)), st.sampled_from(["", "", "minor", "major"])),
    max_size=3,
)  # fmt: skip


@given(st.lists(st.tuples(versions, epochs), min_size=1, max_size=5), st.sampled_from([spread, colliding]))
@examples(150)
def test_rows_of_any_number_of_versions_are_read_as_if_they_had_been_changed_at_once(drawn: Any, hash_of: Any) -> None:
    """However they lie in log and tables, and also where a dropped column, or a TTL, comes back."""
    log = Log([])
    log.manifest = replace(log.manifest, operators=())
    live: Live = {}
    now_ms = number = 0
    version: Version | None = None
    for shape, writes in drawn:
        old, version = version, version_of(shape, version)
        # A fencing snapshot, then what the pipeline is now.
        log.manifest = replace(log.manifest, snapshot_id=log.manifest.snapshot_id + 1)
        described = operator_of(version.state, uid=OPERATOR)
        (entry,) = reconcile(log.manifest, [described], snapshot_id=log.manifest.snapshot_id + 1)
        live = live if old is None else changed(live, old, version, now_ms)
        # The restore of the restarted job, from a snapshot that still has the old description.
        restored = read_states(log.root, log.manifest, entry, {"s": version.schema}, *ALL_HASHES)["s"]
        assert restored.schema.equals(version.schema.arrow)
        assert found_rows(restored) == visible(live, now_ms)
        log.describe(entry)
        for rows, fold in writes:
            now_ms += 1
            new: dict[Key, Any] = {}
            for key, value in rows.items():
                number += 1
                cells = {n: cell_of(n, w, number) for n, w, _ in version.columns}
                expires = now_ms + number % 4 if version.ttl and number % 3 else None
                new[key] = None if value is None else (cells, expires)
            log.epoch({"s": batch_of(version, new, hash_of)}, now_ms)
            live = {k: v for k, v in {**live, **new}.items() if v is not None}
            log.fold(fold)
            assert found_rows(log.read({"s": version.schema})["s"]) == visible(live, now_ms)
        shown = log.view("s").read()
        assert shown.num_rows == len(visible(live, now_ms))
        assert [n for n in shown.column_names if n in TYPES] == [n for n, _, _ in version.columns]


def visible(live: Live, now_ms: int) -> Live:
    return {key: (row, expires) for key, (row, expires) in live.items() if expires is None or expires > now_ms}


# --- dropped states ----------------------------------------------------------------------------------------------

SCHEMA = Version((("n", 0, False),), ttl=False)


def counted(number: int, *keys: Key) -> pa.RecordBatch:
    return batch_of(SCHEMA, dict.fromkeys(keys, ({"n": number}, None)), spread)


def named(*names: str) -> OperatorEntry:
    return operator_of(*(replace(SCHEMA.state, name=name) for name in names), uid=OPERATOR)


def restart(log: Log, *names: str, uid: str = OPERATOR) -> None:
    log.manifest = replace(log.manifest, snapshot_id=log.manifest.snapshot_id + 1)
    now = [replace(named(*names), uid=uid)]
    entries = reconcile(log.manifest, now, snapshot_id=log.manifest.snapshot_id + 1, allow_dropped_state=True)
    log.manifest = replace(log.manifest, operators=entries)


@pytest.mark.parametrize("folds", [("", "", ""), ("major", "", ""), ("", "", "major"), ("major", "minor", "minor")])
def test_a_dropped_state_that_comes_back_is_empty(folds: tuple[str, str, str]) -> None:
    """Wherever its old rows lie; and they are not folded into what is new."""
    log = Log([])
    log.describe(named("s", "t"))
    log.epoch({"s": counted(1, *KEYS), "t": counted(1, *KEYS)})
    log.fold(folds[0])
    restart(log, "t")
    log.epoch({"t": counted(2, KEYS[0])})
    log.fold(folds[1])
    restart(log, "s", "t")
    assert log.read({"s": SCHEMA.schema, "t": SCHEMA.schema})["s"].num_rows == 0
    log.epoch({"s": counted(3, KEYS[1])})
    log.fold(folds[2])
    states = log.read({"s": SCHEMA.schema, "t": SCHEMA.schema})
    assert found_rows(states["s"]) == {KEYS[1]: ({"n": 3}, None)}
    assert len(found_rows(states["t"])) == len(KEYS)
    assert log.view("s").read().num_rows == 1
    assert log.view("s").read(key={"name": KEYS[0][0], "score": KEYS[0][1]}).num_rows == 0


@pytest.mark.parametrize("fold", ["", "major", "minor"])
def test_an_operator_that_was_given_up_and_comes_back_is_empty(fold: str) -> None:
    log = Log([])
    log.describe(named("s"))
    log.epoch({"s": counted(1, *KEYS)})
    restart(log, "s", uid="other")
    log.epoch({})
    log.fold(fold)
    restart(log, "t")
    log.epoch({"t": counted(2, KEYS[0])})
    log.fold(fold)
    assert log.read({"t": SCHEMA.schema})["t"].num_rows == 1
    restart(log, "s", "t")
    assert log.read({"s": SCHEMA.schema, "t": SCHEMA.schema})["s"].num_rows == 0


def test_a_dropped_state_in_something_newer_than_the_drop_is_corrupt() -> None:
    """Passed over in what is older; later nobody can have written it."""
    log = Log([])
    log.describe(named("s", "t"))
    log.epoch({"s": counted(1, *KEYS)})
    restart(log, "t")
    assert log.read({"t": SCHEMA.schema})["t"].num_rows == 0
    log.epoch({"s": counted(2, *KEYS)})
    with pytest.raises(CorruptSegment, match="holds state 's' that operator"):
        log.read({"t": SCHEMA.schema})
    with pytest.raises(CorruptSegment, match="holds state 's' that operator"):
        log.fold("major")


def test_a_batch_that_has_not_the_columns_of_its_time_is_corrupt() -> None:
    """An old row in new columns, or a new one in old columns, was written by nobody."""
    new = Version((("n", 1, False),), ttl=False)
    for first, then in ((new, new), (SCHEMA, SCHEMA)):
        log = Log([])
        log.describe(operator_of(SCHEMA.state, uid=OPERATOR))
        log.epoch({"s": batch_of(first, {KEYS[0]: ({"n": 1}, None)}, spread)})
        (entry,) = reconcile(
            log.manifest, [operator_of(new.state, uid=OPERATOR)], snapshot_id=log.manifest.snapshot_id + 1
        )
        log.describe(entry)
        log.epoch({"s": batch_of(then, {KEYS[1]: ({"n": 1}, None)}, spread)})
        for attempt in (
            lambda: log.read({"s": new.schema}),  # noqa: B023 - called in this round
            lambda: log.fold("major"),  # noqa: B023
            lambda: log.view("s").read(),  # noqa: B023
        ):
            with pytest.raises(CorruptSegment, match="types must match"):
                attempt()


def test_tables_are_written_in_the_newest_columns() -> None:
    """So that history can be forgotten once everything older is folded."""
    log = Log([])
    log.describe(operator_of(SCHEMA.state, uid=OPERATOR))
    log.epoch({"s": counted(1, *KEYS)})
    new = Version((("s", 0, True), ("n", 1, False)), ttl=True)
    (entry,) = reconcile(log.manifest, [operator_of(new.state, uid=OPERATOR)], snapshot_id=log.manifest.snapshot_id + 1)
    log.describe(entry)
    log.epoch({"s": batch_of(new, {KEYS[0]: ({"s": "x", "n": 5}, None)}, spread)})
    log.fold("major")
    (again,) = reconcile(log.manifest, [operator_of(new.state, uid=OPERATOR)], snapshot_id=log.manifest.snapshot_id + 1)
    assert again.states[0].history == ()
    log.describe(again)
    found = log.read({"s": new.schema})["s"]
    assert found_rows(found)[KEYS[0]] == ({"s": "x", "n": 5}, None)
    assert found_rows(found)[KEYS[1]] == ({"s": "it's", "n": 1}, None)
    assert slice_hash_range(found, 0, int(hashes_of(found)[0])).num_rows == 1


# --- operators of a query ----------------------------------------------------------------------------------------


def grouping(uid: str = "op", **other: Any) -> OperatorEntry:
    return OperatorEntry(
        **{"uid": uid, "kind": "aggregate", "key_schema": "`k` string", "states": (), "says": {"k": "in.shop"}, **other}
    )


def test_keys_that_say_something_else_are_refused_although_their_types_fit() -> None:
    old, new = grouping(), grouping(says={"k": "upper(in.shop)"})
    for allow in (False, True):
        with pytest.raises(InvalidPipeline, match=r"its keys are \(upper\(in.shop\)\) now, and \(in.shop\)"):
            reconcile(before_of(old), [new], snapshot_id=12, allow_dropped_state=allow)


def test_a_number_in_a_name_decides_only_if_nothing_that_is_read_has_changed() -> None:
    old = grouping(says={"k": "in.shop", "": "digest"})
    assert reconcile(before_of(old), [old], snapshot_id=12) == (old,)
    for says in ({"k": "in.shop", "": "another"}, {"k": "in.shop"}):
        for before, after in ((old, grouping(says=says)), (grouping(says=says), old)):
            with pytest.raises(InvalidPipeline, match="it is not sure which state is whose"):
                reconcile(before_of(before), [after], snapshot_id=12)


def test_functions_of_a_query_may_come_or_go_and_not_take_each_others_place() -> None:
    """A function that was changed is one that is gone and one that is new: its sums would begin from nothing."""
    one, two = {"a": "sum(in.a)"}, {"a": "sum(in.a)", "b": "sum(in.b)"}
    for before, after in ((one, two), (two, one)):
        reconcile(before_of(grouping(functions=before)), [grouping(functions=after)], snapshot_id=12)
    changed = grouping(functions={"c": "sum(in.a + 1)"})
    with pytest.raises(InvalidPipeline, match=r"sum\(in.a \+ 1\) is new, and sum\(in.a\) of snapshot 10 is gone"):
        reconcile(before_of(grouping(functions=one)), [changed], snapshot_id=12)
    reconcile(before_of(grouping(functions=one)), [changed], snapshot_id=12, allow_dropped_state=True)
    reconcile(before_of(grouping(functions=one, says={})), [replace(changed, says={})], snapshot_id=12)


def test_an_operator_of_a_query_under_another_name_is_named_in_the_refusal() -> None:
    with pytest.raises(InvalidPipeline, match='names=\\{"window-shop": "op"\\}'):
        reconcile(before_of(grouping()), [grouping("window-shop")], snapshot_id=12)


def test_an_operator_of_a_query_is_not_gone_on_with_in_steps() -> None:
    """Its columns have other names there: all of its state would be dropped without a word."""
    with pytest.raises(InvalidPipeline, match="it is written in steps now"):
        reconcile(before_of(grouping()), [grouping(says={})], snapshot_id=12, allow_dropped_state=True)
