"""Few rows of many tasks in one file: the number of an epoch's files does not grow with its tasks.

A task with few rows for a sink stores no file; its acknowledgement carries them. The driver stages them before the
manifest, as tasks do: one file for each sink (docs/design/0059-packed-outputs.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from state_runtime.base.ids import Ids
from state_runtime.pipeline.staged import StagedFiles
from state_runtime.pipeline.staging import SinkSpec, rows_read
from state_runtime.task.acknowledgement import Acknowledgement

__all__ = ["pack_outputs"]

_PUTS = 8


def pack_outputs(
    acknowledged: Sequence[Acknowledgement], sinks: Mapping[str, SinkSpec], term: int, epoch: int, ids: Ids
) -> list[Acknowledgement]:
    """Stage the rows that acknowledgements carry, and return acknowledgements that name files instead.

    Rows of tasks that follow each other are in one file, named by the first of them; so a sink's rows keep their order
    also where tasks with many rows stored files of their own. No put is running when it returns or raises; files of
    a call that raised are named by nothing.

    Raises:
        StoreUnavailable: a file cannot be stored. InvalidData: a row has no folder.
    """
    runs = list(_runs(acknowledged))
    if not runs:
        return list(acknowledged)
    files: dict[tuple[str, int], StagedFiles] = {}
    with ThreadPoolExecutor(min(_PUTS, len(runs)), thread_name_prefix="pack") as pool:
        made = [pool.submit(_stage, sinks[sink], rows, term, epoch, ids.short()) for sink, _, rows in runs]
        for (sink, first, _), each in zip(runs, made, strict=True):
            files[sink, first] = each.result()

    def with_files(place: int, staged: StagedFiles) -> StagedFiles:
        return files.get((staged.sink, place), StagedFiles(staged.sink, ())) if staged.rows else staged

    return [
        replace(a, staged=tuple(with_files(place, staged) for staged in a.staged))
        for place, a in enumerate(acknowledged)
    ]


def _runs(acknowledged: Sequence[Acknowledgement]) -> Iterator[tuple[str, int, list[bytes]]]:
    """Yield, for each sink and each run of tasks between files, the place of the run's first task and its rows."""
    rows, first = defaultdict[str, list[bytes]](list), dict[str, int]()
    for place, a in enumerate(acknowledged):
        for staged in a.staged:
            if staged.files and rows[staged.sink]:
                yield staged.sink, first[staged.sink], rows.pop(staged.sink)
            if staged.rows:
                if not rows[staged.sink]:
                    first[staged.sink] = place
                rows[staged.sink].append(staged.rows)
    yield from ((sink, first[sink], own) for sink, own in rows.items() if own)


def _stage(spec: SinkSpec, rows: Sequence[bytes], term: int, epoch: int, attempt: str) -> StagedFiles:
    # Tasks have checked their rows, and added the epoch to them.
    checked = replace(spec, epoch_column=None, is_for_sql=False)
    staging = checked.open(term, epoch, 0, attempt, tasks=len(rows))
    for sent in rows:
        for batch in rows_read(sent):
            staging.write(batch)
    return staging.finish()
