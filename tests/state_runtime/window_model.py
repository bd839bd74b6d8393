"""Windows in plain Python: what the vectorised operators are compared with, and an operator driven over epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from memory_reader import MemoryReader
from model import SCHEMA, HashOf, Key, canonical_key, key_columns, spread
from sliced import now_whole_now_sliced

from state_runtime import aggregates
from state_runtime.processors.builtin.windows import plan_windows
from state_runtime.processors.declared.aggregates import Aggregate
from state_runtime.processors.declared.windows import SessionWindow, TimeWindow
from state_runtime.processors.grouping import GroupedRows, group_rows
from state_runtime.processors.operator import EpochClock
from state_runtime.state.table import DELETED, ENTRY, HASH, entries_of
from state_runtime.state.version import OpenVersion

KEYS = SCHEMA.keys
TIME = pa.timestamp("us", "UTC")
INPUT = pa.schema(
    [*KEYS, ("at", TIME), ("n", pa.int64()), ("x", pa.float64()), ("s", pa.string()), ("b", pa.bool_()), ("ends", TIME)]
)
AGGREGATES: dict[str, Aggregate] = {
    "rows": aggregates.count(),
    "n_count": aggregates.count("n"),
    "n_sum": aggregates.sum("n"),
    "n_max": aggregates.max("n"),
    "x_sum": aggregates.sum("x"),
    "x_min": aggregates.min("x"),
    "x_max": aggregates.max("x"),
    "x_avg": aggregates.avg("x"),
    "x_var": aggregates.variance_pop("x"),
    "s_min": aggregates.min("s"),
    "s_first": aggregates.first("s"),
    "s_last": aggregates.last("s", ignore_nulls=True),
    "s_some": aggregates.collect("s", limit=3),
    "s_kinds": aggregates.count_distinct_approx("s"),
    "x_different": aggregates.count_distinct("x"),
    "s_set": aggregates.collect_set("s"),
    "s_by_most": aggregates.max_by("s", "x"),
    "n_by_least": aggregates.min_by("n", "s"),
    "b_any": aggregates.any("b"),
}


@dataclass(frozen=True)
class Row:
    """An input row; `place` is its place in the source over all epochs, `ends_us` the end of its own session."""

    key: Key
    at_us: int | None
    n: int | None = 1
    x: float | None = None
    s: str | None = None
    b: bool | None = None
    ends_us: int | None = None
    place: int = 0


def order(value: Any) -> Any:
    """Spark's order: NaN above every number."""
    return (1, 0.0) if isinstance(value, float) and math.isnan(value) else (0, value)


def reference(rows: Sequence[Row]) -> dict[str, Any]:
    """The aggregates of `AGGREGATES`, over rows in any order."""
    rows = sorted(rows, key=lambda r: r.place)
    n = [r.n for r in rows if r.n is not None]
    x = [r.x for r in rows if r.x is not None]
    s = [r.s for r in rows if r.s is not None]
    b = [r.b for r in rows if r.b is not None]
    mean = sum(x) / len(x) if x else 0.0
    return {
        "rows": len(rows),
        "n_count": len(n),
        "n_sum": sum(n) if n else None,
        "n_max": max(n, default=None),
        "x_sum": sum(x) if x else None,
        "x_min": min(x, key=order, default=None),
        "x_max": max(x, key=order, default=None),
        "x_avg": mean if x else None,
        "x_var": sum((v - mean) ** 2 for v in x) / len(x) if x else None,
        "s_min": min(s, default=None),
        "s_first": rows[0].s,
        "s_last": s[-1] if s else None,
        "s_some": s[:3],
        "s_kinds": len(set(s)),
        "x_different": len({order(v) for v in x}),
        "s_set": sorted(set(s)),
        "s_by_most": max(((order(r.x), r.place, r.s) for r in rows if r.x is not None), default=(None,))[-1],
        "n_by_least": max(((_upside_down(r.s), r.place, r.n) for r in rows if r.s is not None), default=(None,))[-1],
        "b_any": any(b) if b else None,
    }


def _upside_down(text: str) -> tuple[int, ...]:
    """Greater for smaller texts."""
    return (*(-1 - byte for byte in text.encode()), 0)


def same(found: Any, expected: Any) -> bool:
    """Equal, floats nearly so."""
    if isinstance(found, float) and isinstance(expected, float):
        if math.isnan(found) or math.isnan(expected):
            return math.isnan(found) and math.isnan(expected)
        return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9)
    return type(found) is type(expected) and bool(found == expected)


Emitted = dict[tuple[Key, int, int], list[Row]]


