"""Import of a stopped native query as the first snapshot of a job: its state through Spark's own state reader, its
clocks and its source position.

Order of work, and the files that a crash leaves: the query's position and the columns of its states are read and
checked; `building.json`; `job.json`;
tables, one state after the other; the logs of seen files; a second check of the query; then the manifest,
create-if-absent. Until then there is no snapshot, no run starts in the root, and the import can be repeated; it writes
tables under new names. The checkpoint is only read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.errors import InvalidConfiguration, InvalidData
from state_runtime.base.ids import SYSTEM_IDS, Ids
from state_runtime.changelog.parts import sha256
from state_runtime.changelog.source_log import joined_texts, source_log_path
from state_runtime.importing.bootstrap import WriteCells, write_frame
from state_runtime.importing.native_checkpoint import NativeCheckpoint, check_unmoved, read_checkpoint
from state_runtime.importing.native_operators import NativeOperator, match_operators, parse_operators, refuse_plain
from state_runtime.importing.native_queries import match_kept, read_of
from state_runtime.importing.native_rows import first_line, rows_of_query
from state_runtime.pipeline.compile import CompiledPipeline
from state_runtime.pipeline.graph import OperatorNode
from state_runtime.pipeline.plan import JobPlan, Planned
from state_runtime.pipeline.source_names import source_numbers
from state_runtime.pipeline.sources import OpenedSources
from state_runtime.pipeline.watermark import POLICY_SETTING, policy_of
from state_runtime.processors.operator import Operator
from state_runtime.processors.user.stateful import StatefulProcessorOperator
from state_runtime.processors.user.timer_state import TIMERS
from state_runtime.reading.building import SnapshotBuilder, settled
from state_runtime.reading.rows import RowLayout
from state_runtime.reading.tables import WrittenTables, cell_bits
from state_runtime.snapshot.manifest import FileEntry, Manifest, OperatorEntry, OriginEntry
from state_runtime.spark.plans import stream_sources
from state_runtime.spark.query_parts import Kept
from state_runtime.spark.sql import quoted
from state_runtime.state.ddl import parse_ddl
from state_runtime.store import open_store

__all__ = ["ImportResult", "import_checkpoint"]

_READER_CONF = {"fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem", "fs.file.impl.disable.cache": "true"}


@dataclass(frozen=True)
class ImportResult:
    """The result of an import.

    Attributes:
        query_id, batch_id: the imported query, and the batch as of which it was imported.
        operators: uids by Spark's operator ids.
    """

    manifest: Manifest
    query_id: str
    batch_id: int
    operators: Mapping[int, str]
    states: int
    rows: int
    bytes: int
    seconds: float


def import_checkpoint(
    spark: SparkSession,
    checkpoint: str,
    job: Planned,
    target_url: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    operators: Mapping[int, str] | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    ids: Ids = SYSTEM_IDS,
) -> ImportResult:
    """Import the checkpoint of a native query: of any that the job has as `job.query`, or of `transformWithState` whose
    classes the job has in steps.

    Args:
        checkpoint: the query's checkpointLocation; a path or URL that both Spark and Stillstate's store can open.
        job: reads the same source with the same watermark; the same query, or the same processors with the same modes.
        target_url: an empty folder: the root of the job, or a place that it is started from.
        operators: the job's uids by Spark's operator ids, if they do not follow from the states' names; for steps.
        on_progress: called with (state, done, total).

    Raises:
        MissingSnapshot, InvalidData: the checkpoint cannot be imported; the message says why.
        InvalidConfiguration: the job does not fit it, or the target has a snapshot.
        InvalidPipeline, UserCodeError: the job cannot be built. CorruptData: the checkpoint is damaged.
        Unavailable: try again.
    """
    started_s = clock.monotonic_s()
    root = open_store(checkpoint, storage_options)
    native = read_checkpoint(root)
    _refuse_active(spark, native, root.url)
    _check_policy(spark, native, root.url)
    plan = job.plan().expanded(spark)
    opened = plan.opened_sources(spark)
    pipeline = plan.compiled(spark, opened)
    _check_sources(opened, native, root.url)
    found = parse_operators(_metadata(spark, checkpoint), root.url)
    kept = _kept(plan)
    pairs = _pairs(found, pipeline, kept, operators, root.url)
    entries = {entry.uid: settled(entry) for entry in pipeline.entries}
    with _state_reader_conf(spark):
        # All states are looked at before anything is written.
        work = [
            (number, layout, _frame(spark, checkpoint, native, number, own, layout, kept))
            for number, own in pairs
            for layout in _layouts(number, own, entries[own.uid])
        ]
        builder = _builder(plan, target_url, target_options, native, pairs, pipeline, clock, ids)
        for done, (number, layout, frame) in enumerate(work):
            if on_progress is not None:
                on_progress(f"{layout.operator.uid}/{layout.state.name}", done, len(work))
            bits = cell_bits(sum(f.bytes for f in root.list_objects(f"state/{number.number}")))
            options = dict(target_options or {})
            cells = WriteCells(
                url=target_url,
                storage_options=options,
                layout=layout,
                snapshot_id=builder.snapshot_id,
                writer=builder.writer,
                bits=bits,
            )
            builder.add(_written(frame, layout, cells))
    if on_progress is not None:
        on_progress("source position", len(work), len(work))
    logs = _source_logs(builder, native)
    check_unmoved(root, native)
    manifest = builder.commit(
        parallelism=plan.settings.parallelism or found[0].partitions,
        time=native.time(pipeline.clocks(native.policy)),
        source=replace(native.position, names=source_numbers(opened.names, None).names),
        source_logs=logs,
        epoch=1,
    )
    return ImportResult(
        manifest=manifest,
        query_id=native.query_id,
        batch_id=native.batch_id,
        operators={number.number: own.uid for number, own in pairs},
        states=len(work),
        rows=builder.written.rows,
        bytes=builder.written.bytes,
        seconds=clock.monotonic_s() - started_s,
    )


# --- does it fit? --------------------------------------------------------------------------------------------------


def _refuse_active(spark: SparkSession, native: NativeCheckpoint, where: str) -> None:
    if any(query.id == native.query_id for query in spark.streams.active):
        raise InvalidData(f"the query in {where} runs in this session; stop it, and import again")


def _check_sources(opened: OpenedSources, native: NativeCheckpoint, where: str) -> None:
    """Check the number of sources: Spark matches them by position, and fails late if there are more or fewer."""
    streams = sum(len(stream_sources(source.frame)) for source in opened.inputs)
    if streams and streams != native.sources:
        raise InvalidConfiguration(
            f"the job reads {streams} streaming sources, and the query in {where} has {native.sources}; they must be "
            "the same ones in the same order, so that it goes on where the query stood"
        )


def _metadata(spark: SparkSession, checkpoint: str) -> list[dict[str, Any]]:
    try:
        return [row.asDict() for row in spark.read.format("state-metadata").load(checkpoint).collect()]
    except PySparkException as error:
        raise InvalidData(
            f"Spark cannot read the operators of {checkpoint}: {first_line(error)}. It must have been written by "
            "Spark 4.0 or newer"
        ) from error


def _check_policy(spark: SparkSession, native: NativeCheckpoint, where: str) -> None:
    """Refuse a session whose runs would combine watermarks in another way: other rows would be late."""
    own = policy_of(spark.conf.get(POLICY_SETTING, "min"))
    if own != native.policy:
        raise InvalidConfiguration(
            f"the query in {where} has {POLICY_SETTING}={native.policy}, and this session {own}. Set it to "
            f"{native.policy} here and for the job's runs"
        )


def _kept(plan: JobPlan) -> dict[str, Kept]:
    """Return how Spark keeps the state of the operators of the job's query, by uid; {} of a job of steps."""
    nodes = [node for node in plan.graph.nodes if isinstance(node, OperatorNode)]
    kept = {node.uid: node.kept() for node in nodes if node.kept is not None}
    if kept and len(kept) < len(nodes):
        beside = next(node.uid for node in nodes if node.kept is None)
        raise InvalidConfiguration(
            f"the job has {beside!r} beside its query, and a checkpoint is of one query; add it after the import"
        )
    return kept


