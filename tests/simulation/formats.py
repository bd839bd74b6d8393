"""How epochs become objects: as JSON (the laws are about names, not about rows), or in the real formats for a share of the seeds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from model import ALL_HASHES, KEY_DDL, OPERATOR, SCHEMA, STATE, VALUE_DDL, batch_of, rows_of

from state_runtime.base.clock import Clock
from state_runtime.base.errors import MissingFile
from state_runtime.base.ids import Ids
from state_runtime.base.limits import MIB
from state_runtime.base.settings import JobSettings, MaterializationSettings
from state_runtime.changelog.parts import PartEntry, sha256
from state_runtime.changelog.reader import read_index
from state_runtime.changelog.segment import SegmentIndex, build_segment
from state_runtime.changelog.writer import source_log_changes
from state_runtime.materialize import MaterializationSizes, Record, materialize
from state_runtime.materialize.records import Pin, view_of
from state_runtime.materialize.run import Reached
from state_runtime.materialize.write_tables import table_name
from state_runtime.snapshot.manifest import (
    FileEntry,
    Manifest,
    OperatorEntry,
    SegmentEntry,
    SourcePosition,
    StateEntry,
    TableEntry,
)
from state_runtime.snapshot.paths import named_for, segment_path
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.table import slice_hash_range
from state_runtime.store import Store
from tests.stored import read_states, write_segment, write_task_changes

Prove = Callable[[], None] | None
Changes = Mapping[str, int | None]
LOW, HIGH = ALL_HASHES
OPERATORS = (OperatorEntry(OPERATOR, "test", KEY_DDL, (StateEntry(STATE, "value", VALUE_DDL),)),)


class Format(Protocol):
    """Writes epochs, folds them, and reads states back."""

    def epoch(
        self, root: Store, last: Manifest, changes: Changes, *, uid: str, term: int, ids: Ids, direct: bool
    ) -> Manifest:
        """The draft of the next manifest; its objects are stored. `direct`: the task uploads its changes itself."""

    def fold(
        self, root: Store, manifest: Manifest, *, clock: Clock, ids: Ids, major: bool, prove: Prove = None
    ) -> Record:
        """A materialization from claim to record."""

    def state_of(self, root: Store, manifest: Manifest) -> dict[str, int]:
        """What a snapshot holds."""


def applied(state: Mapping[str, int], changes: Changes) -> dict[str, int]:
    """The oracle."""
    after = {**state, **{k: v for k, v in changes.items() if v is not None}}
    return {k: v for k, v in after.items() if changes.get(k, 0) is not None}


class PlainFormat:
    """JSON under the real names; only an epoch with an object of its own has a real index, because that is where it is named."""

    def epoch(
        self, root: Store, last: Manifest, changes: Changes, *, uid: str, term: int, ids: Ids, direct: bool
    ) -> Manifest:
        snapshot_id = last.snapshot_id + 1
        body = json.dumps(changes).encode()
        path = segment_path(term, f"{snapshot_id:020d}-{ids.uid()}.seg")
        if direct:
            own = segment_path(term, f"{named_for(snapshot_id, f'direct-{OPERATOR}')}-{ids.uid()}.seg")
            root.put(own, body)
            part = PartEntry("state", OPERATOR, STATE, own, 0, len(body), sha256(body), 1, len(body), LOW, HIGH)
            packed, tail = build_segment(SegmentIndex(uid, snapshot_id, (part,)), [])
            root.put(path, packed)
            entry = SegmentEntry(path, len(packed), sha256(packed), tail, snapshot_id, 1, len(body))
        else:
            root.put(path, body)
            entry = SegmentEntry(path, len(body), sha256(body), 0, snapshot_id, 1)
        return replace(last, kind="checkpoint", operators=OPERATORS, segments=(*last.segments, entry))

    def fold(
        self, root: Store, manifest: Manifest, *, clock: Clock, ids: Ids, major: bool, prove: Prove = None
    ) -> Record:
        return materialize(root, manifest, clock=clock, ids=ids, prove=prove)

    @staticmethod
    def fold_snapshot(
        root: Store, manifest: Manifest, mode: str, pin: Pin, *, clock: Clock, reached: Reached, **_: Any
    ) -> Record:
        """In place of the fold of real tables: one table, and a log of seen files."""
        reached(0, 1)
        at = manifest.snapshot_id
        body = json.dumps(PlainFormat().state_of(root, manifest)).encode()
        path = f"tables/{OPERATOR}/{STATE}/{table_name(at, pin.writer, f'{pin.record_id:016x}')}"
        root.put(path, body)
        log = f"tables/_sources/{at:020d}-{pin.writer}/source-0.log"
        root.put(log, b"seen")
        reached(1, 1)
        return Record(
            pin.record_id,
            manifest.job_uid,
            at,
            pin.writer,
            "major",
            pin.started_at_ms,
            clock.now_ms(),
            view_of(manifest, at),
            base=(TableEntry(path, len(body), sha256(body), 1, OPERATOR, STATE, LOW, HIGH, at),),
            removed=tuple(t.path for layer in manifest.layers for t in layer.tables),
            source_logs=(FileEntry(log, 4, sha256(b"seen")),),
            removed_source_logs=tuple(f.path for layer in manifest.layers for f in layer.source_logs),
        )

    def state_of(self, root: Store, manifest: Manifest) -> dict[str, int]:
        state: dict[str, int] = {}
        for layer in manifest.layers:
            for table in layer.tables:
                state |= json.loads(_read(root, table.path))
        for segment in manifest.segments:
            path = segment.path
            if segment.direct_bytes:
                path = read_index(root, segment, manifest.job_uids).parts[0].path
            state = applied(state, json.loads(_read(root, path)))
        return state


def _read(root: Store, path: str) -> bytes:
    try:
        return root.read(path, MIB)
    except FileNotFoundError as error:
        raise MissingFile(f"{path} is missing in {root.url}") from error


class RealFormat:
    """Arrow segments, Parquet tables, the real fold and the real reader; two shards."""

    SHARDS = 2
    SIZES = MaterializationSizes(table_bytes=1_500, small_bytes=0)

    def epoch(
        self, root: Store, last: Manifest, changes: Changes, *, uid: str, term: int, ids: Ids, direct: bool
    ) -> Manifest:
        snapshot_id = last.snapshot_id + 1
        whole = batch_of({(k, 0.0): None if v is None else (v, "x") for k, v in changes.items()})
        tasks = []
        for shard in range(self.SHARDS):
            bounds = hash_range_of_shard(shard, self.SHARDS)
            part = slice_hash_range(whole, *bounds)
            tasks.append(
                write_task_changes(
                    root,
                    term=term,
                    operator=OPERATOR,
                    hash_range=bounds,
                    changes={STATE: part},
                    inline_bytes_max=0 if direct else MIB,
                    ids=ids,
                )
            )
        tasks.append(source_log_changes(0, [f"file of {snapshot_id}"]))
        entry = write_segment(root, tasks, job_uid=uid, term=term, snapshot_id=snapshot_id, ids=ids)
        segments = (*last.segments, *([entry] if entry is not None else []))
        source = SourcePosition(snapshot_id, "", "", "", "", (0,))
        return replace(last, kind="checkpoint", operators=OPERATORS, segments=segments, source=source)

    def fold(
        self, root: Store, manifest: Manifest, *, clock: Clock, ids: Ids, major: bool, prove: Prove = None
    ) -> Record:
        settings = JobSettings(materialization=MaterializationSettings(ratio=0.01 if major else 50))
        return materialize(root, manifest, settings=settings, clock=clock, ids=ids, sizes=self.SIZES, prove=prove)

    def state_of(self, root: Store, manifest: Manifest) -> dict[str, int]:
        if not manifest.operators:
            return {}
        rows = rows_of(read_states(root, manifest, OPERATOR, {STATE: SCHEMA}, LOW, HIGH)[STATE])
        return {str(key[0]): value[0] for key, value in rows.items() if value is not None}
