"""What tests write and read of stored state beside the engine: an oracle that walks a snapshot in the plainest way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.base.errors import CorruptManifest
from state_runtime.base.ids import Ids
from state_runtime.base.settings import JobSettings
from state_runtime.changelog.changes import TaskChanges, UploadTotals
from state_runtime.changelog.reader import fetch_part, read_index, read_table, stream_source_log
from state_runtime.changelog.upload import Uploader
from state_runtime.changelog.versions import StateVersions, check_dropped
from state_runtime.changelog.writer import begin_segment, begin_task_changes, task_writer
from state_runtime.restore.uploaded_files import Bottom, direct, read_listing
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, SegmentEntry
from state_runtime.state.table import DELETED, StateSchema, concat, slice_hash_range
from state_runtime.store import Store
from tests.job_settings import job_settings

__all__ = ["count_live", "read_source_log", "read_states", "write_segment", "write_task_changes"]


def read_states(
    root: Store,
    manifest: Manifest,
    operator: str | OperatorEntry,
    schemas: Mapping[str, StateSchema],
    low: int,
    high: int,
) -> dict[str, pa.RecordBatch]:
    """The states of one operator in one hash range, as of a snapshot.

    Segments, layers and files of shards are read newest first and folded, so the newest row of an identity wins; tombstones, clear markers
    and rows whose TTL has run out are gone. What is older than its operator or state (`since`), or of a state that was
    dropped since, is passed over; rows of older columns are brought to the newest.

    Args:
        operator: uid, to read by the manifest's own description; or the description to read by (of a restart with changed
            states: what `reconcile` returned).
        schemas: the newest columns of its states.
        low, high: closed range of unsigned key hashes.

    Returns:
        Per state one sorted batch, each identity once.

    Raises:
        MissingFile, CorruptSegment: primary data is damaged: the message names the file. Nothing is guessed.
        CorruptManifest: it does not describe the operator. StoreUnavailable: try again.
    """
    entry = operator if isinstance(operator, OperatorEntry) else _described(manifest, operator)
    versions = {s.name: StateVersions(entry, s, schemas[s.name]) for s in entry.states if s.name in schemas}
    newest_first: dict[str, list[pa.RecordBatch]] = {state: [] for state in schemas}

    def add(state: str, snapshot_id: int, path: str, load: Callable[[], pa.RecordBatch]) -> None:
        if state not in versions:
            check_dropped(entry, state, snapshot_id, path)
        elif snapshot_id >= versions[state].since:
            batch = slice_hash_range(load(), low, high)
            newest_first[state].append(versions[state].read(batch, snapshot_id, path))

    for segment in reversed(manifest.state_segments):
        if segment.snapshot_id < entry.since:
            continue
        # Several epochs may be in one segment: its later parts are younger.
        for part in reversed(read_index(root, segment, manifest.job_uids).parts):
            if part.kind == "state" and part.operator == entry.uid and part.hash_high >= low and part.hash_low <= high:
                load = partial(fetch_part, root, segment.path, part)
                add(part.state, segment.snapshot_id, part.path or segment.path, load)
    for layer in reversed(manifest.layers):
        for table in layer.tables:
            newest = layer.newest_in(table)
            if (
                table.operator == entry.uid
                and newest >= entry.since
                and table.hash_low <= high
                and table.hash_high >= low
            ):
                add(table.state, newest, table.path, partial(read_table, root, table))
    objects = direct(root)
    listing = read_listing(objects, manifest)
    if listing is not None:
        bottom = Bottom(objects, listing, entry)
        bottom.check(versions)
        for state, version in versions.items():
            newest_first[state] += [
                concat(list(source), schemas[state].arrow) for source in bottom.sources(state, version, low, high)
            ]
    now_ms = manifest.time.batch_time_ms if manifest.time is not None else None
    states = {state: schema.empty() for state, schema in schemas.items()}
    for state, batches in newest_first.items():
        if batches:
            states[state] = versions[state].fold(batches, drop_deleted=True, now_ms=now_ms)
    return states


def _described(manifest: Manifest, uid: str) -> OperatorEntry:
    entry = next((o for o in manifest.operators if o.uid == uid), None)
    if entry is None:
        raise CorruptManifest(
            f"snapshot {manifest.snapshot_id} does not describe operator {uid!r}, whose state it should hold"
        )
    return entry


def write_task_changes(
    root: Store,
    *,
    term: int,
    operator: str,
    hash_range: tuple[int, int],
    changes: Mapping[str, pa.RecordBatch],
    inline_bytes_max: int,
    ids: Ids,
) -> TaskChanges:
    """What `begin_task_changes` does, in one step and with one attempt: an upload goes to the root in this thread."""
    settings = job_settings(JobSettings(), inline_bytes_max=inline_bytes_max)
    writer = task_writer(
        lambda: root, cast(Uploader, _AtOnce()), term=term, snapshot_id=1, operator=operator, settings=settings, ids=ids
    )
    return begin_task_changes(writer, operator=operator, hash_range=hash_range, changes=changes).result()


class _AtOnce:
    """An uploader that puts an object in the caller's thread, with one attempt."""

    totals = UploadTotals()

    def begin(self, root: Store, name: Callable[[], str], body: bytes) -> _AtOnce:
        self._path = name()
        root.put(self._path, body)
        return self

    def result(self) -> str:
        return self._path


def count_live(batch: pa.RecordBatch) -> int:
    """Rows that are not tombstones."""
    gone: Any = pc.sum(batch.column(batch.schema.get_field_index(DELETED))).as_py()
    return int(batch.num_rows - (gone or 0))


def write_segment(
    root: Store,
    changes: Sequence[TaskChanges],
    *,
    job_uid: str,
    term: int,
    snapshot_id: int,
    ids: Ids,
    uploader: Uploader | None = None,
) -> SegmentEntry | None:
    """The one packed object of an epoch, written at once; see `begin_segment`."""
    begun = begin_segment(
        root, changes, job_uid=job_uid, term=term, snapshot_id=snapshot_id, ids=ids, uploader=uploader
    )
    return begun.result() if begun is not None else None


def read_source_log(root: Store, manifest: Manifest, source: int) -> list[str]:
    """All lines of a source's log of seen files, oldest first."""
    return [line for text in stream_source_log(root, manifest, source) for line in text.split("\n")]
