"""Writes the golden job roots of this version: `PYTHONPATH=. python tests/state_runtime/make_golden.py FOLDER`.

Run once per format, by the code of that format, and kept below `golden/`: what is written there is never written again. `on` has a
changelog, tables and parts of every kind of state; `off` and `off-rocksdb` have files of shards; `inflight` has rows in flight.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from model import CountingIds, FakeClock

from state_runtime.base.actor import Actor
from state_runtime.base.progress import Progress
from state_runtime.changelog.writer import source_log_changes
from state_runtime.materialize import apply, materialize
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.document import FORMAT_VERSION
from state_runtime.snapshot.fencing import open_job_root, open_run
from state_runtime.snapshot.manifest import (
    Manifest,
    OperatorEntry,
    SchemaVersion,
    SourcePosition,
    StagedFile,
    StagedOutput,
    StateEntry,
    TimeEntry,
)
from state_runtime.snapshot.term_files import RunStatus, write_status
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.keyhash import hash_key, hash_rows
from state_runtime.state.table import StateSchema, entry_of_time, slice_hash_range
from state_runtime.store import open_store
from state_runtime.task import persist_files
from tests.stored import write_segment, write_task_changes

STARTED_MS = 1_700_000_000_000
CHANGED_AT = 6  # first snapshot with the new columns of `count`, and without `gone`
PARALLELISM = 4
NAMES = [f"k{n:02d}" for n in range(12)]
KEYS = pa.schema([("name", pa.string())])
NONE = pa.schema([])
COUNT_1 = StateSchema(KEYS, pa.schema([("n", pa.int32())]))
COUNT_2 = StateSchema(KEYS, pa.schema([("n", pa.int64()), ("s", pa.string())]), None, "expires")
LOG = StateSchema(KEYS, pa.schema([("x", pa.string())]), NONE)
SEEN = StateSchema(KEYS, pa.schema([("v", pa.int64())]), pa.schema([("m", pa.int64())]))
TIMERS = StateSchema(KEYS, NONE, NONE, "due")
SPANS = StateSchema(KEYS, pa.schema([("total", pa.float64()), ("tags", pa.list_(pa.string()))]), NONE, "due")
GONE = StateSchema(KEYS, pa.schema([("z", pa.string())]))


@dataclass(frozen=True)
class Row:
    """A row to be: None as values is a tombstone, and with entry 0 a clear marker."""

    name: str | None
    values: tuple[Any, ...] | None
    entry: int = 0
    entry_key: int | None = None
    time: int | None = None


def batch(schema: StateSchema, rows: Sequence[Row]) -> pa.RecordBatch:
    hashes = {n: int(hash_rows([pa.array([n], pa.string())])[0]) for n in {r.name for r in rows}}
    ordered = sorted(rows, key=lambda r: (hashes[r.name], r.entry))
    return schema.batch(
        np.array([hashes[r.name] for r in ordered], dtype=np.uint64),
        np.array([r.values is None for r in ordered], dtype=np.bool_),
        [pa.array([r.name for r in ordered], pa.string())],
        [
            pa.array([None if r.values is None else r.values[at] for r in ordered], f.type)
            for at, f in enumerate(schema.values)
        ],
        entries=None if schema.entries is None else np.array([r.entry for r in ordered], dtype=np.uint64),
        entry_columns=[pa.array([r.entry_key for r in ordered], f.type) for f in schema.entries or ()],
        times=pa.array([r.time for r in ordered], pa.int64()) if schema.time else None,
    )


def listed(name: str, epoch: int, number: int, text: str) -> Row:
    return Row(name, (text,), (epoch << 28) + number)


def mapped(name: str, key: int, value: int | None) -> Row:
    return Row(name, None if value is None else (value,), int(hash_key([pa.array([key])])), key)


def at_time(at_ms: int) -> int:
    return int(entry_of_time(np.array([at_ms], dtype=np.int64))[0])


def timer(name: str, at_ms: int, gone: bool = False) -> Row:
    return Row(name, None if gone else (), at_time(at_ms), None, None if gone else at_ms)


@dataclass
class Writer:
    """Plays driver and tasks."""

    folder: Path
    ids: CountingIds = field(default_factory=CountingIds)
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.catalog = Catalog(open_store(str(self.folder)), "on", self.clock)
        self.root = self.catalog.root
        self.info = open_job_root(self.root, "on", clock=self.clock, ids=self.ids)
        empty = Manifest(FORMAT_VERSION, self.info.uid, 0, 0, "", "checkpoint", 0, PARALLELISM)
        self.committer = open_run(self.catalog, self.info, empty, actor=Actor(self.clock, self.ids, "host", 1))

    def operators(self, snapshot_id: int) -> tuple[OperatorEntry, ...]:
        if snapshot_id < CHANGED_AT:
            count = StateEntry("count", "value", "`n` int")
        else:
            history = (SchemaVersion(CHANGED_AT, "`n` int", "", STARTED_MS + 1000 * (CHANGED_AT - 1)),)
            count = StateEntry("count", "value", "`n` bigint, `s` string DEFAULT 'none'", "", "expires", 0, history)
        states = (
            count,
            StateEntry("log", "list", "`x` string"),
            StateEntry("seen", "map", "`v` bigint", "`m` bigint"),
            StateEntry("$timers", "timers", "", "", "due"),
            StateEntry("spans", "rows", "`total` double, `tags` array<string>", "", "due"),
        )
        gone = (StateEntry("gone", "value", "`z` string"),) if snapshot_id < CHANGED_AT else ()
        return (
            OperatorEntry(
                "op",
                "stateful-processor",
                "`name` string",
                (*states, *gone),
                "ProcessingTime/Update",
                STARTED_MS + 50_000,
                dropped={} if gone else {"gone": CHANGED_AT},
            ),
        )

    def epoch(
        self,
        *epochs: dict[str, tuple[StateSchema, list[Row]]],
        inline_bytes_max: int = 1 << 20,
        line: str = "",
        base: Manifest | None = None,
        operator: str = "op",
        job_uid: str = "",
        **changed: Any,
    ) -> Manifest:
        """Several epochs that end in one checkpoint, oldest first."""
        base = base or self.committer.last
        snapshot_id, term = base.snapshot_id + 1, self.committer.term.term
        tasks = [
            write_task_changes(
                self.root,
                term=term,
                operator=operator,
                hash_range=hash_range_of_shard(shard, PARALLELISM),
                changes=parts,
                inline_bytes_max=inline_bytes_max,
                ids=self.ids,
            )
            for states in epochs
            for shard in range(PARALLELISM)
            if (parts := _of_shard({s: batch(*rows) for s, rows in states.items()}, shard))
        ]
        if line:
            tasks.append(source_log_changes(0, [line]))
        segment = write_segment(
            self.root, tasks, job_uid=job_uid or self.info.uid, term=term, snapshot_id=snapshot_id, ids=self.ids
        )
        self.clock.advance_s(1)
        numbers = Progress(snapshot_id=snapshot_id, batch_id=snapshot_id, input_rows=10, state_rows=20, changed_rows=5)
        return self.committer.commit(
            replace(
                base,
                kind="checkpoint",
                epoch=base.epoch + len(epochs),
                operators=self.operators(snapshot_id),
                time=TimeEntry(STARTED_MS + 1000 * snapshot_id, STARTED_MS, {"at": STARTED_MS + 500}),
                source=_position(snapshot_id),
                segments=(*base.segments, *([segment] if segment is not None else [])),
                versions={"op": "".join(f"{snapshot_id * 16 + s:016x}" for s in range(PARALLELISM))},
                progress=numbers,
                previous=base.progress,
                **{"outputs": (), **changed},
            )
        )

    def folded(self, mode: Any) -> Manifest:
        """The newest content with its log folded; not committed."""
        record = materialize(self.root, self.committer.last, mode, clock=self.clock, ids=self.ids)
        return apply(self.committer.last, record)


def _of_shard(batches: dict[str, pa.RecordBatch], shard: int) -> dict[str, pa.RecordBatch]:
    low, high = hash_range_of_shard(shard, PARALLELISM)
    parts = {state: slice_hash_range(whole, low, high) for state, whole in batches.items()}
    return {state: part for state, part in parts.items() if part.num_rows}


def _position(snapshot_id: int) -> SourcePosition:
    def offsets(batch_id: int) -> str:
        return f'v1\n{{}}\n{{"logOffset":{batch_id}}}' if batch_id >= 0 else ""

    at = snapshot_id - 2
    return SourcePosition(at, '{"id":"query"}', offsets(at), offsets(at - 1), "v1\n{}", (0,))


def _seen(batch_id: int) -> str:
    return f'{{"path":"file:///in/{batch_id}","timestamp":{batch_id},"batchId":{batch_id}}}'


def write_on(folder: Path) -> None:
    """What `EXPECTED` of test_golden.py says, by way of everything that may lie between."""
    job = Writer(folder)
    due = STARTED_MS + 50_000
    spans = [
        Row("k00", (1.5, ["a", None]), at_time(STARTED_MS), None, due),
        Row("k00", (2.5, []), at_time(-60_000), None, due + 1),
        Row("k05", (None, None), at_time(STARTED_MS), None, None),
    ]
    job.epoch(
        {
            "count": (COUNT_1, [Row(n, (at,)) for at, n in enumerate(NAMES)] + [Row(None, (-1,))]),
            "log": (LOG, [listed(n, 2, j, f"{n}-{j}") for n in NAMES[:3] for j in (1, 2)]),
            "seen": (SEEN, [mapped("k00", m, m * 10) for m in (1, 2, 3)]),
            "$timers": (TIMERS, [timer(n, due + at) for at, n in enumerate(NAMES[4:8])]),
            "spans": (SPANS, spans),
            "gone": (GONE, [Row("k00", ("of no use",))]),
        },
        line=_seen(0),
    )
    base = job.folded("major")
    job.epoch(
        {
            "count": (COUNT_1, [Row("k00", (100,)), Row("k01", None)]),
            "log": (LOG, [Row("k00", None), listed("k00", 3, 1, "again")]),
        },
        base=base,
        line=_seen(1),
    )
    base = job.folded("minor")
    job.epoch({"total": (COUNT_1, [Row("k00", (7,))])}, base=base, operator="given-up", line=_seen(2))
    # Two epochs in one segment: the later hides the earlier, and its clear marker does not hide itself.
    job.epoch(
        {"log": (LOG, [listed("k03", 6, 1, "hidden")]), "count": (COUNT_1, [Row("k06", (60,))])},
        {
            "log": (LOG, [Row("k03", None), listed("k03", 7, 1, "shown")]),
            "count": (COUNT_1, [Row("k06", (61,)), Row("k07", None)]),
        },
        line=_seen(3),
    )
    job.epoch(
        {
            "count": (
                COUNT_2,
                [
                    Row("k02", (200, "two"), time=STARTED_MS + 10_000_000),
                    Row("k03", (300, "gone"), time=STARTED_MS + 7_000),
                    Row("k04", None),
                ],
            ),
            "seen": (SEEN, [mapped("k00", 1, None), mapped("k00", 2, 22)]),
            "$timers": (TIMERS, [timer("k04", due, gone=True)]),
            "spans": (SPANS, [Row("k00", None, at_time(STARTED_MS))]),
        },
        inline_bytes_max=0,
        line=_seen(4),
    )
    staged = (StagedOutput("out", 7, (StagedFile("staging/1/a.parquet", "a.parquet", 10, 1),)),)
    newer = _newer(job) if FORMAT_VERSION >= 4 else {}
    last = job.epoch({"count": (COUNT_2, [Row("k05", (500, None))])}, line=_seen(5), **{"outputs": staged, **newer})
    _status(job, last)


def _newer(job: Writer) -> dict[str, Any]:
    """What format 4 added: a segment of the job that this one was started from, a boundary, a pin."""
    from state_runtime.snapshot.expiry_boundary import advance_boundary
    from state_runtime.snapshot.manifest import OriginEntry
    from state_runtime.snapshot.pins import pin_snapshot

    parent = "f" * 32
    origin = OriginEntry("parent", parent, 7, "c" * 32, "NO_CLAIM")
    job.epoch(
        {"count": (COUNT_2, [Row("k08", (800, "of the parent"))])}, job_uid=parent, line=_seen(6), origins=(origin,)
    )
    advance_boundary(job.root, lambda b: replace(b, snapshot_id=2, kept=(1,)), clock=job.clock, ids=job.ids)
    advance_boundary(job.root, lambda b: replace(b, snapshot_id=4, kept=(3,)), clock=job.clock, ids=job.ids)
    pin_snapshot(job.root, 5, reason="user", holder="golden", note="kept", clock=job.clock, ids=job.ids)
    return {"origins": (origin,), "abandoned": ((3, 3),)}


def _status(job: Writer, last: Manifest) -> None:
    term = job.committer.term
    write_status(
        job.root,
        RunStatus(
            term.term,
            term.run_uid,
            "stopped",
            job.clock.now_ms(),
            term.started_at_ms,
            2.0,
            term.pid,
            term.host,
            last.snapshot_id,
            last.source.batch_id if last.source is not None else -1,
        ),
    )


def write_off(folder: Path, name: str, backend: str) -> None:
    """Files of shards: some in the listing, some as objects, of two epochs and runs."""
    from test_changelog_off import Run

    persist_files.SMALL_FILE_BYTES_MAX = 1500 if backend == "arrow" else 1000
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        keys = [f"key-{n:03d}" for n in range(60)]
        run = Run(work, 2, backend)
        run.epoch(*keys)
        run.epoch(*keys[:5])
        again = Run(work, 3, backend, host="other")
        again.epoch(*keys[:2], keys[0])
        shutil.copytree(work / "store" / "job", folder / name)


def write_inflight(folder: Path) -> None:
    """Rows in flight of two operators, from several epochs, in segments and beside them: what is newer than format 4."""
    from inflight_root import rows_in_flight

    with tempfile.TemporaryDirectory() as scratch:
        rows_in_flight(Path(scratch), checkpoints=4, inline_bytes_max=1_500)
        shutil.copytree(Path(scratch) / "store" / "job", folder / "inflight")
    for mark in (folder / "inflight" / "boundary").iterdir():
        mark.write_text("s3://bucket/state/job")  # where the run was, which is another place each time


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    write_on(folder)
    write_off(folder, "off", "arrow")
    write_off(folder, "off-rocksdb", "rocksdb")
    write_inflight(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
