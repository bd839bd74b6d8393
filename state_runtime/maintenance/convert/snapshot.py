"""Conversion of a snapshot to another format, outside the job: into a separate folder, laid out like a job root.

    changelog      tables, and the changelog above them. A job with the changelog on continues from it without a
                   rewrite.
    incremental    no changelog: it is folded into deltas; unchanged tables are shared as they are
    canonical      one layer of sorted Parquet tables with the newest columns: only the live rows

Every canonical snapshot is also an incremental one. Every incremental one without files of shards is also a changelog
one with an empty log. So a conversion rewrites only the parts that the target format does not allow (`rewrite_of`), and
copies the rest.

Order of work, and the state after a crash:

1. pin the source; write into the target `conversion.json`, which names the snapshot and the format; then its `job.json`
2. fold into the target; copy the unchanged objects
3. compare source and target, by rows and digest of each state: both are read completely
4. the manifest, create-if-absent: from here on the target is a snapshot
5. remove the files of earlier attempts, `conversion.json` last

Before 4 the target is no snapshot, and the same call continues the work: copies are kept, tables are folded again under
new names. After 4 an earlier attempt that slept can publish nothing: its manifest would have the same name. So an
object that a manifest names is never removed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from state_runtime.base.actor import Actor
from state_runtime.base.clock import Clock
from state_runtime.base.errors import (
    CorruptData,
    InvalidConfiguration,
    MissingFile,
    SnapshotExpired,
    StoreRefused,
)
from state_runtime.base.ids import Ids
from state_runtime.base.limits import MIB, SMALL_JSON_BYTES_MAX
from state_runtime.base.settings import JobSettings
from state_runtime.maintenance.convert.compare import compare_here
from state_runtime.maintenance.copy.objects import Copier, CopyProgress, create_manifest, needed_objects
from state_runtime.materialize.grid import MaterializationSizes
from state_runtime.materialize.records import Pin, Record, apply, view_of
from state_runtime.materialize.run import FoldUnits, Reached, fold_here, fold_snapshot
from state_runtime.materialize.source_logs import fold_source_logs
from state_runtime.reading.references import references
from state_runtime.snapshot.catalog import Catalog, read_job_info
from state_runtime.snapshot.create_once import Proposal, create_agreed
from state_runtime.snapshot.document import FORMAT_VERSION, decode_document, encode_document
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.snapshot.kept_pin import kept_pin
from state_runtime.snapshot.locate import OpenedSnapshot
from state_runtime.snapshot.manifest import LayerEntry, Manifest, OriginEntry, SnapshotFormat, format_of
from state_runtime.snapshot.paths import CONVERSION_FILE, JOB_FILE, MATERIALIZATIONS_DIR, TERMS_DIR
from state_runtime.store import Store

__all__ = [
    "HERE_BYTES_MAX",
    "CompareStates",
    "ConversionResult",
    "Phase",
    "Rewrite",
    "convert",
    "is_of_format",
    "refuse_rows_in_flight",
    "rewrite_of",
    "write_converted",
]

_DATA_FOLDERS = ("tables", "changelog", "files")

Phase = Literal["fold", "copy", "compare"]
Rewrite = Literal["nothing", "log", "source-logs", "everything"]
"""The part that a conversion rewrites: nothing; the changelog, into deltas; only the source logs; all of the state."""

CompareStates = Callable[[OpenedSnapshot, Store, Manifest, Reached], list[str]]
"""Compares the states of a source with those of a target without a manifest; returns the differences, for people."""

HERE_BYTES_MAX = 256 * MIB
"""A snapshot up to this size is converted in one process: that takes less time than starting a Spark session."""


@dataclass(frozen=True, kw_only=True)
class ConversionResult:
    """A conversion that is done.

    Attributes:
        manifest: the target's manifest.
        rewritten: the part that was rewritten.
        repeated: the conversion had been done before; nothing was written.
        pinned: whether the source could be pinned during the conversion. A read-only source cannot be.
        tables_written, bytes_written: written by folding. objects_copied, bytes_copied: copied unchanged.
        states: number of states that were compared.
    """

    manifest: Manifest
    rewritten: Rewrite
    repeated: bool = False
    pinned: bool = True
    tables_written: int = 0
    bytes_written: int = 0
    objects_copied: int = 0
    bytes_copied: int = 0
    states: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Intent:
    """`conversion.json`.

    Attributes:
        uid: of the target.
        job_uid, snapshot_id, commit_id: identify the snapshot that is converted.
        to: the target format; another attempt may choose another one.
    """

    uid: str
    job_uid: str
    snapshot_id: int
    commit_id: str
    to: str
    started_at_ms: int


def is_of_format(manifest: Manifest, to: SnapshotFormat) -> bool:
    """Whether a snapshot fulfils a format; a snapshot of a stricter format does too."""
    if to == "changelog":
        return manifest.shards is None
    if to == "incremental":
        return not manifest.segments
    return manifest.snapshot_format == "canonical" and all(
        not state.history for operator in manifest.operators for state in operator.states
    )


def refuse_rows_in_flight(source: OpenedSnapshot, to: SnapshotFormat) -> None:
    """Refuse rows in flight: the canonical format holds only live rows of the state. Call this before any write.

    Raises:
        InvalidConfiguration: a batch is not finished in the snapshot: rows are in flight, or something is due.
    """
    batch = source.manifest.open_batch
    if to != "canonical" or batch is None:
        return
    rows = sum(operator.rows for operator in batch.operators)
    of = ", ".join(operator.uid for operator in batch.operators)
    what = f"about {rows:,} rows are in flight ({of})" if rows else "what its newest batch made due is not done"
    name = source.info.name
    raise InvalidConfiguration(
        f"snapshot {source.place} has no canonical form: {what}, and the format has no place for them. Let the running "
        f"job process them first: `stillstate savepoint {name} NAME --drain-inflight` (start it if it does not run), "
        "and convert that savepoint. `--to incremental` and `--to changelog` carry rows in flight. Nothing was written"
    )


def rewrite_of(manifest: Manifest, to: SnapshotFormat) -> Rewrite:
    """Return the part that must be rewritten to convert a snapshot to a format; pure."""
    if is_of_format(manifest, to):
        return "nothing"
    if to == "incremental" and not manifest.state_segments:
        return "source-logs"
    return "log" if to == "incremental" and manifest.shards is None else "everything"


def convert(
    source: OpenedSnapshot,
    target: Store,
    to: SnapshotFormat,
    *,
    clock: Clock,
    ids: Ids,
    compare: CompareStates = compare_here,
    fold: FoldUnits | None = None,
    on_progress: Callable[[Phase, int, int], None] | None = None,
    holder: str = "convert",
    sizes: MaterializationSizes | None = None,
    threads: int = 16,
) -> ConversionResult:
    """Convert a snapshot to another format, in a separate folder. Atomic; repeat it after any error or crash.

    The target is a separate job (with another uid), whose snapshot came from the source. A job that is started from it
    continues at the source's position. Output that the source had staged and not yet published is left out: the source
    publishes it.

    Args:
        source: only read, except for a pin.
        target: an empty folder, or one with an interrupted conversion of the same snapshot.
        compare, fold: run in this thread by default; `spark_job.in_tasks` makes those of a Spark job.
        on_progress: called with (phase, done, total) by this thread.
        holder: name of the pin's holder.

    Raises:
        InvalidConfiguration: the target holds something else, or is inside the source or around it; or the format
            cannot represent the snapshot.
        SnapshotExpired: the source expired. MissingFile, CorruptData: it is damaged, or the comparison found a
            difference; nothing was published.
        Unavailable: repeat it.
    """
    started_s = clock.monotonic_s()
    refuse_rows_in_flight(source, to)
    _check_apart(source.root, target)
    found = _converted_before(source, target)
    intent = _read_intent(target)
    if found is not None:
        if not is_of_format(found, to):
            raise InvalidConfiguration(
                f"{target.url} holds this snapshot as {found.snapshot_format} already; convert to another folder"
            )
        if intent is not None:
            _sweep(target, found)
        return ConversionResult(
            manifest=found, rewritten="nothing", repeated=True, seconds=clock.monotonic_s() - started_s
        )
    _check_free(source, target, intent)
    actor = Actor(clock, ids)
    with kept_pin(
        source.root,
        source.manifest.snapshot_id,
        reason="convert",
        holder=holder,
        actor=actor,
        # A read-only source may be deleted meanwhile by its owner. Then a file is missing, and nothing is published.
        do_without=(StoreRefused,),
    ) as kept:
        is_pinned = kept.is_pinned
        work = _Conversion(
            source=source,
            target=target,
            to=to,
            actor=actor,
            compare=compare,
            fold=fold,
            sizes=sizes or MaterializationSizes(),
            threads=threads,
            beat=kept.beat,
        )
        try:
            result = work.go(on_progress or (lambda phase, done, total: None))
        except MissingFile as error:
            if read_boundary(source.root).keeps(source.manifest.snapshot_id):
                raise
            raise SnapshotExpired(
                f"snapshot {source.place} expired while it was converted; nothing was published. Choose a newer one"
            ) from error
    # Files of other attempts. If the folder was empty at the start, it holds only files of this attempt.
    if intent is not None:
        _sweep(target, result.manifest)
    else:
        target.delete(CONVERSION_FILE)
    return replace(result, pinned=is_pinned, seconds=clock.monotonic_s() - started_s)


def write_converted(
    source: OpenedSnapshot,
    target: Store,
    to: SnapshotFormat,
    adopt: Callable[[Manifest], Manifest],
    *,
    clock: Clock,
    ids: Ids,
    on_progress: Callable[[Phase, int, int], None],
    compare: CompareStates = compare_here,
    fold: FoldUnits | None = None,
    independent: bool = False,
) -> ConversionResult:
    """Do a conversion except for its end: write and compare all objects that the target's manifest names. The caller,
    which owns the target, holds the source and creates the manifest.

    Args:
        adopt: turns a draft into the target's own manifest.
        independent: see `Copier`.

    Raises:
        MissingFile, CorruptData: the source is damaged, or differs from the written objects. Unavailable: repeat it.
    """
    return _Conversion(
        source=source,
        target=target,
        to=to,
        actor=Actor(clock, ids),
        compare=compare,
        fold=fold,
        sizes=MaterializationSizes(),
        threads=16,
        beat=lambda: None,
        independent=independent,
    ).write(adopt, on_progress)


# --- the target ----------------------------------------------------------------------------------------------------


def _check_apart(source: Store, target: Store) -> None:
    one, other = source.url.rstrip("/") + "/", target.url.rstrip("/") + "/"
    if one.startswith(other) or other.startswith(one):
        raise InvalidConfiguration(
            f"the target {target.url} is the source {source.url}, or lies in it or around it; choose a folder of its "
            "own"
        )


def _converted_before(source: OpenedSnapshot, target: Store) -> Manifest | None:
    """Return the target's snapshot, if this source was converted to it."""
    if read_job_info(target) is None:
        return None
    manifest = Catalog.of_root(target).latest()
    if manifest is None:
        return None
    came = manifest.origins[-1] if manifest.origins else None
    if came is None or came.mode != "CONVERT" or came.commit_id != source.manifest.commit_id:
        raise InvalidConfiguration(
            f"{target.url} holds snapshot {manifest.snapshot_id} of job {manifest.job_uid}, which did not come from "
            f"{source.place}; nothing was changed. Convert to an empty folder"
        )
    return manifest


