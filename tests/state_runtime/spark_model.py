"""Spark's `transformWithState`, as its documentation and probes say it works, over plain dictionaries: what ours is compared with.

User code is a *script*: per call a list of operations on one value, one list and one map state and on timers. The same script
runs in a real `StatefulProcessor` (`Scripted`) over our handle and in `SparkModel`; both write down what every operation gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from hypothesis import strategies as st
from memory_reader import MemoryReader
from model import FakeClock
from pyspark.sql import Row
from sliced import now_whole_now_sliced

from state_runtime.processors.grouping import GroupedRows, group_rows
from state_runtime.processors.operator import EpochClock, ShardResult
from state_runtime.processors.user.handle import TIMERS, StateDeclaration, layout_of
from state_runtime.processors.user.stateful import StatefulProcessorOperator
from state_runtime.state.local import LocalShard
from state_runtime.state.reader import StateReader
from state_runtime.state.table import CLEAR_MARKER, StateSchema
from state_runtime.state.version import OpenVersion

Key = tuple[Any, ...]
Operation = tuple[Any, ...]
Script = Sequence[Operation]

KEYS = pa.schema([("k", pa.string())])
INPUT = pa.schema([("k", pa.string()), ("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
OUTPUT = pa.schema([("k", pa.string()), ("what", pa.string())])
NAMES: tuple[str | None, ...] = (None, "", "a", "b", "c", "d", "e")


@dataclass(frozen=True)
class Setup:
    """What a job declares."""

    time_mode: Any = "processing"
    ttl_ms: int = 0
    pandas: bool = False
    slice_keys_max: int = 65_536
    slice_rows_max: int = 200_000
    frame_rows_max: int = 10_000


# --- the model ---------------------------------------------------------------------------------------------------


@dataclass
class SparkModel:
    """State of one partition, and the rules of spark.md 1.3, 1.5 and 1.6. A state holds (content, expiry) pairs."""

    setup: Setup
    value: dict[Key, tuple[Any, float]] = field(default_factory=dict)
    list: dict[Key, list[tuple[Any, float]]] = field(default_factory=dict)
    map: dict[Key, dict[Any, tuple[Any, float]]] = field(default_factory=dict)
    timers: dict[Key, set[int]] = field(default_factory=dict)

    def epoch(
        self,
        clock: EpochClock,
        initial: Sequence[tuple[Key, Sequence[Script]]],
        rows: Sequence[tuple[Key, Script]],
        fire: Callable[[Key, int], Script],
        rank: Callable[[Key], Any],
    ) -> list[Any]:
        """Run one batch; what every call saw, in order."""
        self.expiry = clock.batch_time_ms + self.setup.ttl_ms if self.setup.ttl_ms else float("inf")
        self._expire(clock.batch_time_ms)
        seen = [("initial", key, self.run(key, script)) for key, scripts in initial for script in scripts]
        seen += [("input", key, self.run(key, script)) for key, script in rows]
        if self.setup.time_mode != "none":
            bound = clock.batch_time_ms if self.setup.time_mode == "processing" else clock.watermark_ms
            due = [(ts, key) for key, times in self.timers.items() for ts in times if ts <= bound]
            for ts, key in sorted(due, key=lambda d: (d[0], rank(d[1]))):
                seen.append(("timer", key, ts, self.run(key, fire(key, ts))))
                self.timers.get(key, set()).discard(ts)
        return seen

    def _expire(self, now_ms: int) -> None:
        self.value = {k: v for k, v in self.value.items() if v[1] > now_ms}
        self.list = {k: [e for e in v if e[1] > now_ms] for k, v in self.list.items()}
        self.map = {k: {m: e for m, e in v.items() if e[1] > now_ms} for k, v in self.map.items()}

    def run(self, key: Key, script: Script) -> list[Any]:
        """One call of user code."""
        return [getattr(self, f"_{what}_{method}")(key, *arguments) for what, method, *arguments in script]

    def _value_get(self, key: Key) -> Any:
        return self.value[key][0] if key in self.value else None

    def _value_exists(self, key: Key) -> bool:
        return key in self.value

    def _value_update(self, key: Key, value: Any) -> None:
        self.value[key] = (value, self.expiry)

    def _value_clear(self, key: Key) -> None:
        self.value.pop(key, None)

    def _list_get(self, key: Key) -> Any:
        return [v for v, _ in self.list.get(key, [])]

    def _list_exists(self, key: Key) -> bool:
        return bool(self.list.get(key))

    def _list_appendValue(self, key: Key, value: Any) -> None:
        self.list.setdefault(key, []).append((value, self.expiry))

    def _list_appendList(self, key: Key, values: Any) -> None:
        self.list.setdefault(key, []).extend((v, self.expiry) for v in values)

    def _list_put(self, key: Key, values: Any) -> None:
        self.list[key] = [(v, self.expiry) for v in values]

    def _list_clear(self, key: Key) -> None:
        self.list.pop(key, None)

    def _map_getValue(self, key: Key, entry: Any) -> Any:
        return self.map.get(key, {}).get(entry, (None,))[0]

    def _map_containsKey(self, key: Key, entry: Any) -> bool:
        return entry in self.map.get(key, {})

    def _map_updateValue(self, key: Key, entry: Any, value: Any) -> None:
        self.map.setdefault(key, {})[entry] = (value, self.expiry)

    def _map_removeKey(self, key: Key, entry: Any) -> None:
        self.map.get(key, {}).pop(entry, None)

    def _map_exists(self, key: Key) -> bool:
        return bool(self.map.get(key))

    def _map_iterator(self, key: Key) -> Any:
        return sorted(((m, v) for m, (v, _) in self.map.get(key, {}).items()), key=repr)

    def _map_keys(self, key: Key) -> Any:
        return sorted(self.map.get(key, {}), key=repr)

    def _map_values(self, key: Key) -> Any:
        return sorted((v for v, _ in self.map.get(key, {}).values()), key=repr)

    def _map_clear(self, key: Key) -> None:
        self.map.pop(key, None)

    def _timers_registerTimer(self, key: Key, ts: int) -> None:
        self.timers.setdefault(key, set()).add(ts)

    def _timers_deleteTimer(self, key: Key, ts: int) -> None:
        self.timers.get(key, set()).discard(ts)

    def _timers_listTimers(self, key: Key) -> Any:
        return sorted(self.timers.get(key, set()))

    def live_rows(self, timers: bool = True) -> int:
        """How many rows the state has."""
        return (
            len(self.value)
            + sum(map(len, self.list.values()))
            + sum(map(len, self.map.values()))
            + (sum(map(len, self.timers.values())) if timers else 0)
        )


# --- ours --------------------------------------------------------------------------------------------------------


class Scripted:
    """A `StatefulProcessor` that runs scripts; rows carry the number of theirs."""

    def __init__(self, setup: Setup, fire: Callable[[Key, int], Script] = lambda key, ts: ()) -> None:
        self.setup = setup
        self.fire = fire
        self.scripts: list[Script] = []
        self.seen: list[Any] = []
        self.inits = self.closed = 0

    def init(self, handle: Any) -> None:
        self.inits += 1
        ttl = self.setup.ttl_ms or None
        self.timers = handle
        self.value = handle.getValueState("v", "n long, s string", ttl)
        self.list = handle.getListState("l", "n long, s string", ttlDurationMs=ttl)
        self.map = handle.getMapState("m", "a long, b string", "n long, s string", ttl)

    def _run(self, script: Script) -> list[Any]:
        answers = []
        for what, method, *arguments in script:
            answer = getattr(getattr(self, what), method)(*arguments)
            if isinstance(answer, Iterator):
                answer = list(answer)
                answer = sorted(answer, key=repr) if what == "map" else answer
            answers.append(answer)
        return answers

    def _rows(self, given: Any) -> list[tuple[str, int]]:
        """Key and script number of every row."""
        if self.setup.pandas:
            return [(k, int(n)) for frame in given for k, n in zip(frame["k"], frame["n"])]
        return [(row.k, row.n) for row in given]

    def _note(self, key: Key, entry: Any) -> Iterator[Any]:
        self.seen.append(entry)
        what = f"{entry[0]}{len(self.seen)}"
        if self.setup.pandas:
            yield pd.DataFrame({"what": [what], "k": [key[0]]})
        else:
            yield Row(what=what, k=key[0])

    def handleInitialState(self, key: Key, initial: Any, timers: Any) -> None:
        assert type(key) is tuple
        for k, n in self._rows([initial]):
            assert k == key[0]
            self.seen.append(("initial", key, self._run(self.scripts[n])))

    def handleInputRows(self, key: Key, rows: Any, timers: Any) -> Iterator[Any]:
        assert type(key) is tuple
        answers = []
        for k, n in self._rows(rows):
            assert k == key[0]
            answers += self._run(self.scripts[n])
        yield from self._note(key, ("input", key, answers))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        assert isinstance(key, Row)
        assert key.k == key[0]
        ts = expiredTimerInfo.getExpiryTimeInMs()
        answers = self._run(self.fire(tuple(key), ts))
        yield from self._note(key, ("timer", tuple(key), ts, answers))

    def close(self) -> None:
        self.closed += 1


def schemas_of(setup: Setup) -> dict[str, StateSchema]:
    """The layouts of the three states."""
    pair = pa.schema([("n", pa.int64()), ("s", pa.string())])
    entry = pa.schema([("a", pa.int64()), ("b", pa.string())])
    declared = [
        StateDeclaration("v", "value", "", None, setup.ttl_ms),
        StateDeclaration("l", "list", "", None, setup.ttl_ms),
    ]
    declared.append(StateDeclaration("m", "map", "", "", setup.ttl_ms))
    return {d.name: layout_of(d, KEYS, pair, entry if d.kind == "map" else None) for d in declared}


def operator_of(setup: Setup, processor: Any, **more: Any) -> StatefulProcessorOperator:
    """The operator around a processor with the three states."""
    given: dict[str, Any] = {
        "uid": "op",
        "key_columns": ("k",),
        "key_ddl": "k string",
        "key_schema": KEYS,
        "output_schema": OUTPUT,
        "state_schemas": schemas_of(setup),
        "state_ddl": {"v": "n long, s string", "l": "n long, s string", "m": "n long, s string"},
        "entry_ddl": {"m": "a long, b string"},
        "state_kinds": {"v": "value", "l": "list", "m": "map"},
        "ttls_ms": dict.fromkeys(("v", "l", "m"), setup.ttl_ms) if setup.ttl_ms else {},
        "processor": processor,
        "pandas": setup.pandas,
        "output_rows_per_batch": 3,
        "frame_rows_max": setup.frame_rows_max,
        "time_mode": setup.time_mode,
        "slice_keys_max": setup.slice_keys_max,
        "slice_rows_max": setup.slice_rows_max,
    }
    return StatefulProcessorOperator(**(given | more))


def grouped(
    rows: Sequence[tuple[str | None, int]], hash_of: Callable[[Key], int], schema: pa.Schema = INPUT
) -> GroupedRows:
    """Rows of (key, number) as a task groups them; the event time is the number in milliseconds."""
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array([k for k, _ in rows], pa.string()),
            pa.array([n for _, n in rows], pa.int64()),
            pa.array([n * 1000 for _, n in rows], pa.timestamp("us", "UTC")),
        ],
        schema=schema,
    )
    hashes = np.array([hash_of((k,)) for k, _ in rows], dtype=np.uint64)
    return group_rows(batch, hashes, np.arange(len(rows), dtype=np.int64), ["k"], KEYS)


def keys_of(rows: GroupedRows) -> list[Key]:
    """The groups' keys in order."""
    return [(k,) for k in rows.keys[0].to_pylist()]