def _pairs(
    found: tuple[NativeOperator, ...],
    pipeline: CompiledPipeline,
    kept: Mapping[str, Kept],
    chosen: Mapping[int, str] | None,
    where: str,
) -> list[tuple[NativeOperator, Operator]]:
    """Return the job's operator for each native one."""
    if not kept:
        refuse_plain(found, where)
        return [*match_operators(found, pipeline.operators, chosen)]
    uids = match_kept(found, kept, chosen, where)
    match_operators([one for one in found if one.is_user_code], pipeline.operators, uids)
    own = {operator.uid: operator for operator in pipeline.operators}
    return [(one, own[uids[one.number]]) for one in found]


def _states(native: NativeOperator, own: Operator) -> list[str]:
    if not native.is_user_code or not isinstance(own, StatefulProcessorOperator):
        return [*own.state_schemas]
    return [*(state.name for state in native.states), *([TIMERS] if own.time_mode != "none" else [])]


def _builder(
    plan: JobPlan,
    target_url: str,
    target_options: Mapping[str, Any] | None,
    native: NativeCheckpoint,
    pairs: list[tuple[NativeOperator, Operator]],
    pipeline: CompiledPipeline,
    clock: Clock,
    ids: Ids,
) -> SnapshotBuilder:
    own = {operator.uid for _, operator in pairs}
    entries = [entry for entry in pipeline.entries if entry.uid in own]
    schemas = {(operator.uid, name): schema for _, operator in pairs for name, schema in operator.state_schemas.items()}
    origin = OriginEntry(plan.name, native.query_id, native.batch_id, "", "IMPORT")
    return SnapshotBuilder.create(
        open_store(target_url, target_options),
        plan.name,
        entries,
        mode="IMPORT",
        clock=clock,
        ids=ids,
        origin=origin,
        schemas=schemas,
    )