def _read_intent(target: Store) -> _Intent | None:
    try:
        data = target.read(CONVERSION_FILE, SMALL_JSON_BYTES_MAX)
    except FileNotFoundError:
        return None
    return decode_document("conversion", _Intent, data, f"{target.url}/{CONVERSION_FILE}")


def _check_free(source: OpenedSnapshot, target: Store, intent: _Intent | None) -> None:
    if intent is not None:
        if intent.commit_id != source.manifest.commit_id:
            raise InvalidConfiguration(
                f"{target.url} holds the beginning of a conversion of snapshot {intent.snapshot_id} of job "
                f"{intent.job_uid}, not of {source.place}; repeat that one, or empty the folder"
            )
        return
    there = next(iter(target.list_objects("")), None)
    if there is not None:
        raise InvalidConfiguration(
            f"{target.url} is not empty: it holds {there.path}; nothing was changed. Convert to an empty folder"
        )


def _sweep(target: Store, manifest: Manifest) -> None:
    """Remove the data of earlier attempts: objects that the snapshot does not name. After this the folder holds only a
    conversion."""
    named = {ref.path for ref in references(target, manifest)}
    there = [found.path for folder in _DATA_FOLDERS for found in target.list_objects(folder)]
    there += [name for name in target.list_names("") if name.startswith("_probe-")]
    # In this order: a run claims its term, and a fold its pin, before it writes data. So the listed objects do not
    # belong to a run or a fold.
    if not target.list_names(TERMS_DIR) and not target.list_names(MATERIALIZATIONS_DIR):
        for path in there:
            if path not in named:
                target.delete(path)
    target.delete(CONVERSION_FILE)


