"""A sink into an Iceberg table, exactly once: the epoch is in the same commit as its rows.

Tasks stage Parquet files below the job root. After the manifest the driver writes their rows as data files of the
table, or merges them by key, and one commit makes them part of it and says which epoch that was. See docs/iceberg.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import pyarrow as pa

from state_runtime.base import faults
from state_runtime.base.errors import InvalidConfiguration, InvalidPipeline
from state_runtime.pipeline.commit_log import stager_of
from state_runtime.pipeline.output_layout import OutputLayout
from state_runtime.pipeline.output_owner import Claimant, own_output
from state_runtime.pipeline.output_upkeep import OutputUpkeep, OutputWork
from state_runtime.pipeline.sinks import OnRollback, Sink
from state_runtime.pipeline.staged_rows import publish_unless_there, staged_tables
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.sinks.iceberg_catalog import CatalogAddress
from state_runtime.sinks.iceberg_log import IcebergLog
from state_runtime.sinks.iceberg_types import columns_for, misfits
from state_runtime.sinks.merge_rows import check_merge_columns, last_of_each, without_removed
from state_runtime.snapshot.manifest import StagedFile, StagedOutput

__all__ = ["IcebergSink"]


class IcebergSink(Sink):
    """An Iceberg table, exactly once.

    Each epoch is one commit, which also sets a property of the table with the job's root, the sink and the epoch: a
    repetition after a crash, and a driver that was thought dead, are seen in the table itself. A crash anywhere leaves
    the whole epoch in the table, or nothing of it, which the next start writes; files of a commit that was not made
    stay until orphan files are removed. The table is made if it is not there. Other writers may write to it.

    Args:
        table: its name, `namespace.table`.
        catalog: the catalog's name, as pyiceberg's `load_catalog` takes it: its settings come from `.pyiceberg.yaml`,
            from the variables `PYICEBERG_CATALOG__<NAME>__…` of the driver, or from the next two.
        catalog_options: settings of the catalog. They are stored nowhere.
        options_env: settings of the catalog that are secret: for each the name of a variable in the driver's
            environment that has it.
        merge_on: key columns. Rows take the place of rows with equal keys (null equals null), of an epoch's rows with
            equal keys the last one: for output in update mode the table has the newest row of each key. None: rows are
            appended.
        remove_where: with `merge_on`, a boolean column: where it is true the row with that key is removed. The column
            itself is not in the table.
        partition_by: columns by whose values the table is partitioned, if it is made.
        new_columns: what happens if the rows have columns that the table lacks: "refuse" the start, or "add" them.
        epoch_column: name of an added column with the epoch's number; None adds none.
        on_rollback: what happens when the job has gone back to an older snapshot, with rows that were published since:
            they stay, and come again ("continue"), or the start is refused ("refuse").

    Example:
        .write(IcebergSink("shop.totals", catalog="lake", merge_on=["customer"]))
    """

    may_have_python: ClassVar[bool] = False

    def __init__(
        self,
        table: str,
        *,
        catalog: str,
        catalog_options: Mapping[str, str] | None = None,
        options_env: Mapping[str, str] | None = None,
        merge_on: Sequence[str] | None = None,
        remove_where: str = "",
        partition_by: Sequence[str] = (),
        new_columns: Literal["refuse", "add"] = "refuse",
        epoch_column: str | None = None,
        on_rollback: OnRollback = "continue",
    ) -> None:
        if not all(table.split(".")) or "." not in table:
            raise InvalidConfiguration(f"IcebergSink: table={table!r} must be namespace.table")
        if not catalog:
            raise InvalidConfiguration("IcebergSink needs a catalog; give it the name of one")
        self.merge_on = (merge_on,) if isinstance(merge_on, str) else tuple(merge_on or ())
        self.remove_where = remove_where
        self.partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        self.new_columns = new_columns
        self.epoch_column = epoch_column
        self.on_rollback = self.checked(on_rollback)
        if new_columns not in ("refuse", "add"):
            raise InvalidConfiguration(f"IcebergSink: new_columns={new_columns!r} must be refuse or add")
        if remove_where and not self.merge_on:
            raise InvalidConfiguration(
                f"IcebergSink: remove_where={remove_where!r} needs merge_on, the key of what goes"
            )
        if remove_where and remove_where in (*self.merge_on, *self.partition_by):
            raise InvalidConfiguration(
                f"IcebergSink: remove_where={remove_where!r} is not in the table, so it is no key"
            )
        self.table = table
        self._log = IcebergLog(table, CatalogAddress(catalog, catalog_options, options_env))
        self._columns = pa.schema([])

    def __repr__(self) -> str:
        return f"IcebergSink({self.table!r})"

    def spec(self, job_name: str, job_uid: str, name: str, root: tuple[str, Mapping[str, Any]]) -> SinkSpec:
        """See `Sink.spec`. Rows are staged below the job root, in a folder that says who writes them."""
        return SinkSpec.below_root(name, job_name, job_uid, root, f"{job_uid}-{name}", epoch_column=self.epoch_column)

    def check(self, schema: pa.Schema, where: str) -> None:
        """See `Sink.check`."""
        if self.epoch_column in schema.names:
            raise InvalidPipeline(
                f"{where}: the rows have a column {self.epoch_column!r}, and the sink adds one of that name. Rename "
                "yours, or give the added one another name (epoch_column=)"
            )
        check_merge_columns(schema, self.merge_on, self.remove_where, where)
        kept = [field for field in schema if not self.remove_where or field.name != self.remove_where]
        if self.epoch_column:
            kept.append(pa.field(self.epoch_column, pa.int64()))
        self._columns = columns_for(pa.schema(kept), where)
        for name in (*self.merge_on, *self.partition_by):
            if name not in self._columns.names:
                raise InvalidPipeline(
                    f"{where}: there is no column {name!r} to partition by; it has {', '.join(schema.names)}"
                )
            if pa.types.is_nested(self._columns.field(name).type):
                raise InvalidPipeline(
                    f"{where}: {name!r} is {self._columns.field(name).type}, and keys and partitions are plain values; "
                    "make a column of one in a transform"
                )

    def layout(self, schema: pa.Schema) -> OutputLayout:
        """See `Sink.layout`."""
        return OutputLayout(f"the Iceberg table {self._log.place}", self._columns, self.partition_by)

    def check_place(self, layout: OutputLayout, pending: Sequence[StagedFile], where: str) -> None:
        """See `Sink.check_place`: the table is compared with the rows, before anything is written."""
        found = self._log.layout()
        if found is None:
            return
        what = misfits(layout, found)
        missing = [name for name in layout.columns.names if name not in found.columns.names]
        if not what and missing and self.new_columns == "refuse":
            what = f'it has no column {", ".join(missing)}; let the sink add what is missing with new_columns="add"'
        if what:
            raise InvalidPipeline(
                f"{where}: the Iceberg table {self._log.place} has other rows: {what}. Nothing was changed"
            )

    def own(self, spec: SinkSpec, claimant: Claimant) -> int:
        """See `Sink.own`: of a root and its copies one writes, which a property of the table says. So the table is made
        here, if it is not there. All that is staged is the root's own, below it."""
        self._make_table()
        own_output(self._log, spec.staging_prefix, claimant)
        return 0

    def newest_published_epoch(self, spec: SinkSpec) -> int:
        """See `Sink.newest_published_epoch`: what the table has of this root and sink."""
        return self._log.version_of(spec.staging_prefix.rpartition("/")[2])

    def publish(self, spec: SinkSpec, output: StagedOutput, spark: object) -> None:
        """Make an epoch's rows part of the table, unless the table says that it has it.

        Raises:
            MissingFile: a staged file is gone, and the table does not have the epoch.
            StoreUnavailable: the catalog took nothing for a while. InvalidPipeline: the table does not take these rows.
        """
        if not output.files:
            return
        writer = stager_of(output.files[0])
        if self._log.version_of(writer) >= output.epoch:
            return
        self._make_table()
        publish_unless_there(
            lambda: self._put(spec, output, writer), lambda: self._log.version_of(writer) >= output.epoch
        )
        faults.reach("iceberg-committed")

    def _put(self, spec: SinkSpec, output: StagedOutput, writer: str) -> None:
        target = f"the Iceberg table {self._log.place}"
        if not self.merge_on:
            self._log.append(writer, output.epoch, lambda: staged_tables(spec, output, target))
        else:
            rows, removed = last_of_each(pa.concat_tables(staged_tables(spec, output, target)), self.merge_on), None
            if self.remove_where:
                rows, removed = without_removed(rows, self.remove_where)
            self._log.merge(writer, output.epoch, rows, self.merge_on, removed)

    def upkeep(self, how: OutputUpkeep, *, now_ms: int, dry_run: bool) -> OutputWork | None:
        """See `Sink.upkeep`: let old snapshots expire, and delete the files that only they had.

        Which epoch is there is a property of the table, which stays.
        """
        sizes = self._log.sizes()
        if sizes is None:
            return None
        expired, removed = self._log.expire(now_ms - int(how.history_s * 1000), dry_run=dry_run)
        return OutputWork(place=self._log.place, files=len(sizes), bytes=sum(sizes), removed=removed, expired=expired)

    def _make_table(self) -> None:
        self._log.make(self._columns, self.partition_by, add_columns=self.new_columns == "add")

    def settle(self, spec: SinkSpec, output: StagedOutput) -> None:
        """Delete staged rows, which are in the table and which no start will write again."""
        for file in output.files:
            spec.store().delete(file.staged)