@contextmanager
def _state_reader_conf(spark: SparkSession) -> Iterator[None]:
    """Use the checksum file system while state is read: Spark's state store needs it, and `build_session` replaces
    it."""
    before = {name: spark.conf.get(name, None) for name in _READER_CONF}
    for name, value in _READER_CONF.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)


# --- reading -------------------------------------------------------------------------------------------------------


def _rows(
    spark: SparkSession,
    checkpoint: str,
    native: NativeCheckpoint,
    number: NativeOperator,
    own: StatefulProcessorOperator,
    layout: RowLayout,
) -> DataFrame:
    """Return a state in the columns that people see.

    Raises:
        InvalidConfiguration: it has other columns than the job's. InvalidData: Spark cannot read it.
    """
    name = layout.state.name
    state = next((s for s in number.states if s.name == name), None)
    options = {"batchId": str(native.batch_id), "operatorId": str(number.number), "flattenCollectionTypes": "true"}
    if state is None:
        options["readRegisteredTimers"] = "true"
    else:
        options["stateVarName"] = name
        # A list must not be flattened: only the list itself has the order of its elements.
        options["flattenCollectionTypes"] = "false" if state.kind == "list" else "true"
    try:
        frame = spark.read.format("statestore").options(**options).load(checkpoint)
    except PySparkException as error:
        raise InvalidData(f"Spark cannot read state {name!r} in {checkpoint}: {first_line(error)}") from error
    names = {role: shown for shown, role in layout.shown.roles().items()}
    where = f"operator {own.uid!r}, state {name!r}"
    columns = _selected(frame, "key", own.key_ddl, "key", names, f"{where}: its key")
    if state is None:
        columns.append(f"expiration_timestamp_ms AS {quoted(names['time', 'due'])}")
        return frame.selectExpr(*columns)
    value = {"value": "value", "list": "element", "map": "user_map_value"}[state.kind]
    if state.kind == "list":
        position = quoted(names["position", "position"])
        frame = frame.selectExpr("key", f"posexplode(list_value) AS ({position}, element)")
        columns.append(position)
    if state.kind == "map":
        columns += _selected(frame, "user_map_key", own.entry_ddl[name], "entry", names, f"{where}: its map key")
    if state.has_ttl:
        # Spark removes expired rows only at the end of a later batch.
        frame = frame.where(f"{value}.ttlExpirationMs IS NULL OR {value}.ttlExpirationMs > {native.batch_time_ms}")
        columns.append(f"{value}.ttlExpirationMs AS {quoted(names['time', 'expires'])}")
        value = f"{value}.value"
    columns += _selected(frame, value, own.state_ddl[name], "value", names, where)
    return frame.selectExpr(*columns)


def _selected(
    frame: DataFrame, path: str, declared: str, role: str, names: Mapping[tuple[Any, str], str], where: str
) -> list[str]:
    """Return the fields of a struct as columns, if they are those that the job declares; by their positions."""
    struct = frame.selectExpr(f"{path} AS whole").schema["whole"].dataType
    fields = struct.fields if isinstance(struct, T.StructType) else []
    wanted = [(column.name, column.type_text.lower()) for column in parse_ddl(declared)]
    there = [(field.name, field.dataType.simpleString().lower()) for field in fields]
    if wanted != there:
        shown = [", ".join(f"{name} {kind}" for name, kind in columns) or "none" for columns in (there, wanted)]
        raise InvalidConfiguration(
            f"{where} has the columns ({shown[0]}) in the checkpoint, and ({shown[1]}) in the job. Give the job the "
            "schemas that the query had; they can be changed after the import"
        )
    return [f"{path}.{quoted(name)} AS {quoted(names[role, name])}" for name, _ in wanted]


def _frame(
    spark: SparkSession,
    checkpoint: str,
    native: NativeCheckpoint,
    number: NativeOperator,
    own: Operator,
    layout: RowLayout,
    kept: Mapping[str, Kept],
) -> DataFrame:
    """Return the rows of a state."""
    if number.is_user_code and isinstance(own, StatefulProcessorOperator):
        return _rows(spark, checkpoint, native, number, own, layout)
    return rows_of_query(spark, checkpoint, native.batch_id, number.number, read_of(kept[own.uid], own, layout), layout)


def _layouts(number: NativeOperator, own: Operator, entry: OperatorEntry) -> list[RowLayout]:
    states = {state.name: state for state in entry.states}
    return [RowLayout(entry, states[name], own.state_schemas[name], is_import=True) for name in _states(number, own)]


def _written(frame: DataFrame, layout: RowLayout, cells: WriteCells) -> WrittenTables:
    try:
        return write_frame(frame, layout, cells)
    except PySparkException as error:
        raise InvalidData(f"Spark cannot read {layout.versions.name} of the checkpoint: {first_line(error)}") from error


def _source_logs(builder: SnapshotBuilder, native: NativeCheckpoint) -> list[FileEntry]:
    """Write the logs of seen files as a fold writes them."""
    written = []
    for source, lines in native.seen_files.items():
        for number, body in enumerate(joined_texts(lines)):
            path = source_log_path(builder.snapshot_id, builder.writer, number, source)
            builder.root.put(path, body)
            written.append(FileEntry(path, len(body), sha256(body)))
    return written
