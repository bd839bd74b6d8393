"""The steps of a job as the cards of a picture, with what is known of each; pure.

What is not known is left out: a heartbeat of an earlier version has no steps, a manifest of an earlier one no clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from state_runtime.base.steps import Step
from state_runtime.snapshot.manifest import Manifest, TimeEntry
from state_runtime.snapshot.term_files import RunStatus
from stillstate.assets.picture import Card, Tone
from stillstate.orchestration.text import age_text, bytes_text, count_text, counted_text, time_text

__all__ = ["cards_of", "note_of"]

_TONES: Final[dict[str, Tone]] = {
    "source": "source",
    "sink": "sink",
    "transform": "stateless",
    "union": "stateless",
    "expect_or_drop": "stateless",
}


def cards_of(steps: Sequence[Step], newest: Manifest | None) -> list[Card]:
    """Return a card for each step, at the step's place.

    Args:
        newest: the newest snapshot; None: there is none.
    """
    sources = [step.name for step in steps if step.kind == "source"]
    return [
        Card(
            title=step.name or step.kind,
            kind=step.kind if step.name else "",
            tone=_TONES.get(step.kind, "operator"),
            lines=tuple(filter(None, map(_joined, _lines(step, newest, sources)))),
            reads=step.reads,
        )
        for step in steps
    ]


def note_of(status: RunStatus, newest: Manifest) -> str:
    """Return what the numbers of the cards refer to, in one line."""
    began = f"rows since {time_text(status.started_at_ms)}; " if status.started_at_ms > 0 else ""
    return f"{began}state of snapshot {newest.snapshot_id}"


def _joined(parts: Iterable[str]) -> str:
    return " · ".join(filter(None, parts))


def _lines(step: Step, newest: Manifest | None, sources: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    rows = counted_text(step.rows, "row") if step.rows is not None else ""
    if step.kind == "source":
        ahead = f"{count_text(step.aside_rows)} too far ahead" if step.aside_rows else ""
        return ((rows, *_source_lag(step.name, newest, sources)), (ahead,))
    if step.kind in _TONES:
        return ((rows, f"{count_text(step.aside_rows)} bad" if step.aside_rows else ""),)
    late = f"{count_text(step.late_rows)} late" if step.late_rows else ""
    return ((_keys(step),), (rows, late, *_in_flight(step, newest)), (_watermark(step, newest),), _state(step, newest))


def _keys(step: Step) -> str:
    keys = " = ".join(", ".join(port) for port in step.keys if port)
    return f"by {keys}" if keys else "all rows are one group" if step.keys else ""


def _in_flight(step: Step, newest: Manifest | None) -> tuple[str, ...]:
    batch = newest.open_batch if newest is not None else None
    waiting = sum(each.rows for each in batch.operators if each.uid == step.name) if batch is not None else 0
    return (f"{count_text(waiting)} in flight",) if waiting else ()


def _watermark(step: Step, newest: Manifest | None) -> str:
    time = newest.time if newest is not None else None
    at_ms = time.watermark_of(step.name) if time is not None else 0
    if time is None or at_ms <= 0:
        return ""
    return f"watermark {time_text(at_ms)}, {_behind(at_ms, time)}"


def _source_lag(name: str, newest: Manifest | None, sources: Sequence[str]) -> tuple[str, ...]:
    """Return how far the newest event time of a source is behind the clock, and whether it is idle."""
    time = newest.time if newest is not None else None
    if time is None:
        return ()
    newest_ms = [at_ms for column, at_ms in time.event_time_ms.items() if _source_of(column, sources) == name]
    lag = f"newest event {_behind(max(newest_ms), time)}" if newest_ms else ""
    return lag, "idle" if name in time.idle else ""


def _source_of(column: str, sources: Sequence[str]) -> str:
    """Return the source of a column with event time, whose name begins with that of a source that has one."""
    return max((name for name in sources if column.startswith(f"{name}.")), key=len, default="")


def _behind(at_ms: int, time: TimeEntry) -> str:
    return f"{age_text(max(0, time.batch_time_ms - at_ms) / 1000)} behind"


def _state(step: Step, newest: Manifest | None) -> tuple[str, ...]:
    live = f"state {counted_text(step.state_rows, 'row')}" if step.state_rows is not None else ""
    tables = [
        table
        for layer in (newest.layers if newest is not None else ())
        for table in layer.tables
        if table.operator == step.name
    ]
    size = bytes_text(sum(table.bytes for table in tables))
    folded = f"tables {counted_text(sum(table.rows for table in tables), 'row')}, {size}" if tables else ""
    return live, folded
