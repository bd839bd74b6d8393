"""Tables of a job's checkpoints and the picture of its pipeline, as Dagster's metadata; pure. Every event carries them,
so they are bounded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from urllib.parse import quote

import dagster as dg

from state_runtime.base.progress import InflightProgress, Progress
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.migration import Migration
from state_runtime.snapshot.term_files import RunStatus
from stillstate.assets.cards import cards_of, note_of
from stillstate.assets.metadata_sets import rounded
from stillstate.assets.picture import CARDS_MAX, svg_of
from stillstate.orchestration.probes.points import Point
from stillstate.orchestration.text import counted_text, time_text

__all__ = [
    "CHECKPOINTS_MAX",
    "checkpoints_table",
    "migration_table",
    "operators_table",
    "phases_table",
    "pipeline_picture",
    "restored_text",
    "table",
    "unbroken",
]

Cell = str | int | float | bool

_PLAIN: Final = " !'(),/:;=@{}.-"
"""Of a picture's letters those that are themselves in a link of Markdown, between < and >."""
STATES_MAX: Final = 50
CHECKPOINTS_MAX: Final = 8
"""In every event of a job, which Dagster's storage keeps for weeks; `stillstate snapshots` lists all."""


def table(columns: Mapping[str, str], rows: Iterable[Sequence[Cell]]) -> dg.TableMetadataValue:
    """Return a table; `columns` are names and Dagster's types (string, int, float)."""
    names = list(columns)
    return dg.TableMetadataValue(
        records=[dg.TableRecord(dict(zip(names, row))) for row in rows],
        schema=dg.TableSchema(columns=[dg.TableColumn(name, kind) for name, kind in columns.items()]),
    )


def markdown(columns: Iterable[str], rows: Iterable[Sequence[Cell]]) -> dg.MarkdownMetadataValue:
    """Return the same as Markdown, for data in each event of a job: a tenth of the bytes of Dagster's own tables."""
    names = list(columns)
    lines = ["|".join(names), "|".join("-" for _ in names), *("|".join(_cell(cell) for cell in row) for row in rows)]
    return dg.MetadataValue.md("\n".join(f"|{line}|" for line in lines))


def _cell(cell: Cell) -> str:
    return f"{cell:,}" if isinstance(cell, int) else str(cell).replace("|", "/").replace("\n", " ")


def checkpoints_table(newest: Sequence[Point]) -> dg.MarkdownMetadataValue:
    """Return the newest snapshots, newest first, at most `CHECKPOINTS_MAX`. If there are rows in flight, they have
    columns, and so has the time for which checkpoints waited for rows (`Progress.alignment_ms`)."""
    newest = newest[-CHECKPOINTS_MAX:]
    columns = ["id", "time", "kind", "epoch_s", "input_rows", "output_rows", "log_bytes", "table_bytes", "restored"]
    rows = [_row(point) for point in reversed(newest)]
    if any(_done(point).alignment_ms for point in newest):
        columns.append("alignment_s")
        rows = [(*row, rounded(_done(p).alignment_ms / 1000)) for row, p in zip(rows, reversed(newest), strict=True)]
    if any(_inflight(point) for point in newest):
        columns += ["inflight_rows", "oldest_s", "slowest_task"]
        rows = [(*row, *_inflight_cells(point)) for row, point in zip(rows, reversed(newest), strict=True)]
    return markdown(columns, rows)


def _done(point: Point) -> Progress:
    return point.progress if point.kind == "checkpoint" and point.progress is not None else Progress()


def _row(point: Point) -> tuple[Cell, ...]:
    done = _done(point)
    return (
        point.snapshot_id,
        time_text(point.at_ms),
        f"start of term {point.term}" if point.kind == "fencing" else "checkpoint",
        rounded(done.duration_ms / 1000),
        done.input_rows,
        done.output_rows,
        point.log_bytes,
        point.table_bytes,
        restored_text(done),
    )


def _inflight(point: Point) -> InflightProgress | None:
    return point.progress.inflight if point.kind == "checkpoint" and point.progress is not None else None


def _inflight_cells(point: Point) -> Sequence[Cell]:
    waiting = _inflight(point)
    if waiting is None:
        return 0, 0, ""
    slowest = f"{waiting.slowest} {rounded(waiting.slowest_ms / 1000)} s" if waiting.slowest else ""
    return waiting.rows, rounded(waiting.oldest_ms / 1000), slowest


def restored_text(progress: Progress) -> str:
    """Return the source of the shards of an epoch; empty if they stayed where they were."""
    counts = {"local": progress.local_restores, "stale": progress.stale_restores, "primary": progress.primary_restores}
    return ", ".join(f"{count} {where}" for where, count in counts.items() if count)


def phases_table(progress: Progress) -> dg.MarkdownMetadataValue:
    """Return how the time of the newest epoch was spent."""
    rows = [(name, rounded(ms / 1000)) for name, ms in sorted(progress.phases_ms.items())]
    return markdown(["phase", "seconds"], rows)


def unbroken(text: str) -> str:
    """Return a cell that stays on one line: a page breaks `9 s` at its blank.

    Not at hyphens: names, dates and ids are copied from pages into commands, which accept only the plain hyphen.
    """
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def migration_table(history: Sequence[Migration], now_ms: int) -> dg.TableMetadataValue:
    """Return the steps of a migration with their durations; a reason is in the row of the step that has it first."""
    columns = {"step": "string", "began": "string", "took": "string", "why": "string"}
    rows = []
    for at, step in enumerate(history):
        until_ms = history[at + 1].at_ms if at + 1 < len(history) else now_ms
        is_new = at == 0 or step.reason != history[at - 1].reason
        took = f"{max(0, until_ms - step.at_ms) / 1000:.1f} s" if step.is_open else ""
        rows.append((step.step, unbroken(time_text(step.at_ms)), unbroken(took), step.reason if is_new else ""))
    return table(columns, rows)


def operators_table(manifest: Manifest) -> dg.MarkdownMetadataValue:
    """Return the states, and their content in the tables; the log's rows are not counted by state."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for layer in manifest.layers:
        for stored in layer.tables:
            found = sizes.setdefault((stored.operator, stored.state), [0, 0])
            found[0] += stored.rows
            found[1] += stored.bytes
    rows = [
        (operator.uid, operator.kind, state.name, state.kind, *sizes.get((operator.uid, state.name), (0, 0)))
        for operator in manifest.operators
        for state in operator.states
    ]
    return markdown(["operator", "kind", "state", "holds", "rows_in_tables", "table_bytes"], rows[:STATES_MAX])


def pipeline_picture(status: RunStatus, manifest: Manifest) -> dg.MarkdownMetadataValue:
    """Return a run's pipeline as a picture: what reads what, and of each step its rows, lag and state.

    Dagster's page shows no other picture than an image in Markdown, which may be in the text itself
    (https://github.com/dagster-io/dagster/pull/13443); it knows no Mermaid. Base64 would be a sixth longer.
    """
    picture = svg_of(cards_of(status.steps, manifest), note_of(status, manifest), CARDS_MAX)
    data = quote(picture, safe=_PLAIN)
    return dg.MetadataValue.md(f"![{counted_text(len(status.steps), 'step')}](<data:image/svg+xml,{data}>)")
