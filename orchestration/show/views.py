"""Output of the reading commands: plain rows for `--json`, rich tables for people; no I/O."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from state_runtime.base.errors import EXIT_OF_KIND, StillstateError
from state_runtime.base.progress import NOT_IN_MANIFESTS
from state_runtime.base.sink_state import SinkState
from state_runtime.base.source_state import SourceState
from state_runtime.maintenance.links import NOTHING_SHARED, Shared
from state_runtime.pipeline.spark_settings import TIME_ZONE_CONF
from state_runtime.snapshot.manifest import InflightNumbers, Manifest, OpenBatch, SourcePosition, StateEntry, TimeEntry
from state_runtime.snapshot.term_files import RunStatus
from stillstate.orchestration.probes.look import Look
from stillstate.orchestration.probes.pool import NOT_SEEN, NoLook
from stillstate.orchestration.recovery.health import STANDINGS, Standing
from stillstate.orchestration.recovery.observe import Observation
from stillstate.orchestration.recovery.sinks import sink_trouble
from stillstate.orchestration.recovery.sources import source_trouble, unread_text
from stillstate.orchestration.show.tables import new_table
from stillstate.orchestration.text import bytes_text, count_text, duration_text, time_text

__all__ = [
    "NOT_SEEN",
    "UNREADABLE",
    "JobRow",
    "SnapshotRow",
    "StateRows",
    "jobs_table",
    "manifest_json",
    "manifest_parts",
    "snapshots_table",
    "state_csv",
    "state_table",
    "waiting_operators",
]

UNREADABLE = "unreadable"
_CELL_CHARS_MAX = 500

_TIMES = {"": "", "expires": "TTL", "due": "due"}

_COLOURS_OF_STANDINGS: Final[Mapping[Standing, str]] = {
    "well": "green",
    "new": "dim",
    "ended": "cyan",
    "coming": "yellow",
    "migrating": "yellow",
    "lost": "red",
}
_COLOURS: Final[Mapping[str, str]] = {
    UNREADABLE: "red",
    NOT_SEEN: "red",
    **{verdict: _COLOURS_OF_STANDINGS[standing] for verdict, standing in STANDINGS.items()},
}


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """One line of `stillstate jobs`. `health` is Stillstate's verdict, `state` the driver's last report.

    Attributes:
        inflight_rows, inflight_age_s: rows in flight in the newest snapshot, about, and how long the oldest has waited.
        exit_code: of a driver that failed, or of the command if the root could not be read; else 0.
        slowest: operator and shard of the task that took longest; empty if no rows are in flight.
        seen_at_ms: when the job was looked at; all ages are as of then. None if it was not seen.
        sources: how far it is behind those of its sources that can be asked.
        sinks: those that are away.
    """

    job: str
    health: str
    state: str | None = None
    term: int | None = None
    parallelism: int | None = None
    heartbeat_age_s: float | None = None
    pid: int | None = None
    host: str | None = None
    last_snapshot_id: int | None = None
    last_snapshot_age_s: float | None = None
    rows_per_s: float | None = None
    state_rows: int | None = None
    restored: int = 0
    restoring: int = 0
    reason: str = ""
    exit_code: int = 0
    inflight_rows: int = 0
    inflight_age_s: float | None = None
    slowest: str = ""
    seen_at_ms: int | None = None
    sources: tuple[SourceState, ...] = ()
    sinks: tuple[SinkState, ...] = ()

    @staticmethod
    def of(job: str, look: Look | NoLook) -> JobRow:
        """Return the row for one look at a job."""
        if isinstance(look, NoLook):
            health = UNREADABLE if look.why == "failed" else NOT_SEEN
            return JobRow(job=job, health=health, reason=str(look.error), exit_code=look.error.exit_code)
        seen, latest, now_ms, trouble = look.seen, look.head, look.at_ms, look.trouble
        status, progress = seen.status, latest.progress if latest is not None else None
        waiting = waiting_operators(latest) if latest is not None else ()
        oldest_ms = min((o.read_at_ms for o in waiting), default=None)
        return JobRow(
            job=job,
            health=seen.health.verdict if trouble is None else UNREADABLE,
            state=None if status is None else status.state,
            term=None if status is None else status.term,
            parallelism=_parallelism(status, latest),
            heartbeat_age_s=None if status is None else round(status.age_s(now_ms), 3),
            pid=None if status is None else status.pid,
            host=None if status is None else status.host,
            last_snapshot_id=None if latest is None else latest.snapshot_id,
            last_snapshot_age_s=(None if latest is None else round(max(0, now_ms - latest.created_at_ms) / 1000, 3)),
            rows_per_s=None if progress is None else progress.rows_per_s,
            state_rows=None if progress is None else progress.state_rows,
            restored=0 if status is None else status.restored,
            restoring=0 if status is None else status.restoring,
            reason=seen.health.reason if trouble is None else str(trouble),
            inflight_rows=sum(o.rows for o in waiting),
            inflight_age_s=None if oldest_ms is None else round(max(0, now_ms - oldest_ms) / 1000, 3),
            exit_code=trouble.exit_code if trouble is not None else _exit_code(seen),
            slowest=progress.inflight.slowest if waiting and progress is not None and progress.inflight else "",
            seen_at_ms=now_ms,
            sources=() if status is None else status.sources,
            sinks=() if status is None else status.sinks,
        )

    def to_json_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class SnapshotRow:
    """One line of `stillstate snapshots`.

    Attributes:
        name: its name for `rollback` and `--from-snapshot`.
        kind: of the snapshot; "savepoint" for a savepoint's copy of it.
        savepoint: its name; empty for a snapshot of the job itself.
        format: see docs/formats.md; empty if it cannot be read.
        inflight_rows, inflight_bytes: of rows in flight, about.
    """

    snapshot_id: int
    kind: str
    name: str
    savepoint: str = ""
    format: str = ""
    created_at_ms: int | None = None
    term: int | None = None
    batch_id: int | None = None
    input_rows: int | None = None
    state_rows: int | None = None
    checkpoint_ms: float | None = None
    log_bytes: int | None = None
    table_bytes: int | None = None
    error: str | None = None
    inflight_rows: int | None = None
    inflight_bytes: int | None = None

    @staticmethod
    def of(manifest: Manifest, savepoint: str = "") -> SnapshotRow:
        """Return the row of a snapshot that can be read."""
        progress = manifest.progress
        return SnapshotRow(
            snapshot_id=manifest.snapshot_id,
            kind="savepoint" if savepoint else manifest.kind,
            name=savepoint or f"@{manifest.snapshot_id}",
            savepoint=savepoint,
            format=manifest.snapshot_format,
            created_at_ms=manifest.created_at_ms,
            term=manifest.term,
            batch_id=None if manifest.source is None else manifest.source.batch_id,
            input_rows=None if progress is None else progress.input_rows,
            state_rows=None if progress is None else progress.state_rows,
            checkpoint_ms=None if progress is None else progress.checkpoint_ms,
            log_bytes=manifest.log_bytes,
            table_bytes=manifest.table_bytes,
            inflight_rows=sum(o.rows for o in waiting_operators(manifest)),
            inflight_bytes=sum(o.bytes for o in waiting_operators(manifest)),
        )

    @staticmethod
    def broken(snapshot_id: int, error: StillstateError, savepoint: str = "") -> SnapshotRow:
        """Return the row of a snapshot whose manifest cannot be trusted; it is listed all the same."""
        return SnapshotRow(
            snapshot_id=snapshot_id,
            kind=error.kind,
            name=savepoint or f"@{snapshot_id}",
            savepoint=savepoint,
            error=str(error),
        )

    def to_json_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class StateRows:
    """The result of `stillstate query`. `more`: there are rows beyond the limit."""

    job: str
    snapshot_id: int
    operator: str
    state: str
    columns: list[str]
    rows: list[dict[str, Any]]
    more: bool

    @staticmethod
    def of(job: str, snapshot_id: int, operator: str, state: str, rows: Any, limit: int) -> StateRows:
        """Convert an Arrow table with at most one row more than the limit; its values become JSON values.

        Binary becomes hexadecimal, decimals and times become text, and so do NaN and the infinities: as `--key` reads
        them.
        """
        shown = rows.slice(0, limit)
        columns = {name: _values(shown.column(name)) for name in shown.column_names}
        return StateRows(
            job=job,
            snapshot_id=snapshot_id,
            operator=operator,
            state=state,
            columns=list(columns),
            rows=[dict(zip(columns, row)) for row in zip(*columns.values())],
            more=rows.num_rows > limit,
        )

    @property
    def title(self) -> str:
        return f"{self.operator}/{self.state} of {self.job}, snapshot {self.snapshot_id}"

    def to_json_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def state_table(found: StateRows) -> Table:
    """Rows of a state for people."""
    table = new_table(found.title)
    table.show_header = True
    for column in found.columns:
        numbers = all(isinstance(row[column], int | float) for row in found.rows)
        table.add_column(Text(_printable(column)), justify="right" if numbers else "left", overflow="fold")
    for row in found.rows:
        table.add_row(*(_cell(row[column]) for column in found.columns))
    if found.more:
        table.caption = f"only the first {len(found.rows):,} rows; --limit gives more"
        table.caption_justify = "left"
    return table


def state_csv(found: StateRows) -> str:
    """Rows of a state as CSV; null is an empty field, nested values are JSON."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(found.columns)
    for row in found.rows:
        writer.writerow([json.dumps(v) if isinstance(v, list | dict | bool) else v for v in row.values()])
    return text.getvalue()


