"""Compacts a Parquet sink's folder: many small files of closed epochs become few large ones, beside a running job.

    1  end what others have begun             a compaction whose process died left rows that readers see twice
    2  list, and plan                         maintenance/output/plan.py
    3  for each group: merge into one file    on the local disk, then below `_stillstate/compacting/`; read back
    4  agree on it                            pipeline/compactions.py: from here on it counts, whoever ends it
    5  give it its name, remove the inputs

A crash before 4 leaves a file that a later compaction removes; behind it, what 1 ends. Memory: one row group of the new
file. Disk: one input and the new file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from state_runtime.base import faults
from state_runtime.base.actor import Actor
from state_runtime.base.errors import CorruptData
from state_runtime.maintenance.output.plan import (
    CompactionPlan,
    DataFile,
    Folder,
    Group,
    compacted_name,
    plan_compaction,
)
from state_runtime.pipeline.commit_log import logged_files
from state_runtime.pipeline.compactions import (
    COMPACTING_DIR,
    Compaction,
    agree,
    finish,
    finish_all,
    numbers_of,
    staged_of,
)
from state_runtime.pipeline.output_layout import footer_of
from state_runtime.pipeline.output_upkeep import MIN_AGE_S, TARGET_BYTES
from state_runtime.reading.fingerprint import Fingerprint
from state_runtime.snapshot.manifest import StagedFile
from state_runtime.store import Store

__all__ = ["Compacted", "Keep", "compact", "plan_folder", "write_anew"]

Keep = Callable[[pa.RecordBatch], pa.RecordBatch]

_ABANDONED_S: Final = 86_400.0
"""Age of a file below `_stillstate/compacting/` that nobody will agree on any more."""
_AT_A_TIME: Final = 16
_BATCH_ROWS: Final = 1 << 16
_ROW_GROUP_ROWS: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Compacted:
    """The result of a compaction.

    Attributes:
        files, bytes: that readers saw before, of the chosen writers.
        inputs, input_bytes: files that are gone.
        outputs, output_bytes: files that took their places.
        left: files of the plan that stay: others compacted or removed them meanwhile, or they have other columns than
            their neighbours.
        ended: compactions of others that this one has ended.
    """

    files: int = 0
    bytes: int = 0
    inputs: int = 0
    input_bytes: int = 0
    outputs: int = 0
    output_bytes: int = 0
    rows: int = 0
    left: int = 0
    ended: int = 0

    def with_file(self, output: StagedFile, inputs: Sequence[DataFile]) -> Compacted:
        """Return the result with one compaction more."""
        return replace(
            self,
            inputs=self.inputs + len(inputs),
            input_bytes=self.input_bytes + sum(file.bytes for file in inputs),
            outputs=self.outputs + 1,
            output_bytes=self.output_bytes + output.bytes,
            rows=self.rows + output.rows,
        )


class _Gone(Exception):
    """An input was removed meanwhile."""


def plan_folder(
    store: Store,
    actor: Actor,
    *,
    writers: Collection[str] | None = None,
    target_bytes: int = TARGET_BYTES,
    min_age_s: float = MIN_AGE_S,
) -> CompactionPlan:
    """List a folder, and return which of its files would become one; nothing is changed. Names and sizes of all files
    are in memory.

    Args:
        writers: whose files, as the commit log names them; None is everybody's.

    Raises:
        StoreUnavailable: the listing is not complete.
    """
    # Before the listing: what it shows of a compaction up to this number is its end.
    numbers = numbers_of(store)
    known = numbers.open[0] - 1 if numbers.open else numbers.newest
    folder = Folder.of(store.list_objects(""))
    return plan_compaction(
        folder,
        known=known,
        writers=writers,
        target_bytes=target_bytes,
        logged_before_ms=_now_ms(store, actor) - int(min_age_s * 1000),
    )


def compact(
    store: Store,
    actor: Actor,
    *,
    writers: Collection[str] | None = None,
    target_bytes: int = TARGET_BYTES,
    min_age_s: float = MIN_AGE_S,
    on_progress: Callable[[int, int], None] | None = None,
) -> Compacted:
    """Compact a folder. Safe beside running jobs, and beside other compactions; each row stays there once.

    Args:
        writers: whose files, as the commit log names them; None is everybody's.
        on_progress: gets the bytes of the inputs that are done, and of all.

    Raises:
        CorruptData: an input cannot be read, or the new file has other rows. The inputs are all there.
        StoreUnavailable, OutcomeUnknown: start again; the next compaction ends what was agreed on.
    """
    ended = finish_all(store)
    _remove_abandoned(store, actor)
    plan = plan_folder(store, actor, writers=writers, target_bytes=target_bytes, min_age_s=min_age_s)
    result, done = Compacted(files=plan.files, bytes=plan.bytes, ended=ended), 0
    for group in plan.groups:
        before = result.inputs
        for run in _alike(store, _published(store, group)):
            result = write_anew(store, actor, plan.known, run, result)
        result = replace(result, left=result.left + len(group.files) - (result.inputs - before))
        done += group.bytes
        if on_progress is not None:
            on_progress(done, plan.input_bytes)
    return result


def write_anew(
    store: Store, actor: Actor, known: int, run: Group, result: Compacted, keep: Keep = lambda batch: batch
) -> Compacted:
    """Put one file in the place of files with the same columns, unless another compaction is faster.

    Args:
        known: the newest number when the files were listed.
        keep: returns which of the rows stay; one at least does.
    """
    uid = actor.ids.uid()
    with tempfile.TemporaryDirectory(prefix="stillstate-compact-") as folder:
        try:
            output, digest = _merged(store, run, staged_of(uid), Path(folder), keep)
        except _Gone:
            return result

    def made(number: int) -> Compaction:
        return Compaction(
            uid=uid,
            at_ms=actor.clock.now_ms(),
            inputs=tuple(file.path for file in run.files),
            output=replace(output, final=compacted_name(run, number)),
            first_epoch=run.first_epoch,
            last_epoch=run.last_epoch,
            digest=digest,
        )

    faults.reach("compaction-staged")
    number = agree(store, (file.path for file in run.files), known, made)
    if number is None:
        store.delete(output.staged)
        return result
    faults.reach("compaction-agreed")
    return result.with_file(output, run.files) if finish(store, number) else result


def _merged(store: Store, run: Group, staged: str, folder: Path, keep: Keep) -> tuple[StagedFile, str]:
    """Write the rows of all inputs into one staged file, in their order, and read it back.

    Raises:
        _Gone: an input is not there any more. CorruptData: the file does not have the rows of the inputs.
    """
    written, wanted = folder / "output.parquet", Fingerprint()
    writer: pq.ParquetWriter | None = None
    try:
        for file in run.files:
            for batch in map(keep, _batches(store, file.path, folder / "input.parquet")):
                if writer is None:
                    writer = pq.ParquetWriter(written, batch.schema, compression="zstd", write_page_checksum=True)
                writer.write_batch(batch, row_group_size=_ROW_GROUP_ROWS)
                wanted += Fingerprint.of(batch)
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise _Gone  # no input has a row: there is nothing to save, and nothing to tell the columns by
    store.put_file(written, staged)
    size, found = written.stat().st_size, Fingerprint()
    for batch in _batches(store, staged, folder / "input.parquet"):
        found += Fingerprint.of(batch)
    if found != wanted:
        store.delete(staged)
        raise CorruptData(
            f"the compacted file of {run.files[0].path} and {len(run.files) - 1} others in {store.url} has {found}, "
            f"and its inputs have {wanted}; it was removed, and all inputs are there. Run `stillstate compact-output` "
            "again; if that repeats, report it"
        )
    return StagedFile(staged, "", size, found.rows), found.digest


def _batches(store: Store, path: str, local: Path) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file, by way of a local one.

    Raises:
        _Gone: it is not there. CorruptData: it is no Parquet file.
    """
    local.touch()
    try:
        store.get_file(path, local)
    except FileNotFoundError as error:
        raise _Gone(path) from error
    try:
        with pq.ParquetFile(local, page_checksum_verification=True) as file:
            yield from file.iter_batches(_BATCH_ROWS)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(store, path, error) from error


