"""Snapshots that do not simply follow the one before: taken over from another root, or gone back to; pure.

    another root's 42 ──taken over──▶ 42 of this job ──▶ 43 (fencing) ──▶ 44 …        origins
    17 ─▶ 18 ─▶ 19 ─▶ 20     17 ──gone back to──▶ 21 (fencing) ──▶ 22 …               abandoned: 18 … 20

Ids only grow in both cases: everything that is ordered by them (segments, tables, local copies) stays in order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import replace

from state_runtime.base.errors import JobRootMismatch
from state_runtime.snapshot.job_info import JobInfo, StartedFrom
from state_runtime.snapshot.manifest import Manifest, OriginEntry, SourcePosition, StagedOutput, format_of
from state_runtime.snapshot.paths import manifest_path

__all__ = [
    "check_belongs",
    "gone_back",
    "output_number",
    "pending_outputs",
    "standing_in",
    "taken_over",
    "undelivered_outputs",
    "withdrawing",
    "withdrawn_outputs",
]

_EPOCHS_PER_LOST_SNAPSHOT = 1 << 20
"""More epochs than one checkpoint ends: one epoch a second for twelve days. List elements are ordered by 36 bits of an
epoch, so tens of thousands of lost snapshots fit."""


def gone_back(target: Manifest, newest: Manifest, *, is_delivered: bool = True) -> Manifest:
    """Return the content of an older snapshot as the successor of the newest one.

    Epochs count on from the newest, so that output under an old number is never written with other rows. Which epochs
    were published since then is in `left_epochs`: a sink may take their output out of its place.

    Args:
        is_delivered: whether all output that the newest one names is published.
    """
    if (target.snapshot_id, target.commit_id) == (newest.snapshot_id, newest.commit_id):
        return newest
    # If the newest one cannot be read, going back to a copy of it abandons nothing.
    left = ((target.snapshot_id + 1, newest.snapshot_id),) if target.snapshot_id < newest.snapshot_id else ()
    return replace(
        target,
        epoch=max(output_number(target), output_number(newest)),
        outputs=pending_outputs(target, newest),
        undelivered=_left_undelivered(target, newest, is_delivered),
        # The abandoned ranges of the target are before it. They stay abandoned from here too, and nothing else before
        # the target is.
        abandoned=(*target.abandoned, *left),
        left_epochs=_joined((*target.left_epochs, (output_number(target) + 1, output_number(newest)))),
        withdrawn=newest.withdrawn,
    )


def output_number(manifest: Manifest) -> int:
    """Return the number of the newest epoch whose output a snapshot may name; manifests of format 2 have it as id."""
    return max(manifest.epoch, manifest.snapshot_id)


def _joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return ascending ranges without empty ones; those that touch are one."""
    found: list[tuple[int, int]] = []
    for first, last in ranges:
        if found and first == found[-1][1] + 1 <= last + 1:
            found[-1] = (found[-1][0], last)
        elif first <= last:
            found.append((first, last))
    return tuple(found)


def withdrawing(manifest: Manifest, sinks: Collection[str]) -> Manifest:
    """Return a snapshot that says that some sinks take the output of left epochs out of their places."""
    more = {(sink, *ends) for sink in sinks for ends in manifest.left_epochs}
    entries = {*manifest.withdrawn, *more}
    kept = {
        (sink, first, last)
        for sink, first, last in entries
        if not any(
            sink == other and low <= first and last <= high and (low, high) != (first, last)
            for other, low, high in entries
        )
    }
    return replace(manifest, withdrawn=tuple(sorted(kept)))


def withdrawn_outputs(target: Manifest, newest: Manifest) -> tuple[tuple[str, int, int], ...]:
    """Return which output of an older snapshot's history is not in the sinks' places any more: they took it out when
    the job went back behind it, and the job would go on as if it were there."""
    end = output_number(target)
    return tuple(
        (sink, first, min(last, end))
        for sink, first, last in newest.withdrawn
        if first <= end and not any(low <= first and min(last, end) <= high for low, high in target.left_epochs)
    )