def jobs_table(rows: list[JobRow]) -> Table:
    """All jobs, one a line."""
    table = new_table(
        "Jobs", "job", "health", "term>", "shards>", "heartbeat>", "snapshot>", "age>", "rows/s>", "state rows>", "why"
    )
    for row in rows:
        table.add_row(
            Text(row.job),
            Text(row.health, style=_COLOURS[row.health]),
            _number(row.term),
            _number(row.parallelism),
            _age(row.heartbeat_age_s),
            _number(row.last_snapshot_id),
            _age(row.last_snapshot_age_s),
            _number(row.rows_per_s),
            _number(row.state_rows),
            Text(_why(row)),
        )
    seen_ms = [row.seen_at_ms for row in rows if row.seen_at_ms is not None]
    if seen_ms:
        first, last = time_text(min(seen_ms)), time_text(max(seen_ms))
        table.caption = f"looked at {first}" if first == last else f"looked at {first} to {last}"
        table.caption_justify = "left"
    return table


def _exit_code(seen: Observation) -> int:
    """Return the driver's exit code, if it failed."""
    has_failed = seen.status is not None and seen.health.verdict == "failed"
    return EXIT_OF_KIND.get(seen.status.error_kind, 1) if seen.status is not None and has_failed else 0


def _parallelism(status: RunStatus | None, latest: Manifest | None) -> int | None:
    """Return the parallelism that the newest run reports; if it reports none, that of its newest snapshot."""
    said = 0 if status is None else status.parallelism
    return said or (latest.parallelism if latest is not None else None)


