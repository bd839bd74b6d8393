"""Start of a job with state: a snapshot made of DataFrames, from which a job starts.

    job = build(context)                                       # the pipeline, as it will run
    bootstrap(spark, "/data/state/seed", job, {("legs", "steps"): frame})
    job.run(spark, start_from=…"/data/state/seed")

Each DataFrame has the columns that a read of that state shows (`DisplaySchema`): rows that were read from one snapshot
can be written into another. Operators, keys, kinds and types are the pipeline's, checked before anything is read.

Rows are shuffled by key hash; tasks sort and write the tables, the driver the manifest. Atomic: see `SnapshotBuilder`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.errors import InvalidConfiguration, StillstateError
from state_runtime.base.ids import SYSTEM_IDS, Ids
from state_runtime.pipeline.plan import Planned
from state_runtime.pipeline.result_settings import result_settings
from state_runtime.reading.building import SnapshotBuilder, settled
from state_runtime.reading.fingerprint import Fingerprint
from state_runtime.reading.rows import RowLayout
from state_runtime.reading.sorting import sorted_rows
from state_runtime.reading.tables import TableWriter, WrittenTables
from state_runtime.snapshot.locate import Place
from state_runtime.snapshot.manifest import Manifest, TableEntry, TimeEntry
from state_runtime.spark.errors import marked, typed_error
from state_runtime.spark.sql import quoted
from state_runtime.state.key_groups import key_hash_sql, top_bits_sql
from state_runtime.store import Store, open_store, shared_store

__all__ = ["WriteCells", "bootstrap", "write_frame"]

_HASH, _CELL = "__stillstate_hash", "__stillstate_cell"
_BITS_MAX = 8


def bootstrap(
    spark: SparkSession,
    place: str,
    job: Planned,
    frames: Mapping[tuple[str, str], DataFrame],
    *,
    storage_options: Mapping[str, Any] | None = None,
    time: TimeEntry | None = None,
    bits: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    ids: Ids = SYSTEM_IDS,
) -> Manifest:
    """Make the first snapshot of a place.

    Args:
        place: a folder without snapshots: a job's own root, or one that jobs are started from.
        job: its pipeline declares the states. The job does not run, and its own store is not touched (unless `place` is
            in it).
        frames: by operator uid and state name; `$timers` are a processor's timers. States without a frame are empty.
        storage_options: for the store of `place`.
        time: the clocks of the snapshot, as a manifest has them. With a batch time, rows that expired by then are left
            out; without one the job's clocks begin as those of a new job.
        bits: each state has 2^bits tables, and as many tasks write them; by default as many as the session has cores.
        on_progress: called with (states written, states).

    Raises:
        InvalidPipeline: the pipeline cannot be built. InvalidConfiguration: a state that it does not have, columns that
            do not fit, rows that only their operator can make (windows, joins), or a place with snapshots.
        InvalidData: a key twice, or values that do not fit. StoreUnavailable: begin again.
    """
    where = Place.parse(place)
    if where.snapshot_id is not None:
        raise InvalidConfiguration(f"{place} names a snapshot; give the folder that the first one is made in")
    plan = job.plan().expanded(spark)
    pipeline = plan.compiled(spark, plan.opened_sources(spark))
    operators = {operator.uid: operator for operator in pipeline.operators}
    entries = {entry.uid: settled(entry) for entry in pipeline.entries}
    layouts: dict[tuple[str, str], RowLayout] = {}
    for (uid, name), frame in frames.items():
        state = entries[uid].state(name) if uid in entries else None
        if state is None:
            known = ", ".join(f"{e.uid}/{s.name}" for e in entries.values() for s in e.states) or "none"
            raise InvalidConfiguration(f"job {plan.name!r} has no state {uid}/{name}; its pipeline has: {known}")
        layout = RowLayout(entries[uid], state, operators[uid].state_schemas[name])
        layout.check(frame.columns)
        layouts[uid, name] = layout
    root = open_store(where.root_url, storage_options)
    builder = SnapshotBuilder.create(root, plan.name, [*entries.values()], mode="BOOTSTRAP", clock=clock, ids=ids)
    cells = _bits(spark) if bits is None else bits
    for done, (key, layout) in enumerate(layouts.items()):
        if on_progress is not None:
            on_progress(done, len(layouts))
        work = WriteCells(
            url=where.root_url,
            storage_options=dict(storage_options or {}),
            layout=layout,
            snapshot_id=builder.snapshot_id,
            writer=builder.writer,
            bits=cells,
        )
        builder.add(write_frame(frames[key], layout, work))
    if on_progress is not None:
        on_progress(len(layouts), len(layouts))
    return builder.commit(
        parallelism=plan.settings.parallelism or spark.sparkContext.defaultParallelism,
        time=time,
        session=result_settings(spark.conf),
    )


def _bits(spark: SparkSession) -> int:
    return min(_BITS_MAX, max(0, spark.sparkContext.defaultParallelism - 1).bit_length())


def write_frame(frame: DataFrame, layout: RowLayout, work: WriteCells) -> WrittenTables:
    """Write a state's tables in tasks, one cell in each."""
    by_own = {own: name for name, (role, own) in layout.shown.roles().items() if role == "key"}
    # Keys are hashed in the state's types: equal keys of other types have other hashes.
    keys = [f"CAST({quoted(by_own[c.name])} AS {c.type_text})" for c in layout.versions.keys]
    hashed = frame.selectExpr("*", f"{key_hash_sql(keys)} AS {_HASH}")
    cell = top_bits_sql(_HASH, work.bits) if work.bits else "0L"
    # The number has at most as many bits as an int.
    placed = hashed.selectExpr("*", f"CAST({cell} AS INT) AS {_CELL}").repartitionById(1 << work.bits, col(_CELL))
    # `mapInArrow` takes a dot in a name for a field of a struct: the columns are matched by position.
    work = replace(work, columns=tuple(placed.columns))
    numbered = placed.toDF(*(f"c{number}" for number in range(len(placed.columns))))
    try:
        rows = numbered.mapInArrow(work, "tables string").collect()
    except Exception as error:
        typed = typed_error(error)
        if typed is error:
            raise
        raise typed from error
    return sum((_decoded(row.tables) for row in rows), WrittenTables())