def _left_undelivered(target: Manifest, newest: Manifest, is_delivered: bool) -> tuple[tuple[str, int, int], ...]:
    """What waits for a sink are the newest epochs of its output, so that a first and a last one say which."""
    left: dict[str, list[int]] = {}
    for output in () if is_delivered else newest.outputs:
        if output.files and output not in target.outputs:
            left.setdefault(output.sink, []).append(output.epoch)
    entries = {(sink, min(epochs), max(epochs)) for sink, epochs in left.items()}
    return tuple(sorted({*newest.undelivered, *entries}))


def undelivered_outputs(target: Manifest, newest: Manifest) -> tuple[StagedOutput, ...]:
    """Return the output of an older snapshot that may never have been published, and never can be: the job has left the
    snapshot's history, and gone on beside it. No other history has epochs of the same numbers."""
    return tuple(
        output
        for output in target.outputs
        if output.files
        and any(sink == output.sink and first <= output.epoch <= last for sink, first, last in newest.undelivered)
    )


def standing_in(readable: Manifest, newest_id: int) -> Manifest:
    """Let the newest readable manifest stand in for newer ones that cannot be read: for `gone_back` only.

    The number of epochs in those is unknown, so a wide range of numbers is skipped: output under a used number is never
    written with other rows.
    """
    lost = newest_id - readable.snapshot_id
    epoch = max(readable.epoch, readable.snapshot_id) + lost * _EPOCHS_PER_LOST_SNAPSHOT
    return replace(readable, snapshot_id=newest_id, epoch=epoch)


def pending_outputs(target: Manifest, newest: Manifest) -> tuple[StagedOutput, ...]:
    """Return an older snapshot's output that may not be published yet: each later one names what still waits for a sink
    (driver/waiting_outputs.py), until it is."""
    return tuple(output for output in target.outputs if output in newest.outputs)


def taken_over(
    manifest: Manifest, started: StartedFrom, info: JobInfo, outputs: tuple[StagedOutput, ...] = ()
) -> Manifest:
    """Return a foreign snapshot as the first one of a job. The same arguments give the same bytes: a repeat finds its
    own manifest.

    It keeps its id and term (the names of its files hold them), and names no local version: those belong to the other
    job.

    Args:
        info: of the job that takes it over.
        outputs: the output that the job publishes on the other's behalf.
    """
    origin = OriginEntry(started.job, started.job_uid, started.snapshot_id, started.commit_id, started.mode)
    return replace(
        manifest,
        format_version=format_of(manifest),
        job_uid=info.uid,
        commit_id=hashlib.sha256(f"{info.uid} {manifest.commit_id}".encode()).hexdigest()[:32],
        kind="fencing",
        created_at_ms=info.created_at_ms,
        epoch=max(manifest.epoch, manifest.snapshot_id),
        source=_with_query_id(manifest.source, info.uid) if manifest.source is not None else None,
        outputs=outputs,
        versions={},
        previous=None,
        origins=(*manifest.origins, origin),
        abandoned=(),
        undelivered=(),
        left_epochs=(),
        withdrawn=(),
    )


def _with_query_id(source: SourcePosition, uid: str) -> SourcePosition:
    """Set a query id per job: Spark runs no two queries of one id in a session, and jobs may share a snapshot."""
    try:
        metadata = json.loads(source.metadata)
    except ValueError:
        return source
    if not isinstance(metadata, dict) or len(uid) != 32:
        return source
    query_id = "-".join((uid[:8], uid[8:12], uid[12:16], uid[16:20], uid[20:]))
    return replace(source, metadata=json.dumps({**metadata, "id": query_id}, separators=(",", ":")))


def check_belongs(manifest: Manifest, info: JobInfo, where: str, *, own: bool) -> None:
    """Compare a snapshot with the `job.json` above it: the folder's name proves nothing, it may have been renamed.

    Args:
        own: the job of that root will continue from it; else it is only read, and may be of a job that its job came
            from.

    Raises:
        JobRootMismatch: files of two roots were mixed.
    """
    if info.uid == manifest.job_uid or (not own and info.uid in manifest.job_uids):
        return
    raise JobRootMismatch(
        f"snapshot {manifest.snapshot_id} in {where} is of job {manifest.job_uid}, but job.json there is of job "
        f"{info.name!r} ({info.uid}): files of two job roots were mixed. Nothing was changed. Restore the folder from "
        "a copy; or, if a job was deleted or moved from here before this one began and a run of it slept meanwhile, "
        f"remove {manifest_path(manifest.snapshot_id)}"
    )