def _published(store: Store, group: Group) -> Group:
    """Return the files that the commit log names: one that only has the name of such a file is somebody else's."""
    epochs = sorted({file.first_epoch for file in group.files if not file.compaction})
    with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="compact") as pool:
        entries = pool.map(partial(logged_files, store, group.writer), epochs)
        known = {(file.final, file.bytes) for files in entries for file in files}
    return replace(group, files=tuple(f for f in group.files if f.compaction or (f.path, f.bytes) in known))


def _alike(store: Store, group: Group) -> Iterable[Group]:
    """Return runs of neighbours that have the same columns; of a run of one there is nothing to do."""
    with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="compact") as pool:
        schemas = list(pool.map(partial(_schema_of, store), group.files))
    pairs = groupby(zip(group.files, schemas, strict=True), key=lambda pair: pair[1])
    runs = [tuple(file for file, _ in run) for schema, run in pairs if schema is not None]
    return [replace(group, files=run) for run in runs if len(run) > 1]


def _schema_of(store: Store, file: DataFile) -> pa.Schema | None:
    """Return the columns of a file; None if it is gone."""
    try:
        footer = footer_of(store, file.path, file.bytes)
    except FileNotFoundError:
        return None
    try:
        return pq.read_schema(pa.BufferReader(footer)).remove_metadata()
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(store, file.path, error) from error


def _unreadable(store: Store, path: str, error: Exception) -> CorruptData:
    return CorruptData(
        f"{path} in {store.url} cannot be read as Parquet: {error}. Nothing was removed. Restore the file from a copy; "
        "or move it out of the folder, and its rows are missing"
    )


def _remove_abandoned(store: Store, actor: Actor) -> None:
    """Remove files of killed compactions, on which nobody has agreed. What was agreed on has its name by now."""
    before_ms = _now_ms(store, actor) - int(_ABANDONED_S * 1000)
    debris = ((f"{COMPACTING_DIR}/{o.path}", o) for o in store.child(COMPACTING_DIR).list_debris())
    for path, found in (*((o.path, o) for o in store.list_objects(COMPACTING_DIR)), *debris):
        if found.modified_ms < before_ms:
            store.delete(path)


def _now_ms(store: Store, actor: Actor) -> int:
    """Return the time by the clock that listings go by."""
    there = store.now_ms()
    return actor.clock.now_ms() if there is None else there
