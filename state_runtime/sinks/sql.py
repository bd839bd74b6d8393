"""A sink into a table in PostgreSQL, exactly once: the epoch is in the same transaction as its rows.

Tasks stage Parquet files below the job root. After the manifest the driver copies their rows into the table, or merges
them by key, and one transaction says which epoch that was. See docs/postgres.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from state_runtime.base import faults
from state_runtime.base.errors import InvalidConfiguration, InvalidPipeline
from state_runtime.pipeline.commit_log import stager_of
from state_runtime.pipeline.output_layout import OutputLayout, footer_of
from state_runtime.pipeline.output_owner import Claimant, own_output
from state_runtime.pipeline.sinks import OnRollback, Sink
from state_runtime.pipeline.staged_rows import lost_file, publish_unless_there, staged_tables
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.sinks.merge_rows import check_merge_columns, last_of_each, without_removed
from state_runtime.sinks.sql_address import Address
from state_runtime.sinks.sql_owners import SqlOwners
from state_runtime.sinks.sql_table import SqlTable, Write
from state_runtime.sinks.sql_types import check_types, misfits
from state_runtime.snapshot.manifest import StagedFile, StagedOutput

__all__ = ["SqlSink"]


class SqlSink(Sink):
    """A table in PostgreSQL, exactly once.

    Each epoch is one transaction, which also writes the epoch's number into the table `stillstate_epochs` beside it: a
    repetition after a crash, and a driver that was thought dead, are seen there. A crash anywhere leaves the whole
    epoch in the table, or nothing of it, which the next start writes. The table is made if it is not there. Other
    writers may write to it.

    Args:
        table: its name, `table` or `schema.table`; letters count as they are written.
        dsn: address of the database, as libpq takes it: `postgresql://user@host/name` or `host=… dbname=…`. What it
            does not say comes from the variables `PGHOST`, `PGUSER`, `PGPASSWORD`, … of the driver. It is stored
            nowhere.
        dsn_env: name of a variable in the driver's environment that has the address.
        merge_on: key columns. Rows take the place of rows with equal keys (null equals null), of an epoch's rows with
            equal keys the last one: for output in update mode the table has the newest row of each key. None: rows are
            appended.
        remove_where: with `merge_on`, a boolean column: where it is true the row with that key is removed. The column
            itself is not in the table.
        new_columns: what happens if the rows have columns that the table lacks: "refuse" the start, or "add" them.
        epoch_column: name of an added column with the epoch's number; None adds none.
        on_rollback: what happens when the job has gone back to an older snapshot, with rows that were published since:
            they stay, and come again ("continue"), or the start is refused ("refuse").

    Example:
        .write(SqlSink("shop.totals", dsn_env="SHOP_DATABASE", merge_on=["customer"]))
    """

    may_have_python: ClassVar[bool] = False

    def __init__(
        self,
        table: str,
        *,
        dsn: str = "",
        dsn_env: str = "",
        merge_on: Sequence[str] | None = None,
        remove_where: str = "",
        new_columns: Literal["refuse", "add"] = "refuse",
        epoch_column: str | None = None,
        on_rollback: OnRollback = "continue",
    ) -> None:
        self.merge_on = (merge_on,) if isinstance(merge_on, str) else tuple(merge_on or ())
        self.remove_where = remove_where
        self.new_columns = new_columns
        self.epoch_column = epoch_column
        self.on_rollback = self.checked(on_rollback)
        if new_columns not in ("refuse", "add"):
            raise InvalidConfiguration(f"SqlSink: new_columns={new_columns!r} must be refuse or add")
        if remove_where and not self.merge_on:
            raise InvalidConfiguration(f"SqlSink: remove_where={remove_where!r} needs merge_on, the key of what goes")
        if remove_where in self.merge_on:
            raise InvalidConfiguration(f"SqlSink: remove_where={remove_where!r} is a key, and is not in the table")
        self._table = SqlTable(str(table), Address(dsn, dsn_env))
        self._columns = pa.schema([])
        self._is_made = False

    def __repr__(self) -> str:
        return f"SqlSink({self._table.name!r})"

    def spec(self, job_name: str, job_uid: str, name: str, root: tuple[str, Mapping[str, Any]]) -> SinkSpec:
        """See `Sink.spec`. Rows are staged below the job root, in a folder that says who writes them."""
        return SinkSpec.below_root(
            name, job_name, job_uid, root, f"{job_uid}-{name}", epoch_column=self.epoch_column, is_for_sql=True
        )

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
        self._columns = pa.schema(kept)
        check_types(self._columns, where)

    def layout(self, schema: pa.Schema) -> OutputLayout:
        """See `Sink.layout`."""
        return OutputLayout(f"the table {self._table.place}", self._columns)

    def check_place(self, layout: OutputLayout, pending: Sequence[StagedFile], where: str) -> None:
        """See `Sink.check_place`: the table is compared with the rows, before anything is written."""
        found = self._table.found()
        if found is None:
            return
        what = found.refusal or misfits(layout.columns, found.columns)
        missing = [name for name in layout.columns.names if name not in {column.name for column in found.columns}]
        if not what and missing and self.new_columns == "refuse":
            what = f'it has no column {", ".join(missing)}; let the sink add what is missing with new_columns="add"'
        if not what and self.merge_on and not found.has_key(self.merge_on):
            names = ", ".join(f'"{name}"' for name in self.merge_on)
            what = (
                f"merge_on needs a unique index on ({names}) in which null is equal to null, or a primary key: CREATE "
                f"UNIQUE INDEX ON {self._table.name} ({names}) NULLS NOT DISTINCT"
            )
        if what:
            raise InvalidPipeline(
                f"{where}: the table {self._table.place} does not take these rows: {what}. Nothing was changed"
            )

    def own(self, spec: SinkSpec, claimant: Claimant) -> int:
        """See `Sink.own`: of a root and its copies one writes. All that is staged is the root's own, below it."""
        own_output(SqlOwners(self._table), spec.staging_prefix, claimant)
        return 0

    def newest_published_epoch(self, spec: SinkSpec) -> int:
        """See `Sink.newest_published_epoch`: what the database has of this root and sink."""
        return self._table.newest(_writer(spec.staging_prefix.rpartition("/")[2]))

    def publish(self, spec: SinkSpec, output: StagedOutput, spark: object) -> None:
        """Write an epoch into the table, unless the database says that it has it.

        Raises:
            MissingFile: a staged file is gone, and the database does not have the epoch.
            StoreUnavailable: the database took nothing for a while. InvalidPipeline: it does not take these rows.
        """
        if not output.files:
            return
        writer = _writer(stager_of(output.files[0]))
        if self._table.newest(writer) >= output.epoch:
            return
        if not self._is_made:
            self._table.make(self._columns, self.merge_on, add_columns=self.new_columns == "add")
            self._is_made = True
        publish_unless_there(
            lambda: self._put(spec, output, writer), lambda: self._table.newest(writer) >= output.epoch
        )
        faults.reach("sql-committed")

    def _put(self, spec: SinkSpec, output: StagedOutput, writer: str) -> None:
        self._table.write(writer, output.epoch, self._what(spec, output))

    @property
    def _target(self) -> str:
        return f"the table {self._table.place}"

    def _what(self, spec: SinkSpec, output: StagedOutput) -> Write:
        if not self.merge_on:
            return Write(lambda: staged_tables(spec, output, self._target), self._names(spec, output))
        rows, removed = last_of_each(pa.concat_tables(staged_tables(spec, output, self._target)), self.merge_on), None
        if self.remove_where:
            rows, removed = without_removed(rows, self.remove_where)
        return Write(lambda: [rows], rows.column_names, self.merge_on, removed)

    def _names(self, spec: SinkSpec, output: StagedOutput) -> list[str]:
        """Return the columns of staged rows: code that staged them may have been another version of the job's."""
        first = output.files[0]
        try:
            footer = footer_of(spec.store(), first.staged, first.bytes)
        except FileNotFoundError as error:
            raise lost_file(spec, output, first, self._target) from error
        return list(pq.read_schema(pa.BufferReader(footer)).names)

    def settle(self, spec: SinkSpec, output: StagedOutput) -> None:
        """Delete staged rows, which are in the table and which no start will write again."""
        for file in output.files:
            spec.store().delete(file.staged)


def _writer(stager: str) -> str:
    return f"stillstate/{stager}"
