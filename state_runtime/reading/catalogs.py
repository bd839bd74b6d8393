"""The relations beside the states, as rows: snapshots, files, operators and their states, rows in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pyspark.sql import types as T

from state_runtime.base.errors import MissingSnapshot
from state_runtime.changelog.reader import read_passes
from state_runtime.changelog.rows import decode_columns
from state_runtime.reading.reader import SnapshotReader
from state_runtime.reading.references import references
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.locate import Place, open_place
from state_runtime.snapshot.manifest import Manifest
from state_runtime.store import Store, open_store

__all__ = ["RELATIONS", "relation_rows"]

Row = dict[str, Any]
_HASH = T.DecimalType(20, 0)
_ROWS = 1000  # of one batch


def _schema(**columns: T.DataType) -> T.StructType:
    return T.StructType([T.StructField(name, kind) for name, kind in columns.items()])


_TEXT, _LONG, _TIME = T.StringType(), T.LongType(), T.TimestampType()

RELATIONS: dict[str, T.StructType] = {
    "snapshots": _schema(
        snapshot_id=_LONG,
        kind=_TEXT,
        format=_TEXT,
        created_at=_TIME,
        term=_LONG,
        epoch=_LONG,
        batch_time=_TIME,
        watermark=_TIME,
        parallelism=T.IntegerType(),
        operators=T.IntegerType(),
        log_bytes=_LONG,
        table_bytes=_LONG,
        total_bytes=_LONG,
    ),
    "manifest": _schema(
        kind=_TEXT,
        path=_TEXT,
        bytes=_LONG,
        sha256=_TEXT,
        operator=_TEXT,
        state=_TEXT,
        hash_low=_HASH,
        hash_high=_HASH,
    ),
    "operators": _schema(
        operator=_TEXT,
        operator_kind=_TEXT,
        key_schema=_TEXT,
        state=_TEXT,
        state_kind=_TEXT,
        entry_schema=_TEXT,
        value_schema=_TEXT,
        time=_TEXT,
        stored_bytes=_LONG,
    ),
    "inflight": _schema(
        operator=_TEXT,
        epoch=_LONG,
        read_at=_TIME,
        rows=_LONG,
        bytes=_LONG,
        columns=_TEXT,
    ),
}
"""The relations beside the states, with their columns. `inflight` has a row for each operator and epoch that read rows
which are not processed; the option `inflight` reads the rows themselves."""


def relation_rows(what: str, place: str, storage_options: Mapping[str, Any]) -> Iterator[list[Row]]:
    """Yield the rows of one of `RELATIONS`, some at a time.

    Raises:
        JobNotFound, MissingSnapshot, CorruptManifest, CorruptSegment, MissingFile, UnsupportedFormat, StoreUnavailable:
            as reading the snapshot does.
    """
    rows: list[Row] = []
    for row in _MAKERS[what](place, storage_options):
        rows.append(row)
        if len(rows) == _ROWS:
            yield rows
            rows = []
    if rows:
        yield rows


def _snapshots(place: str, storage_options: Mapping[str, Any]) -> Iterator[Row]:
    where = Place.parse(place)
    catalog = Catalog.of_root(open_store(where.root_url, storage_options))
    for snapshot_id in catalog.snapshot_ids() if where.snapshot_id is None else [where.snapshot_id]:
        try:
            yield _snapshot_row(catalog.manifest(snapshot_id))
        except MissingSnapshot:
            if where.snapshot_id is not None:
                raise
            continue  # expired, or not finished yet


def _snapshot_row(manifest: Manifest) -> Row:
    time = manifest.time
    return {
        "snapshot_id": manifest.snapshot_id,
        "kind": manifest.kind,
        "format": manifest.snapshot_format,
        "created_at": _time(manifest.created_at_ms),
        "term": manifest.term,
        "epoch": manifest.epoch or manifest.snapshot_id,
        "batch_time": _time(time.batch_time_ms) if time is not None else None,
        "watermark": _time(time.watermark_ms) if time is not None else None,
        "parallelism": manifest.parallelism,
        "operators": len(manifest.operators),
        "log_bytes": manifest.log_bytes,
        "table_bytes": manifest.table_bytes,
        "total_bytes": manifest.total_bytes,
    }


def _time(at_ms: int) -> int:
    """Convert to microseconds, as Arrow takes them for a timestamp of Spark."""
    return at_ms * 1000


def _files(place: str, storage_options: Mapping[str, Any]) -> Iterator[Row]:
    root, manifest = _opened(place, storage_options)
    for ref in references(root, manifest):
        yield {
            "kind": ref.kind,
            "path": ref.path,
            "bytes": ref.bytes if ref.bytes > 0 else None,
            "sha256": ref.digest or None,
            "operator": ref.operator or None,
            "state": ref.state or None,
            "hash_low": ref.hash_low,
            "hash_high": ref.hash_high,
        }


def _operators(place: str, storage_options: Mapping[str, Any]) -> Iterator[Row]:
    root, manifest = _opened(place, storage_options)
    reader = SnapshotReader(root, manifest)
    for operator in manifest.operators:
        for state in operator.states:
            yield {
                "operator": operator.uid,
                "operator_kind": operator.kind,
                "key_schema": operator.key_schema,
                "state": state.name,
                "state_kind": state.kind,
                "entry_schema": state.entry_schema,
                "value_schema": state.schema,
                "time": state.time,
                "stored_bytes": reader.stored_bytes(operator.uid, state.name),
            }


def _inflight(place: str, storage_options: Mapping[str, Any]) -> Iterator[Row]:
    root, manifest = _opened(place, storage_options)
    for passed in read_passes(root, manifest):
        yield {
            "operator": passed.operator,
            "epoch": passed.epoch,
            "read_at": _time(passed.read_at_ms),
            "rows": passed.rows,
            "bytes": passed.bytes,
            "columns": ", ".join(decode_columns(passed.layout.columns, f"operator {passed.operator!r}").names),
        }


def _opened(place: str, storage_options: Mapping[str, Any]) -> tuple[Store, Manifest]:
    opened = open_place(place, storage_options)
    return opened.root, opened.manifest


_MAKERS: dict[str, Callable[[str, Mapping[str, Any]], Iterator[Row]]] = {
    "snapshots": _snapshots,
    "manifest": _files,
    "operators": _operators,
    "inflight": _inflight,
}