@dataclass
class Job:
    """Epochs over one shard: the state is carried as the changes that every epoch left behind."""

    setup: Setup
    folder: Path | None = None
    """Where a real local store keeps the state; without one it is in a `MemoryReader`."""

    def __post_init__(self) -> None:
        self.schemas = operator_of(self.setup, None).state_schemas
        self.store = LocalShard(self.folder, self.schemas, FakeClock()) if self.folder is not None else None
        self.version = 0
        self.batches: dict[str, list[pa.RecordBatch]] = {name: [] for name in self.schemas}
        self.rows = 0

    def run(
        self, processor: Any, rows: GroupedRows, clock: EpochClock, initial: GroupedRows | None = None, **more: Any
    ) -> tuple[ShardResult, list[dict[str, Any]]]:
        """One epoch; the outputs are drained and the changes become part of the state."""
        reader = self._reader(clock.batch_time_ms)
        result = operator_of(self.setup, processor, **more).process(
            now_whole_now_sliced(rows), reader, clock, 0, initial
        )
        outputs = [row for batch in result.outputs for row in batch.to_pylist()]
        for name, batch in result.changes.items():
            self.schemas[name].check_batch(batch, name)
            self.batches[name].insert(0, batch)
        self.rows += result.rows_added
        if self.store is not None:
            self.version += 1
            version, now_ms = f"{self.version:016x}", clock.batch_time_ms
            self.store.write(version, reader, result.changes, now_ms=now_ms, due_taken=result.due_taken, runs_max=3)
        return result, outputs

    def _reader(self, now_ms: int) -> StateReader:
        if self.store is None:
            return MemoryReader(self.schemas, self.batches, now_ms)
        if self.version == 0:
            empty = {name: schema.empty() for name, schema in self.schemas.items()}
            return OpenVersion.of_batches("", empty, self.schemas, now_ms)
        return self.store.open(f"{self.version:016x}", now_ms, verify=False)

    def stored(self, now_ms: int) -> dict[str, list[dict[str, Any]]]:
        """The live rows of every state."""
        reader = MemoryReader(self.schemas, self.batches, now_ms)
        return {name: reader.rows(name) for name in self.schemas}


