"""How large a manifest gets: real segments of many shards, states and epochs, and the manifest that lists them; no Spark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.checkpoint_workloads import ManifestSize
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.base.progress import Progress
from state_runtime.changelog.changes import TaskChanges
from state_runtime.changelog.parts import PartEntry, encode_part, sha256
from state_runtime.changelog.writer import begin_segment, source_log_changes
from state_runtime.snapshot.document import FORMAT_VERSION
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, SourcePosition, StateEntry, TimeEntry
from state_runtime.snapshot.shard_versions import ShardVersions
from state_runtime.store import open_store

__all__ = ["manifest_size"]

HASHES = 1 << 64
NOW_MS = 1_700_000_000_000
OFFSETS = "v1\n" + '{"batchWatermarkMs":0,"batchTimestampMs":1700000000000,"conf":{}}\n' + '{"logOffset":599}\n'


def manifest_size(plan: ManifestSize, folder: Path, step: Callable[[int, int], None]) -> dict[str, Any]:
    """Write an epoch's segment for each epoch, as the driver does, and encode the manifest after the last one."""
    store = open_store(str(folder / "store"))
    job_uid = SYSTEM_IDS.uid()
    changes = [
        *_changes(plan),
        source_log_changes(0, ['{"path":"file:/inbox/00000.parquet","timestamp":0,"batchId":0}']),
    ]
    segments = []
    for epoch in range(1, plan.epochs + 1):
        begun = begin_segment(store, changes, job_uid=job_uid, term=1, snapshot_id=epoch, ids=SYSTEM_IDS)
        assert begun is not None, "every task has changes"
        segments.append(begun.result())
        step(epoch, plan.epochs)
    manifest = Manifest(
        FORMAT_VERSION,
        job_uid,
        plan.epochs,
        1,
        SYSTEM_IDS.uid(),
        "checkpoint",
        NOW_MS,
        plan.shards,
        operators=tuple(_operator(uid) for uid in _operators(plan)),
        segments=tuple(segments),
        source=SourcePosition(plan.epochs - 1, '{"id":"0"}', OFFSETS, OFFSETS, 'v1\n{"nextBatchWatermarkMs":0}', (0,)),
        versions={
            uid: ShardVersions.of(SYSTEM_IDS.short() for _ in range(plan.shards)).encode() for uid in _operators(plan)
        },
        progress=Progress(plan.epochs),
        previous=Progress(plan.epochs - 1),
        time=TimeEntry(NOW_MS),
        epoch=plan.epochs,
    )
    body = manifest.encode()
    restored = Manifest.decode(body, "manifest")
    assert len(restored.segments) == plan.epochs, "what is measured must be a manifest"
    without = len(replace(manifest, segments=()).encode())
    return {**asdict(plan), "bytes": len(body), "bytes_without_segments": without}


def _operators(plan: ManifestSize) -> list[str]:
    return [f"operator-{number}" for number in range(plan.operators)]


def _operator(uid: str) -> OperatorEntry:
    return OperatorEntry(uid, "aggregate", "key BIGINT", (StateEntry("aggregate", "value", "n BIGINT, total BIGINT"),))


def _changes(plan: ManifestSize) -> list[TaskChanges]:
    """One small change of every operator and shard."""
    batch = pa.record_batch({"key": [1], "n": [1], "total": [1]})
    body = encode_part(batch).to_pybytes()
    digest, width = sha256(body), HASHES // plan.shards
    return [
        TaskChanges(
            (
                PartEntry(
                    "state", uid, "aggregate", "", 0, len(body), digest, 1, batch.nbytes,
                    shard * width, min((shard + 1) * width, HASHES) - 1,
                ),
            ),
            (body,),
        )
        for uid in _operators(plan)
        for shard in range(plan.shards)
    ]  # fmt: skip
