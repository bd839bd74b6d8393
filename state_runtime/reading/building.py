"""Building a snapshot from rows: bootstrap, import, conversion.

        builder = SnapshotBuilder.create(root, "flights", operators, mode="BOOTSTRAP", clock=…, ids=…)
        builder.write("legs", "seen", batches)              # in this process, or builder.add(…) of tables from tasks
        manifest = builder.commit()

The result is *canonical*: one layer of sorted Parquet tables, of any number of shards and any backend. A job starts
from it as from any other snapshot.

Atomic: the manifest is created last, if it is absent. `building.json` is created before anything else and removed
after the manifest. A crash in between leaves `job.json`, and tables that no manifest names: no run starts in that root,
because it would start empty. A repeated build continues from there, and writes new tables. Of two builders of one root,
one gets the snapshot, and the other is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pyarrow as pa

from state_runtime.base import faults
from state_runtime.base.clock import Clock
from state_runtime.base.errors import InvalidConfiguration, check
from state_runtime.base.ids import Ids
from state_runtime.base.limits import MIB, SMALL_JSON_BYTES_MAX
from state_runtime.reading.sorting import sorted_rows
from state_runtime.reading.tables import TableWriter, WrittenTables
from state_runtime.snapshot.catalog import Catalog, read_job_info
from state_runtime.snapshot.create_once import Proposal, create_agreed
from state_runtime.snapshot.document import FORMAT_VERSION, decode_document, encode_document
from state_runtime.snapshot.fencing import open_job_root
from state_runtime.snapshot.handover import refuse_if_handed_over
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.snapshot.manifest import (
    FileEntry,
    LayerEntry,
    Manifest,
    OperatorEntry,
    OriginEntry,
    SourcePosition,
    StagedOutput,
    TimeEntry,
    format_of,
)
from state_runtime.snapshot.paths import BUILDING_FILE, manifest_path
from state_runtime.state.table import StateSchema
from state_runtime.store import Created, Store

__all__ = ["BuildMode", "SnapshotBuilder", "settled"]

BuildMode = Literal["BOOTSTRAP", "IMPORT", "CONVERT"]


@dataclass(frozen=True)
class _Intent:
    """`building.json`: the root is being filled with its first snapshot.

    Attributes:
        mode: how the first attempt fills it; a later attempt may use another mode.
    """

    uid: str
    job: str
    mode: BuildMode
    started_at_ms: int


def settled(operator: OperatorEntry) -> OperatorEntry:
    """Return the description of an operator all of whose rows have the newest columns: without history."""
    states = tuple(replace(state, since=0, history=()) for state in operator.states)
    return replace(operator, states=states, since=0, dropped={}, next_due_ms=None)


@dataclass
class SnapshotBuilder:
    """One snapshot being built: create → write or add, any number of times → commit, once.

    Attributes:
        root: of the job whose first snapshot it becomes, or any folder with the same layout.
        operators: the descriptions of the states; see `settled`.
        snapshot_id: the manifest's.
        writer: part of all files' names.
        schemas: per operator and state its exact columns, if they are known; else the descriptions tell them.
        scratch: a folder of this host; None is the system's folder for temporary files.
    """

    root: Store
    info: JobInfo
    operators: tuple[OperatorEntry, ...]
    mode: BuildMode
    clock: Clock
    ids: Ids
    snapshot_id: int
    writer: str
    origins: tuple[OriginEntry, ...] = ()
    schemas: Mapping[tuple[str, str], StateSchema] = field(default_factory=dict)
    scratch: Path | None = None
    _written: WrittenTables = field(default_factory=WrittenTables)
    _done: bool = False

    @staticmethod
    def create(
        root: Store,
        job: str,
        operators: Sequence[OperatorEntry],
        *,
        mode: BuildMode,
        clock: Clock,
        ids: Ids,
        origin: OriginEntry | None = None,
        snapshot_id: int = 1,
        schemas: Mapping[tuple[str, str], StateSchema] | None = None,
        scratch: Path | None = None,
    ) -> SnapshotBuilder:
        """Begin a snapshot; writes `building.json`, and `job.json` if the root does not have one.

        No run starts in the root until `commit` has ended. After an error or a crash, create it again.

        Args:
            job: name of the job.
            origin: where the rows come from; None if their origin has no name.

        Raises:
            InvalidConfiguration: the root has snapshots already. SnapshotInUse: it is the target of a move or
            conversion. CorruptManifest, UnsupportedFormat, StoreUnavailable, OutcomeUnknown: nothing was built.
        """
        _refuse_snapshots(root)
        refuse_if_handed_over(root, is_builder=True)
        # Before job.json: with job.json alone the root looks like a job that starts empty.
        intent = _Intent(ids.uid(), job, mode, clock.now_ms())
        create_agreed(
            root, Proposal(BUILDING_FILE, encode_document("building", intent), intent), lambda: _read_intent(root)
        )
        faults.reach("build-begun")
        info = open_job_root(root, job, clock=clock, ids=ids, is_builder=True)
        _refuse_snapshots(root)
        origin = origin or OriginEntry(job, info.uid, 0, "", mode)
        return SnapshotBuilder(
            root=root,
            info=info,
            operators=tuple(settled(operator) for operator in operators),
            mode=mode,
            clock=clock,
            ids=ids,
            snapshot_id=snapshot_id,
            writer=ids.uid(),
            origins=(origin,),
            schemas=schemas or {},
            scratch=scratch,
        )

    def tables(self, operator: str, state: str, *, bits: int = 0) -> TableWriter:
        """Return a writer for the tables of one state; pass its results to `add`.

        Raises:
            InvalidConfiguration: there is no such operator or state.
        """
        found = next((o for o in self.operators if o.uid == operator), None)
        entry = found.state(state) if found is not None else None
        if found is None or entry is None:
            known = ", ".join(f"{o.uid}/{s.name}" for o in self.operators for s in o.states) or "none"
            raise InvalidConfiguration(
                f"there is no state {state!r} of an operator {operator!r} to write; there are: {known}"
            )
        return TableWriter(
            self.root,
            found,
            entry,
            snapshot_id=self.snapshot_id,
            writer=self.writer,
            ids=self.ids,
            bits=bits,
            scratch=self.scratch,
            schema=self.schemas.get((operator, state)),
        )

    def write(
        self,
        operator: str,
        state: str,
        batches: Iterable[pa.RecordBatch],
        *,
        in_order: bool = True,
        bits: int = 0,
        bytes_max: int = 128 * MIB,
    ) -> WrittenTables:
        """Write all rows of a state.

        Args:
            batches: live rows in the state's columns (docs/format.md, "State batches").
            in_order: whether they are sorted by hash (and entry); otherwise they are sorted here, with files of this
                host if they do not fit into `bytes_max` of memory.
            bits: see `TableWriter`; `cell_bits` returns a good number.

        Raises:
            InvalidConfiguration, InvalidData, StoreUnavailable: see `TableWriter`.
        """
        writer = self.tables(operator, state, bits=bits)
        if not in_order:
            batches = _sorted(batches, bytes_max, self.scratch)
        written = writer.write(batches)
        self.add(written)
        return written

    def add(self, written: WrittenTables) -> None:
        """Add tables to the snapshot."""
        check(not self._done, "a snapshot is built once")
        self._written = self._written + written

    @property
    def written(self) -> WrittenTables:
        """The tables of the snapshot so far."""
        return self._written

    def commit(
        self,
        *,
        parallelism: int = 1,
        time: TimeEntry | None = None,
        source: SourcePosition | None = None,
        source_logs: Sequence[FileEntry] = (),
        outputs: Sequence[StagedOutput] = (),
        epoch: int = 0,
        next_due_ms: Mapping[str, int] | None = None,
        created_at_ms: int | None = None,
        session: Mapping[str, str] | None = None,
    ) -> Manifest:
        """Create the manifest: from then on there is a snapshot.

        Args:
            parallelism: recorded as the job's parallelism; a job may restart with any other.
            time: the clocks; needed for rows with a TTL: rows that had expired by its batch time are left out.
            source: where the job continues to read; None: at its source's beginning.
            source_logs: below the root; the files that file sources have seen, see docs/format.md.
            epoch: number of the newest epoch, if it is above the snapshot's id.
            next_due_ms: per operator a lower bound of its next `due`, in addition to that of the written rows.
            session: the settings under which the rows were made; see `Manifest.session`.

        Raises:
            InvalidConfiguration: another builder built a snapshot here meanwhile; it was not changed.
            CorruptManifest: it would be too large. OutcomeUnknown, StoreUnavailable: not confirmed; check before
                building again.
        """
        check(not self._done, "a snapshot is built once")
        due = dict(self._written.next_due_ms)
        for uid, at in (next_due_ms or {}).items():
            due[uid] = min(at, due.get(uid, at))
        tables = tuple(sorted(self._written.tables, key=lambda t: (t.operator, t.state, t.hash_low)))
        layers = (LayerEntry(0, self.snapshot_id, tables, tuple(source_logs)),) if tables or source_logs else ()
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            job_uid=self.info.uid,
            snapshot_id=self.snapshot_id,
            term=0,
            commit_id=self.ids.uid(),
            kind="checkpoint",
            created_at_ms=self.clock.now_ms() if created_at_ms is None else created_at_ms,
            parallelism=parallelism,
            operators=tuple(replace(o, next_due_ms=due.get(o.uid)) for o in self.operators),
            layers=layers,
            source=source,
            outputs=tuple(outputs),
            time=time,
            epoch=max(epoch, self.snapshot_id),
            origins=self.origins,
            session=dict(session or {}),
        )
        manifest = replace(manifest, format_version=format_of(manifest))
        _refuse_overlaps(manifest)
        if self.root.create(manifest_path(self.snapshot_id), manifest.encode()) is not Created.MINE:
            _refuse_snapshots(self.root)
            raise InvalidConfiguration(f"{self.root.url} had a snapshot {self.snapshot_id} once; give another place")
        self._done = True
        faults.reach("build-committed")
        # With a snapshot in the root it has no effect any more: if this call is interrupted, the file may stay.
        self.root.delete(BUILDING_FILE)
        return manifest


def _sorted(batches: Iterable[pa.RecordBatch], bytes_max: int, scratch: Path | None) -> Iterable[pa.RecordBatch]:
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        return

    def rest() -> Iterable[pa.RecordBatch]:
        yield first
        yield from batches

    yield from sorted_rows(rest(), StateSchema.of(first.schema), bytes_max=bytes_max, scratch=scratch)


def _read_intent(root: Store) -> _Intent | None:
    try:
        data = root.read(BUILDING_FILE, SMALL_JSON_BYTES_MAX)
    except FileNotFoundError:
        return None
    return decode_document("building", _Intent, data, f"{root.url}/{BUILDING_FILE}")


def _refuse_snapshots(root: Store) -> None:
    existing = Catalog.of_root(root).latest() if read_job_info(root) is not None else None
    if existing is not None:
        raise InvalidConfiguration(
            f"{root.url} has snapshots already (the newest is {existing.snapshot_id}); a snapshot is built in a place "
            "of its own. Give another place, or delete that job"
        )


def _refuse_overlaps(manifest: Manifest) -> None:
    """Check that tables of one state have no hashes in common: of two rows with one key the newer would be unknown."""
    ends: dict[tuple[str, str], int] = {}
    for layer in manifest.layers:
        for table in layer.tables:
            key = (table.operator, table.state)
            check(table.hash_low > ends.get(key, -1), f"tables of {key} overlap")
            ends[key] = table.hash_high