def markers_in(batch: pa.RecordBatch) -> int:
    """Clear markers in a batch of the entries layout."""
    return batch.column(2).to_pylist().count(CLEAR_MARKER)


# --- random scripts ----------------------------------------------------------------------------------------------

pairs = st.tuples(st.none() | st.integers(-3, 3), st.none() | st.sampled_from(["", "x", "y"]))
entries = st.tuples(st.integers(0, 2), st.none() | st.sampled_from(["", "x"]))
times = st.integers(-30, 130)


def _operation(what: str, method: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Operation]:
    return st.tuples(st.just(what), st.just(method), *arguments)


some_pairs = st.lists(pairs, min_size=1, max_size=3)
value_operations = st.one_of(
    _operation("value", "get"), _operation("value", "exists"), _operation("value", "clear"), _operation("value", "update", pairs)
)  # fmt: skip
list_operations = st.one_of(
    _operation("list", "get"), _operation("list", "exists"), _operation("list", "clear"),
    _operation("list", "appendValue", pairs), _operation("list", "appendList", some_pairs), _operation("list", "put", some_pairs),
)  # fmt: skip
map_operations = st.one_of(
    _operation("map", "getValue", entries), _operation("map", "containsKey", entries),
    _operation("map", "updateValue", entries, pairs), _operation("map", "removeKey", entries), _operation("map", "exists"),
    _operation("map", "iterator"), _operation("map", "keys"), _operation("map", "values"), _operation("map", "clear"),
)  # fmt: skip
timer_operations = st.one_of(
    _operation("timers", "registerTimer", times), _operation("timers", "deleteTimer", times), _operation("timers", "listTimers")
)  # fmt: skip

__all__ = ["TIMERS", "Job", "Scripted", "Setup", "SparkModel"]