def _behind(source: SourceState, now_ms: int) -> str:
    age = f", the oldest of {duration_text(source.age_s(now_ms))} ago" if source.oldest_unread_ms else ""
    return f"{unread_text(source)} yet{age}"


def _why(row: JobRow) -> str:
    if row.health not in ("healthy", "starting"):
        return row.reason
    told = [f"restoring {row.restored} of {row.restoring} shards"] if row.restoring else []
    if row.inflight_rows:
        told.append(f"{count_text(row.inflight_rows)} rows in flight, oldest {_age(row.inflight_age_s)}")
        told += [f"slowest {row.slowest}"] if row.slowest else []
    now_ms = row.seen_at_ms or 0
    trouble = source_trouble(row.sources, now_ms)
    away = sink_trouble(row.sinks, now_ms)
    told += [each.reason for each in (away, trouble) if each is not None]
    told += [_behind(source, now_ms) for source in row.sources if source.behind > 0 and trouble is None]
    return "; ".join(told) or ("" if row.health == "healthy" else row.reason)


def snapshots_table(job: str, rows: list[SnapshotRow]) -> Table:
    """Return a table of the points that a job can go back to, newest first. It has a column for rows in flight if there
    are any."""
    some_wait = any(row.inflight_rows for row in rows)
    table = new_table(
        f"Snapshots of {job}",
        "name",
        "id>",
        "kind",
        "format",
        "created",
        "term>",
        "batch>",
        "rows>",
        "state rows>",
        "checkpoint>",
        "log>",
        "tables>",
        *(["in flight>"] if some_wait else []),
        "",
    )
    for row in rows:
        table.add_row(
            Text(row.name),
            str(row.snapshot_id),
            Text(row.kind, style="red" if row.error else "magenta" if row.savepoint else ""),
            row.format or "-",
            "-" if row.created_at_ms is None else time_text(row.created_at_ms),
            _number(row.term),
            _number(row.batch_id),
            _number(row.input_rows),
            _number(row.state_rows),
            "-" if row.checkpoint_ms is None else f"{row.checkpoint_ms:.0f} ms",
            _bytes(row.log_bytes),
            _bytes(row.table_bytes),
            *([_number(row.inflight_rows)] if some_wait else []),
            Text(row.error or ""),
        )
    return table


def manifest_json(manifest: Manifest) -> dict[str, Any]:
    """Return the manifest as it is, with the most wanted sums."""
    return {
        **dataclasses.asdict(manifest),
        "log_bytes": manifest.log_bytes,
        "table_bytes": manifest.table_bytes,
        "total_bytes": manifest.total_bytes,
    }