# --- the work ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Conversion:
    source: OpenedSnapshot
    target: Store
    to: SnapshotFormat
    actor: Actor
    compare: CompareStates
    fold: FoldUnits | None
    sizes: MaterializationSizes
    threads: int
    beat: Callable[[], object]
    independent: bool = False

    def go(self, tell: Callable[[Phase, int, int], None]) -> ConversionResult:
        """Do all steps from the intent to the manifest."""
        info = self._begin()
        done = self.write(lambda draft: self._adopted(draft, info), tell)
        create_manifest(self.target, done.manifest, done.manifest.encode())
        return done

    def write(self, adopt: Callable[[Manifest], Manifest], tell: Callable[[Phase, int, int], None]) -> ConversionResult:
        """Write all objects that the target's manifest names, and compare them with the source. The caller creates the
        manifest.

        Args:
            adopt: turns the draft into the target's own manifest.
        """

        def reached(phase: Phase) -> Reached:
            def note(done: int, total: int) -> None:
                self.beat()
                tell(phase, done, total)

            return note

        manifest = self.source.manifest
        rewritten = rewrite_of(manifest, self.to)
        record = self._folded(rewritten, reached("fold"))
        draft = _described(apply(manifest, record) if record is not None else manifest, rewritten)
        draft = adopt(draft)
        written = {t.path for t in (*record.base, *record.deltas)} if record is not None else set()
        written |= {f.path for f in record.source_logs} if record is not None else set()
        objects, copied = self._copy(_without(draft, written), reached("copy"))
        differences = self.compare(self.source, self.target, draft, reached("compare"))
        if differences:
            raise CorruptData(
                f"{self.source.place} and its conversion in {self.target.url} differ: {'; '.join(differences[:5])}. "
                "Nothing was published. Look at the source with `stillstate verify`; if it is sound, please report this"
            )
        return ConversionResult(
            manifest=draft,
            rewritten=rewritten,
            tables_written=len(written),
            bytes_written=record.written_bytes if record is not None else 0,
            objects_copied=objects,
            bytes_copied=copied,
            states=sum(len(operator.states) for operator in draft.operators),
        )

    def _begin(self) -> JobInfo:
        """Record the target's content and its job. Concurrent attempts agree on both.

        Raises:
            InvalidConfiguration: another process began a job, or another conversion, in the target meanwhile.
        """
        manifest, of, now_ms = self.source.manifest, self.source.info, self.actor.clock.now_ms()
        mine = _Intent(
            uid=self.actor.ids.uid(),
            job_uid=manifest.job_uid,
            snapshot_id=manifest.snapshot_id,
            commit_id=manifest.commit_id,
            to=self.to,
            started_at_ms=now_ms,
        )
        proposal = Proposal(CONVERSION_FILE, encode_document("conversion", mine), mine)
        intent = create_agreed(self.target, proposal, lambda: _read_intent(self.target))
        # Not earlier: after a kill, the probe's file would look like the beginning of another job or conversion.
        self.target.probe()
        if intent is not None and intent.commit_id == manifest.commit_id:
            info = JobInfo(
                uid=intent.uid,
                name=of.name,
                max_parallelism=of.max_parallelism,
                format_version=FORMAT_VERSION,
                created_at_ms=intent.started_at_ms,
            )
            job = Proposal(JOB_FILE, encode_document("job", info), info)
            there = create_agreed(self.target, job, lambda: read_job_info(self.target))
            if there is not None and there.uid == intent.uid:
                return there
        raise InvalidConfiguration(
            f"somebody else began to use {self.target.url} while this conversion started; convert to another folder"
        )

    def _folded(self, rewritten: Rewrite, reached: Reached) -> Record | None:
        if rewritten == "nothing":
            return None
        root, manifest, now_ms = self.source.root, self.source.manifest, self.actor.clock.now_ms()
        # A pin that is never stored: it gives the files of this attempt their names.
        pin = Pin(
            record_id=0,
            job_uid=manifest.job_uid,
            snapshot_id=manifest.snapshot_id,
            writer=self.actor.ids.uid(),
            started_at_ms=now_ms,
            heartbeat_ms=now_ms,
        )
        if rewritten == "source-logs":
            return self._with_source_logs(pin)
        return fold_snapshot(
            root,
            manifest,
            "major" if rewritten == "everything" else "minor",
            pin,
            settings=JobSettings(),
            sizes=self.sizes,
            clock=self.actor.clock,
            fold=self.fold or fold_here(root, self.actor.ids, into=self.target),
            reached=reached,
            into=self.target,
        )

    def _with_source_logs(self, pin: Pin) -> Record:
        """Keep the state as it is; move the source logs from segments into a file."""
        root, manifest = self.source.root, self.source.manifest
        logs, removed = fold_source_logs(root, manifest, pin.writer, everything=False, into=self.target)
        return Record(
            record_id=0,
            job_uid=manifest.job_uid,
            snapshot_id=manifest.snapshot_id,
            writer=pin.writer,
            mode="minor",
            started_at_ms=pin.started_at_ms,
            finished_at_ms=self.actor.clock.now_ms(),
            view=view_of(manifest, manifest.snapshot_id),
            source_logs=logs,
            removed_source_logs=removed,
            written_bytes=sum(f.bytes for f in logs),
        )

    def _adopted(self, draft: Manifest, info: JobInfo) -> Manifest:
        """Return the draft as the target's own snapshot."""
        manifest = self.source.manifest
        origin = OriginEntry(
            self.source.info.name, manifest.job_uid, manifest.snapshot_id, manifest.commit_id, "CONVERT"
        )
        return replace(
            draft,
            format_version=format_of(draft),
            job_uid=info.uid,
            term=0,
            commit_id=self.actor.ids.uid(),
            kind="checkpoint",
            created_at_ms=self.actor.clock.now_ms(),
            outputs=(),
            versions={},
            previous=None,
            epoch=manifest.epoch or manifest.snapshot_id,
            origins=(*manifest.origins, origin),
            abandoned=(),
            undelivered=(),
            left_epochs=manifest.left_epochs if info.uid == manifest.job_uid else (),
            withdrawn=(),
        )

    def _copy(self, kept: Manifest, reached: Reached) -> tuple[int, int]:
        def note(progress: CopyProgress) -> None:
            reached(progress.objects_done, progress.objects)

        needed = needed_objects(self.source.root, kept)
        with Copier(
            self.source.root,
            self.target,
            ids=self.actor.ids,
            progress=note,
            threads=self.threads,
            verified=True,
            independent=self.independent,
        ) as copier:
            copier.copy(needed.values())
        return copier.objects_copied, copier.bytes_copied


def _described(draft: Manifest, rewritten: Rewrite) -> Manifest:
    """Adjust the manifest's description of its states. If all rows were rewritten, they have the newest columns, and
    nothing is left of dropped states."""
    if rewritten != "everything":
        return draft
    operators = tuple(
        replace(o, dropped={}, states=tuple(replace(s, history=()) for s in o.states)) for o in draft.operators
    )
    return replace(draft, operators=operators)


def _without(manifest: Manifest, paths: set[str]) -> Manifest:
    """Return the manifest without the objects that were just written: the remaining ones are copied."""
    layers = tuple(
        LayerEntry(
            layer.first_snapshot_id,
            layer.last_snapshot_id,
            tuple(t for t in layer.tables if t.path not in paths),
            tuple(f for f in layer.source_logs if f.path not in paths),
        )
        for layer in manifest.layers
    )
    return replace(manifest, layers=layers)
