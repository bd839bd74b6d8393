"""A sink into a Delta table, exactly once: the epoch is in the same transaction as its rows.

Tasks stage Parquet files below the table's `_stillstate/` folder, as for `ParquetSink`. After the manifest they get
their final names in the table's folder, and one commit makes them part of it (append), or their rows are merged by key.
See docs/delta.md.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from state_runtime.base import faults
from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.errors import InvalidConfiguration, InvalidPipeline
from state_runtime.base.limits import MIB
from state_runtime.pipeline.commit_log import stager_of
from state_runtime.pipeline.output_layout import OutputLayout, check_columns, difference, footer_of
from state_runtime.pipeline.output_owner import Claimant, own_output
from state_runtime.pipeline.output_upkeep import OutputUpkeep, OutputWork
from state_runtime.pipeline.partitions import check_partition_columns
from state_runtime.pipeline.sinks import OnRollback, Sink, move_all
from state_runtime.pipeline.staged_rows import lost_file, publish_unless_there, staged_tables
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.sinks.delta_log import DataFile, DeltaLog, statistics_of
from state_runtime.sinks.merge_rows import check_merge_columns, last_of_each, without_removed
from state_runtime.snapshot.manifest import StagedFile, StagedOutput
from state_runtime.store import Store, shared_store

__all__ = ["DeltaSink", "small_files"]

_AT_A_TIME = 16
_COMMIT_BYTES_MAX = 256 * MIB


class DeltaSink(Sink):
    """A Delta table, exactly once.

    Each epoch is one transaction, which also says the job's root, the sink and the epoch: a repetition after a crash,
    and a driver that was thought dead, are seen in the table itself. The table is made if it is not there. Other
    writers may write to it.

    Args:
        table: path or URL of the table.
        merge_on: key columns. Rows take the place of rows with equal keys (null equals null), of an epoch's rows with
            equal keys the last one: for output in update mode the table has the newest row of each key. None: rows are
            appended.
        remove_where: with `merge_on`, a boolean column: where it is true the row with that key is removed. The column
            itself is not in the table.
        partition_by: columns by whose values the table is partitioned, if it is made.
        new_columns: what happens if the rows have columns that the table lacks: "refuse" the start, or "add" them.
        epoch_column: name of an added column with the epoch's number; None adds none.
        on_rollback: what happens to rows that were published behind the snapshot that the job goes back to: they stay
            ("continue"), the start is refused ("refuse"), or the table is restored to what it was before them
            ("replace"), unless others have changed rows since.
        storage_options: for fsspec, by which tasks stage; never stored.
        delta_options: for deltalake's own access to the store; by default it finds credentials in the environment.

    Example:
        .write(DeltaSink("/lake/orders_by_customer", merge_on=["customer"]))
    """

    may_have_python: ClassVar[bool] = False
    can_withdraw: ClassVar[bool] = True

    def __init__(
        self,
        table: str,
        *,
        merge_on: Sequence[str] | None = None,
        remove_where: str = "",
        partition_by: Sequence[str] = (),
        new_columns: Literal["refuse", "add"] = "refuse",
        epoch_column: str | None = None,
        on_rollback: OnRollback = "continue",
        storage_options: Mapping[str, Any] | None = None,
        delta_options: Mapping[str, str] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if not table:
            raise InvalidConfiguration("DeltaSink needs a table; give it a path or a URL")
        self.table = str(table)
        self.merge_on = (merge_on,) if isinstance(merge_on, str) else tuple(merge_on or ())
        self.remove_where = remove_where
        self.partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        self.new_columns = new_columns
        self.epoch_column = epoch_column
        self.on_rollback = self.checked(on_rollback)
        if new_columns not in ("refuse", "add"):
            raise InvalidConfiguration(f"DeltaSink: new_columns={new_columns!r} must be refuse or add")
        if remove_where and not self.merge_on:
            raise InvalidConfiguration(f"DeltaSink: remove_where={remove_where!r} needs merge_on, the key of what goes")
        self._storage_options = dict(storage_options or {})
        self._log = DeltaLog(self.table, delta_options, clock)
        self._rows = pa.schema([])

    def __repr__(self) -> str:
        return f"DeltaSink({self._store().url!r})"

    def _store(self) -> Store:
        return shared_store(self.table, self._storage_options)

    def spec(self, job_name: str, job_uid: str, name: str, root: tuple[str, Mapping[str, Any]]) -> SinkSpec:
        """See `Sink.spec`. Rows that are merged are staged without folders and are no files of the table."""
        owner = f"{job_name}-{job_uid[:8]}-{name}"
        return SinkSpec(
            name=name,
            store_url=self.table,
            storage_options=self._storage_options,
            staging_prefix=f"_stillstate/staging/{owner}",
            final_prefix="" if self.merge_on else f"part-{owner}-",
            epoch_column=self.epoch_column,
            partition_by=() if self.merge_on else self.partition_by,
        )

    def check(self, schema: pa.Schema, where: str) -> None:
        """See `Sink.check`."""
        self._rows = schema
        check_columns(schema, self.epoch_column, where)
        check_partition_columns(self.partition_by, schema, where)
        self._log.check_types(self._columns(schema), where)
        check_merge_columns(schema, self.merge_on, self.remove_where, where)

    def layout(self, schema: pa.Schema) -> OutputLayout:
        """See `Sink.layout`."""
        return OutputLayout(self._store().url, self._columns(schema), self.partition_by)

    def _columns(self, schema: pa.Schema) -> pa.Schema:
        """Return the table's columns for such rows."""
        kept = [f.with_nullable(True) for f in schema if not self.remove_where or f.name != self.remove_where]
        if self.epoch_column and self.epoch_column not in schema.names:
            kept.append(pa.field(self.epoch_column, pa.int64()))
        return pa.schema(kept)

    def check_place(self, layout: OutputLayout, pending: Sequence[StagedFile], where: str) -> None:
        """See `Sink.check_place`: the table's schema is compared, before anything is written."""
        found = self._log.schema()
        if found is None:
            if any(name.endswith(".parquet") or "=" in name for name in self._store().list_names("")):
                raise InvalidPipeline(
                    f"{where}: {self.table} has Parquet files and is no Delta table: they would not be part of the one "
                    "that the sink makes. Give it a folder of its own, or convert the old one "
                    "(deltalake.convert_to_deltalake)"
                )
            return
        columns, partition_by = found
        there = OutputLayout(layout.place, columns, partition_by)
        what = difference(
            there, layout if self.partition_by else OutputLayout(layout.place, layout.columns, partition_by)
        )
        missing = [name for name in layout.columns.names if name not in columns.names]
        if not what and missing and self.new_columns == "refuse":
            what = f'it has no column {", ".join(missing)}; let the sink add what is missing with new_columns="add"'
        if what:
            raise InvalidPipeline(f"{where}: the Delta table {self.table} has other rows: {what}. Nothing was changed")

    def own(self, spec: SinkSpec, claimant: Claimant) -> int:
        """See `Sink.own`: one job root stages below `staging_prefix`, see pipeline/output_owner.py."""
        return own_output(spec.store(), spec.staging_prefix, claimant).since_term

    def newest_published_epoch(self, spec: SinkSpec) -> int:
        """See `Sink.newest_published_epoch`: what the table's log says of this root and sink."""
        return self._log.version_of(_writer(spec.staging_prefix.rpartition("/")[2]))

    def publish(self, spec: SinkSpec, output: StagedOutput, spark: object) -> None:
        """Commit an epoch to the table, unless the table says that it has it.

        Raises:
            MissingFile: a staged file is gone, and the table does not have the epoch.
            StoreUnavailable: the table took no commit.
        """
        if not output.files:
            return
        writer = _writer(stager_of(output.files[0]))
        if self._log.version_of(writer) >= output.epoch:
            return
        put = self._merge if self.merge_on else self._append
        publish_unless_there(lambda: put(spec, output, writer), lambda: self._log.version_of(writer) >= output.epoch)
        faults.reach("delta-committed")

    def _append(self, spec: SinkSpec, output: StagedOutput, writer: str) -> None:
        store = spec.store()
        self._make_table()  # before any file lies there: a folder with Parquet files and no log is somebody else's
        missing = move_all(store, output.files)
        if missing is not None:
            raise lost_file(spec, output, missing, "the Delta table")
        with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="delta") as pool:
            files = list(pool.map(partial(_data_file, store), output.files))
        faults.reach("delta-moved")
        self._log.append(writer, output.epoch, files)

    def _merge(self, spec: SinkSpec, output: StagedOutput, writer: str) -> None:
        rows = last_of_each(pa.concat_tables(staged_tables(spec, output, "the Delta table")), self.merge_on)
        removed = None
        if self.remove_where:
            rows, removed = without_removed(rows, self.remove_where)
        self._make_table()
        self._log.merge(writer, output.epoch, rows, self.merge_on, removed)

    def _make_table(self) -> None:
        columns = self._columns(self._rows)
        self._log.create(columns, self.partition_by)
        if self.new_columns == "add":
            self._log.add_columns(list(columns))

    def withdraw(self, spec: SinkSpec, left: Sequence[tuple[int, int]]) -> int:
        """See `Sink.withdraw`: the table is restored to what it was before the first such epoch."""
        store = spec.store()

        def actions_of(version: int) -> list[Mapping[str, Any]] | None:
            try:
                data = store.read(f"_delta_log/{version:020d}.json", _COMMIT_BYTES_MAX)
            except FileNotFoundError:
                return None
            return [json.loads(line) for line in data.splitlines() if line.strip()]

        return self._log.withdraw(_writer(spec.staging_prefix.rpartition("/")[2]), left, actions_of)

    def upkeep(self, how: OutputUpkeep, *, now_ms: int, dry_run: bool) -> OutputWork | None:
        """See `Sink.upkeep`: write small files anew as larger ones, and delete files that the table keeps no longer.

        The commits of upkeep have no epoch, and Delta keeps the epochs of all writers when it cleans its log.
        """
        sizes = self._log.sizes()
        if sizes is None:
            return None
        small = small_files(sizes, how.target_bytes)
        work = OutputWork(
            place=self._store().url,
            files=len(sizes),
            bytes=sum(size for _, size in sizes),
            inputs=sum(len(of) for of in small),
            input_bytes=sum(map(sum, small)),
            outputs=sum(-(-sum(of) // how.target_bytes) for of in small),
        )
        if not dry_run:
            done = self._log.compact(how.target_bytes) if small else {}
            added, removed = (json.loads(done.get(key, "{}")) for key in ("filesAdded", "filesRemoved"))
            work = replace(
                work,
                inputs=removed.get("totalFiles", 0),
                input_bytes=removed.get("totalSize", 0),
                outputs=added.get("totalFiles", 0),
                output_bytes=added.get("totalSize", 0),
            )
        return replace(work, removed=len(self._log.vacuum(dry_run=dry_run)))

    def settle(self, spec: SinkSpec, output: StagedOutput) -> None:
        """Delete the staged rows of a merge, which no repetition needs any more."""
        if self.merge_on:
            for file in output.files:
                spec.store().delete(file.staged)


def small_files(sizes: Iterable[tuple[str, int]], target_bytes: int) -> list[list[int]]:
    """Return by folder the sizes of files below a target, where there are several."""
    folders: defaultdict[str, list[int]] = defaultdict(list)
    for path, size in sizes:
        if size < target_bytes:
            folders[path.rpartition("/")[0]].append(size)
    return [found for found in folders.values() if len(found) > 1]


def _writer(stager: str) -> str:
    return f"stillstate/{stager}"


def _data_file(store: Store, file: StagedFile) -> DataFile:
    metadata = pq.read_metadata(pa.BufferReader(footer_of(store, file.final, file.bytes)))
    return DataFile(file.final, file.bytes, statistics_of(metadata))