def _ceil_ms(us: int) -> int:
    return -(-us // 1000)


@dataclass
class WindowModel:
    """Every window with all of its rows; `lateness_us` and `drops_late` as of the operator."""

    window: TimeWindow | SessionWindow
    mode: str
    lateness_us: int = 0
    drops_late: bool = True
    windows: Emitted = field(default_factory=dict)

    def epoch(self, rows: Sequence[Row], watermark_ms: int, late_ms: int) -> tuple[Emitted, int]:
        """Windows emitted, and the number of late rows."""
        touched: set[tuple[Key, int, int]] = set()
        late = 0
        for row in rows:
            if row.at_us is None:
                continue
            for start, end in self._of(row.at_us, row.ends_us):
                if self.drops_late and end + self.lateness_us <= late_ms * 1000:
                    late += 1
                    continue
                if isinstance(self.window, SessionWindow):
                    self._join(row, start, end, touched)
                else:
                    self.windows.setdefault((row.key, start, end), []).append(row)
                    touched.add((row.key, start, end))
        if self.mode == "complete":
            return dict(self.windows), late
        closed = {w for w in self.windows if _ceil_ms(w[2] + self.lateness_us) <= watermark_ms}
        emitted = {w: self.windows[w] for w in (touched if self.mode == "update" else closed)}
        for w in closed:
            del self.windows[w]
        return emitted, late

    def _of(self, at: int, ends: int | None) -> Iterator[tuple[int, int]]:
        if isinstance(self.window, SessionWindow):
            own = ends if self.window.end_column else at + self.window.gap_us
            if own is not None and own > at:
                yield at, own
            return
        size, slide = self.window.size_us, self.window.slide_us
        start = self.window.start_us
        if self.window.grows:
            begin = at - (at - start) % size
            yield from ((begin, begin + length) for length in range(slide, size + 1, slide) if begin + length > at)
            return
        # From well before, by Spark's definition: start <= at < end.
        candidate = at - (at - start) % slide
        while candidate + size > at:
            yield candidate, candidate + size
            candidate -= slide

    def _join(self, row: Row, start: int, end: int, touched: set[tuple[Key, int, int]]) -> None:
        rows = [row]
        for other in [w for w in self.windows if w[0] == row.key and w[1] <= end and start <= w[2]]:
            rows += self.windows.pop(other)
            touched.discard(other)
            start, end = min(start, other[1]), max(end, other[2])
        self.windows[(row.key, start, end)] = rows
        touched.add((row.key, start, end))


def batch_of_rows(rows: Sequence[Row]) -> pa.RecordBatch:
    columns = [
        *key_columns([r.key for r in rows], negative_zero=len(rows) % 2 == 0),
        *(pa.array([getattr(r, c) for r in rows], INPUT.field(f).type) for c, f in (
            ("at_us", "at"), ("n", "n"), ("x", "x"), ("s", "s"), ("b", "b"), ("ends_us", "ends"))),
    ]  # fmt: skip
    return pa.RecordBatch.from_arrays(columns, schema=INPUT)


def grouped(rows: Sequence[Row], hash_of: HashOf = spread) -> GroupedRows:
    hashes = np.array([hash_of(r.key) for r in rows], dtype=np.uint64)
    sequence = np.array([r.place * 7 for r in rows], dtype=np.int64)
    return group_rows(batch_of_rows(rows), hashes, sequence, KEYS.names, KEYS)


class Strict:
    """A reader that insists on the order that the protocol asks for."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def find_entries(self, state: str, hashes: Any, keys: Any, entries: Any, entry_columns: Any) -> Any:
        pairs = list(zip(hashes.tolist(), entries.tolist(), strict=True))
        assert pairs == sorted(pairs), "pairs in order of (hash, entry)"
        return self._reader.find_entries(state, hashes, keys, entries, entry_columns)

    def read_entries(self, state: str, hashes: Any, keys: Any) -> Any:
        assert hashes.tolist() == sorted(hashes.tolist())
        return self._reader.read_entries(state, hashes, keys)

    def due(self, state: str, through_ms: int) -> pa.RecordBatch:
        due: pa.RecordBatch = self._reader.due(state, through_ms)
        return due

    def iter_rows(self, state: str) -> Iterator[pa.RecordBatch]:
        yield from self._reader.iter_rows(state)

    def overlaid(self, changes: Any, due_taken: Any = None) -> Strict:
        return Strict(self._reader.overlaid(changes, due_taken))


class Driven:
    """An operator over epochs; it reads its state from runs or from the plain `MemoryReader`, which both hold it."""

    def __init__(
        self,
        window: TimeWindow | SessionWindow,
        mode: Any,
        *,
        lateness: str = "0 seconds",
        hash_of: HashOf = spread,
        wanted: dict[str, Aggregate] | None = None,
        runs: bool = True,
        drops_late: bool = True,
    ) -> None:
        self.is_table = mode == "complete"
        self.wanted = AGGREGATES if wanted is None else wanted
        self.hash_of = hash_of
        self.operator = plan_windows(
            uid="op",
            key_columns=KEYS.names,
            key_ddl="name string, score double",
            key_schema=KEYS,
            schema=INPUT,
            time_column="at",
            window=window,
            aggregates=self.wanted,
            mode=mode,
            ddl=lambda schema: ", ".join(schema.names),
            allowed_lateness=lateness,
            drops_late=drops_late,
        )
        (self.state,) = self.operator.state_schemas
        self.schema = self.operator.state_schemas[self.state]
        self.reader = MemoryReader(self.operator.state_schemas)
        self.version = OpenVersion.of_batches("v", {self.state: self.schema.empty()}, self.operator.state_schemas, 0)
        self.runs = runs
        self.snapshot = 0
        self.live = 0
        self.late = 0
        self.wake_ms: int | None = None
        self.changed = self.schema.empty()

    def epoch(self, rows: Sequence[Row], watermark_ms: int = 0, late_ms: int = 0) -> dict[Any, dict[str, Any]]:
        """What is emitted, by (key, start, end)."""
        self.snapshot += 1
        clock = EpochClock(0, watermark_ms, late_ms, self.snapshot)
        result = self.operator.process(
            now_whole_now_sliced(grouped(rows, self.hash_of)),
            Strict(self.version if self.runs else self.reader),
            clock,
            0,
        )
        batches = list(result.outputs)
        self.changed = result.changes.get(self.state, self.schema.empty())
        self._check_changes(self.changed)
        self.reader = self.reader.overlaid(result.changes)
        self.version = self.version.overlaid(result.changes, result.due_taken)
        self.live += result.rows_added
        stored = self.reader.rows(self.state)
        assert self.live == len(stored), "rows_added"
        self.late = result.late_rows
        assert result.due_taken == ({} if self.is_table else {self.state: watermark_ms})
        assert self.is_table or all(row["due"] > watermark_ms for row in stored), "due is gone or has another time"
        if not self.is_table and not rows and (self.wake_ms is None or self.wake_ms > watermark_ms):
            assert sum(batch.num_rows for batch in batches) == 0, "the runtime would not have visited the shard"
        due_ms = self.version.next_due(self.state)
        self.wake_ms = None if due_ms is None else self.operator.wake_ms(due_ms, clock)
        emitted: dict[Any, dict[str, Any]] = {}
        for batch in batches:
            assert batch.schema.equals(self.operator.output_schema)
            starts, ends = (batch["window"].field(i).cast(pa.int64()).to_pylist() for i in (0, 1))
            columns = [batch[name].to_pylist() for name in self.wanted]
            keys = zip(batch["name"].to_pylist(), batch["score"].to_pylist(), strict=True)
            for number, (key, start, end) in enumerate(zip(keys, starts, ends, strict=True)):
                window = (canonical_key(*key), start, end)
                assert window not in emitted, f"{window} twice"
                emitted[window] = {name: column[number] for name, column in zip(self.wanted, columns, strict=True)}
        return emitted

    def rewrite(self, due_ms: Callable[[dict[str, Any]], int]) -> None:
        """Give every stored row another time, as if it had been stored so from the beginning."""
        rows = [row | {"due": due_ms(row)} for row in self.reader.rows(self.state)]
        states = {self.state: pa.RecordBatch.from_pylist(rows, schema=self.schema.arrow)}
        self.reader = MemoryReader(self.operator.state_schemas).overlaid(states)
        self.version = OpenVersion.of_batches("v", states, self.operator.state_schemas, 0)
        self.wake_ms = 0 if rows else None

    def _check_changes(self, batch: pa.RecordBatch) -> None:
        self.schema.check_batch(batch, "changes")
        identities = [
            (row[HASH], canonical_key(row["key.name"], row["key.score"]), row[ENTRY]) for row in batch.to_pylist()
        ]
        assert len(set(identities)) == len(identities), "each row once"
        assert bool(np.all(entries_of(batch) > 0))
        for row in batch.to_pylist():
            if row[DELETED]:
                assert row["due"] is None
                assert all(row[f"value.{f.name}"] is None for f in self.schema.values)