def manifest_parts(job: str, manifest: Manifest, shared: Shared = NOTHING_SHARED) -> Iterator[RenderableType]:
    """Yield a snapshot for people, part by part.

    Args:
        shared: which of its files are hard links of others.
    """
    yield _facts(job, manifest, shared)
    yield _operators(manifest)
    if manifest.open_batch is not None:
        yield _rows_in_flight(manifest, manifest.open_batch)
    if manifest.segments:
        yield _segments(manifest)
    if manifest.layers:
        yield _layers(manifest)
    if manifest.outputs:
        yield _outputs(manifest)
    if manifest.progress is not None:
        yield _progress(manifest)


def _facts(job: str, manifest: Manifest, shared: Shared) -> Table:
    table = new_table(f"Snapshot {manifest.snapshot_id} of {job}", "", "")
    source = manifest.source
    for name, value in (
        ("kind", manifest.kind),
        ("created", time_text(manifest.created_at_ms)),
        ("term", str(manifest.term)),
        ("commit id", manifest.commit_id),
        ("job uid", manifest.job_uid),
        ("parallelism", str(manifest.parallelism)),
        ("batch time", "-" if manifest.time is None else time_text(manifest.time.batch_time_ms)),
        ("watermark", "-" if manifest.time is None else _watermarks(manifest.time)),
        *([("time zone", zone)] if (zone := manifest.session.get(TIME_ZONE_CONF)) else []),
        ("source position", "none yet" if source is None else f"after batch {source.batch_id}"),
        ("offsets", "-" if source is None else _offsets(source)),
        ("changelog", f"{bytes_text(manifest.log_bytes)} in {len(manifest.segments)} segments"),
        ("tables", f"{bytes_text(manifest.table_bytes)} in {len(manifest.layers)} layers"),
        *(
            [("shared by link", f"{shared.files} files ({bytes_text(shared.bytes)}) with {shared}")]
            if shared.files
            else []
        ),
        *(("started from", f"snapshot {o.snapshot_id} of {o.job} ({o.mode})") for o in manifest.origins),
        *(
            ("abandoned", f"snapshots {first} to {last}: an older one was gone back to")
            for first, last in manifest.abandoned
        ),
    ):
        table.add_row(name, Text(value))
    return table


def _operators(manifest: Manifest) -> Table:
    table = new_table("Operators", "operator", "kind", "key", "state", "state kind", "time", "map key", "values")
    for operator in manifest.operators:
        kind = f"{operator.kind} ({operator.modes})" if operator.modes else operator.kind
        first = (Text(operator.uid), Text(kind), Text(operator.key_schema))
        if not operator.states:
            table.add_row(*first, "-", "-", "", "", "-")
        for index, state in enumerate(operator.states):
            left = first if index == 0 else (Text(""), Text(""), Text(""))
            table.add_row(
                *left,
                Text(state.name),
                state.kind,
                _TIMES[state.time],
                Text(state.entry_schema),
                Text(f"{state.schema}{_history(state)}"),
            )
    return table


def _rows_in_flight(manifest: Manifest, batch: OpenBatch) -> Table:
    """Return the progress of the newest batch, operator by operator: waiting rows, since when, with which columns."""
    waiting = {o.uid: o for o in batch.operators}
    table = new_table(
        "Rows in flight: the newest batch is not done", "operator", "is", "rows>", "bytes>", "epoch>", "age>", "columns"
    )
    for operator in manifest.operators:
        found = waiting.pop(operator.uid, None)
        if found is not None:
            _add_waiting(table, found, manifest.created_at_ms)
            continue
        is_settled = operator.uid in batch.settled
        state = (
            "done" if is_settled else "due work has begun" if operator.uid == batch.begun else "waits for rows above"
        )
        table.add_row(Text(operator.uid), state, "0", "-", "-", "-", "")
    for found in waiting.values():
        _add_waiting(table, found, manifest.created_at_ms)
    return table


def _add_waiting(table: Table, found: InflightNumbers, at_ms: int) -> None:
    # Late: Arrow takes longer to load than all the rest of an interactive command.
    from state_runtime.changelog.rows import decode_columns

    columns = [decode_columns(o.columns, f"operator {found.uid!r}").names for o in found.layouts]
    table.add_row(
        Text(found.uid),
        "in flight",
        count_text(found.rows),
        bytes_text(found.bytes),
        str(found.epoch),
        _age(max(0, at_ms - found.read_at_ms) / 1000),
        Text("; ".join(", ".join(names) for names in columns)),
    )