@dataclass(frozen=True)
class WriteCells:
    """A task's work: sort its rows, write its tables, return their names. A failed attempt leaves files that no
    manifest names."""

    url: str
    storage_options: dict[str, Any]
    layout: RowLayout
    snapshot_id: int
    writer: str
    bits: int
    columns: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"WriteCells({self.layout.operator.uid!r}, {self.layout.state.name!r})"

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            written = self._write(shared_store(self.url, self.storage_options), batches)
        except StillstateError as error:
            raise marked(error) from error
        yield pa.RecordBatch.from_pydict({"tables": [json.dumps(asdict(written))]})

    def _write(self, root: Store, batches: Iterable[pa.RecordBatch]) -> WrittenTables:
        layout = self.layout
        tables = TableWriter(
            root,
            layout.operator,
            layout.state,
            snapshot_id=self.snapshot_id,
            writer=self.writer,
            ids=SYSTEM_IDS,
            bits=self.bits,
            schema=layout.schema,
        )
        return tables.write(sorted_rows(self._stored(batches), layout.versions.declared))

    def _stored(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                batch = batch.rename_columns(list(self.columns))
                hashes = np.asarray(batch.column(batch.schema.get_field_index(_HASH))).view(np.uint64)
                names = [name for name in batch.schema.names if name not in (_HASH, _CELL)]
                yield self.layout.stored(batch.select(names), hashes)


def _decoded(text: str) -> WrittenTables:
    found = json.loads(text)
    return WrittenTables(
        tuple(TableEntry(**table) for table in found["tables"]),
        tuple((uid, at) for uid, at in found["next_due_ms"]),
        tuple(((uid, name), Fingerprint(**of)) for (uid, name), of in found["fingerprints"]),
    )