def waiting_operators(manifest: Manifest) -> tuple[InflightNumbers, ...]:
    """Return the operators that have rows in flight."""
    return manifest.open_batch.operators if manifest.open_batch is not None else ()


def _history(state: StateEntry) -> str:
    """Return how often the columns changed since the oldest rows that are stored."""
    return f" ({len(state.history)} older versions stored)" if state.history else ""


def _segments(manifest: Manifest) -> Table:
    table = new_table("Changelog segments, oldest first", "snapshot>", "rows>", "bytes>", "direct>", "path")
    for segment in manifest.segments:
        table.add_row(
            str(segment.snapshot_id),
            count_text(segment.rows),
            bytes_text(segment.bytes),
            bytes_text(segment.direct_bytes),
            Text(segment.path),
        )
    return table


def _layers(manifest: Manifest) -> Table:
    table = new_table("State tables, base first", "snapshots", "operator", "state", "rows>", "bytes>", "path")
    for layer in manifest.layers:
        for entry in layer.tables:
            table.add_row(
                f"{layer.first_snapshot_id} … {layer.last_snapshot_id}",
                Text(entry.operator),
                Text(entry.state),
                count_text(entry.rows),
                bytes_text(entry.bytes),
                Text(entry.path),
            )
    return table


def _outputs(manifest: Manifest) -> Table:
    table = new_table("Output of this epoch", "sink", "epoch>", "files>", "rows>", "bytes>")
    for output in manifest.outputs:
        table.add_row(
            Text(output.sink),
            str(output.epoch),
            count_text(len(output.files)),
            count_text(sum(file.rows for file in output.files)),
            bytes_text(sum(file.bytes for file in output.files)),
        )
    return table


def _progress(manifest: Manifest) -> Table:
    table = new_table("Progress", "", ">")
    if manifest.progress is not None:
        for name, value in manifest.progress.to_json_dict().items():
            if name in NOT_IN_MANIFESTS:
                continue  # 0 would say that there were none
            if isinstance(value, dict):
                for part, of_part in value.items():
                    if name == "phases_ms":
                        table.add_row(f"phase {part}", f"{of_part:.1f} ms")
                    else:
                        table.add_row(f"{name} {part}", _progress_text(part, of_part))
            elif value is not None:
                table.add_row(name, _progress_text(name, value))
    return table


def _progress_text(name: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    if name == "timestamp_ms":
        return time_text(int(value))
    return f"{value:.1f} ms" if name.endswith("_ms") else count_text(value)


def _values(column: Any) -> list[Any]:
    """Convert an Arrow column to JSON values."""
    import pyarrow as pa

    if pa.types.is_date(column.type) or pa.types.is_timestamp(column.type):
        return [_time(cell) for cell in column]
    return [_plain_or_text(cell) for cell in column]


def _plain_or_text(cell: Any) -> Any:
    try:
        return _plain(cell.as_py())
    except (OverflowError, ValueError):
        return str(cell)  # a time inside a nested value: Arrow has a year 20000, Python has not


def _time(cell: Any) -> str | None:
    import pyarrow as pa

    return None if not cell.is_valid else str(cell.cast(pa.string()))


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _cell(value: Any) -> Text:
    """Return a value in a table; control characters are shown, never sent to the terminal."""
    if value is None:
        return Text("null", style="dim")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return Text(_printable(text if len(text) <= _CELL_CHARS_MAX else f"{text[:_CELL_CHARS_MAX]} …"))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _number(value: float | None) -> str:
    return "-" if value is None else count_text(value)


def _bytes(value: int | None) -> str:
    return "-" if value is None else bytes_text(value)


def _age(value: float | None) -> str:
    return "-" if value is None else duration_text(value)


def _watermarks(time: TimeEntry) -> str:
    """Return the job's watermark, and under it those of the operators that have others."""
    own = [f"{uid}: {time_text(clock_ms)}" for uid, clock_ms in sorted(time.clocks.items())]
    return "\n".join([time_text(time.watermark_ms), *own])


def _offsets(source: SourcePosition) -> str:
    """Return the sources' positions, one a line, with their names if they have any. In Spark's offset log entry they
    follow its version and settings."""
    lines = source.offsets.splitlines()[2:]
    named = [f"{name or '(no name)'}: {line}" for name, line in zip(source.names, lines, strict=False)]
    shown = "\n".join(named or lines)
    return shown if len(shown) <= 1000 else f"{shown[:1000]} …"
