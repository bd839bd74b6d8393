"""Processors that use every method of Spark's contract and say in their output rows what each call gave.

Every class is plain pyspark: both engines get the same object. `InPandas` gives the pandas flavour of a row processor; the ones
that look at what pandas itself sees are at the end.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues

from tests.parity.harness import canonical

SCRIPT = "key string, seq long, op string, args string, ts timestamp"
SAID = "key string, seq long, op string, said string"

PAIR = "n int, s string"
STATES: dict[str, tuple[str, ...]] = {
    "v": ("value", PAIR),
    "w": ("value", "n long"),
    "l": ("list", PAIR),
    "m": ("map", "a int, b string", PAIR),
}
TTL_MS = 1_000
STATES_WITH_TTL: dict[str, tuple[Any, ...]] = {
    **STATES,
    "vt": ("value", PAIR, TTL_MS),
    "lt": ("list", PAIR, TTL_MS),
    "mt": ("map", "a int, b string", PAIR, TTL_MS),
    # 0 is no TTL, and a TTL may be longer than the stream.
    "v0": ("value", PAIR, 0),
    "long": ("list", PAIR, 10**9),
}


def declare(handle: StatefulProcessorHandle, states: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """State objects by name."""
    makers = {"value": handle.getValueState, "list": handle.getListState, "map": handle.getMapState}
    return {name: makers[kind](name, *arguments) for name, (kind, *arguments) in states.items()}


def everything(states: Mapping[str, Any], kinds: Mapping[str, tuple[Any, ...]]) -> str:
    """What all states of the current key hold; maps without order."""
    parts = []
    for name, state in states.items():
        kind = kinds[name][0]
        held: Any = state.get() if kind == "value" else list(state.get()) if kind == "list" else _entries(state)
        parts.append(f"{name}={state.exists()}:{canonical(held)}")
    return " ".join(parts)


def _entries(state: Any) -> list[Any]:
    return sorted(((tuple(k), tuple(v)) for k, v in state.iterator()), key=repr)


class Scripted(StatefulProcessor):
    """Does what its input rows say, one operation a row, and says what came of it.

    A timer acts by its own timestamp (see `_on_timer`), so that handlers do everything that handlers may do.
    """

    def __init__(self, states: Mapping[str, tuple[Any, ...]], timers: bool = False) -> None:
        self._declared = dict(states)
        self._timers = timers

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._states = declare(handle, self._declared)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        for row in sorted(rows, key=lambda row: row.seq):
            said = self._do(row.op, ast.literal_eval(row.args), timerValues)
            yield Row(key=key[0], seq=row.seq, op=f"{row.op}{row.args}", said=said)

    def handleExpiredTimer(self, key: Any, timerValues: TimerValues, expiredTimerInfo: Any) -> Iterator[Row]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        seen = self._look(timerValues)
        self._on_timer(at)
        # The order of a key's timers shows in what each of them finds.
        found = self._states["w"].get()
        self._states["w"].update(((found[0] if found else 0) + 1,))
        yield Row(key=key[0], seq=-at, op=f"timer {at} {tuple(key)!r}", said=f"{seen} -> {self._look(timerValues)}")

    def close(self) -> None:
        pass

    def _look(self, time: TimerValues) -> str:
        # Spark's order of listTimers is that of its store's bytes.
        timers = sorted(self._handle.listTimers()) if self._timers else "-"
        clock = (time.getCurrentProcessingTimeInMs(), time.getCurrentWatermarkInMs())
        return f"clock={clock} timers={timers} {everything(self._states, self._declared)}"

    def _on_timer(self, at: int) -> None:
        handle, states = self._handle, self._states
        actions: list[Callable[[], Any]] = [
            lambda: handle.registerTimer(at + 700),
            lambda: handle.registerTimer(at - 5),  # in the past: the next batch fires it
            lambda: [handle.deleteTimer(t) for t in list(handle.listTimers()) if t > at],
            lambda: states["v"].update((at % 97, None)),
            lambda: states["l"].appendValue((at % 97, "by timer")),
            lambda: states["m"].updateValue((at % 3, "t"), (1, "by timer")),
            lambda: [states[name].clear() for name in ("v", "l", "m")],
            lambda: handle.deleteTimer(at),  # itself
            lambda: handle.registerTimer(at),  # itself again: gone after the handler, whatever it registers
            lambda: None,
        ]
        actions[at % len(actions)]()

    def _do(self, op: str, args: tuple[Any, ...], time: TimerValues) -> str:
        if op == "look":
            return self._look(time)
        if op == "register":
            return canonical([self._handle.registerTimer(at) for at in args])
        if op == "unregister":
            return canonical([self._handle.deleteTimer(at) for at in args])
        name, _, method = op.partition(".")
        state = self._states[name]
        if method == "twice":
            # Two iterators over one state are independent of each other.
            first, second = state.get(), state.get()
            return canonical([next(first, None), list(second), list(first)])
        if method == "drain":
            return canonical(sorted((state.removeKey(k), tuple(k), tuple(v)) for k, v in state.iterator()))
        if method == "rewrite":
            # What an iterator gives when the list is replaced under it, element by element.
            return canonical(state.put([((n or 0) + 1, s) for n, s in state.get()]) if state.exists() else None)
        try:
            result = getattr(state, method)(*args)
        except (TypeError, ValueError):
            # Spark's TypeError is an InvalidData in ours, which is a ValueError.
            return "refused"
        if method == "iterator":
            result = sorted(((tuple(k), tuple(v)) for k, v in result), key=repr)
        elif method in ("keys", "values"):
            result = sorted(result, key=repr)
        elif method == "get" and self._declared[name][0] == "list":
            result = list(result)
        return f"{type(result).__name__} {canonical(result)}"


class InPandas(StatefulProcessor):
    """The pandas flavour of a row processor: rows in and out of data frames, everything else handed through."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._rows.init(handle)

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[pd.DataFrame]:
        made = (
            Row(**dict(zip(frame.columns, values)))
            for frame in rows
            for values in frame.itertuples(index=False, name=None)
        )
        return _frames(self._rows.handleInputRows(key, made, timerValues))

    def handleExpiredTimer(self, key: Any, timerValues: TimerValues, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        return _frames(self._rows.handleExpiredTimer(key, timerValues, expiredTimerInfo))

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: TimerValues) -> None:
        for values in initialState.itertuples(index=False, name=None):
            self._rows.handleInitialState(key, Row(**dict(zip(initialState.columns, values))), timerValues)

    def close(self) -> None:
        self._rows.close()


def _frames(rows: Iterable[Row]) -> Iterator[pd.DataFrame]:
    for row in rows:
        yield pd.DataFrame([row.asDict()])


INITIAL = "key string, n int, s string"


class Seeded(Scripted):
    """Begins with an initial state: several rows a key, all kinds of state, and timers."""

    def handleInitialState(self, key: Any, initialState: Row, timerValues: TimerValues) -> None:
        pair = (initialState.n, initialState.s)
        self._states["v"].update(pair)
        self._states["l"].appendValue(pair)
        self._states["m"].updateValue((initialState.n, key[0]), pair)
        if self._timers:
            self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + initialState.n * 100)


class Keys(StatefulProcessor):
    """Counts the rows of keys of any type, and says what the key looks like, also to a timer."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._seen = handle.getValueState("seen", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Row]:
        n = (self._seen.get() or (0,))[0] + sum(1 for _ in rows)
        self._seen.update((n,))
        self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + n)
        yield self._say("rows", key, n)

    def handleExpiredTimer(self, key: Any, timerValues: TimerValues, expiredTimerInfo: Any) -> Iterator[Row]:
        yield self._say("timer", key, self._seen.get()[0])

    def close(self) -> None:
        pass

    @staticmethod
    def _say(what: str, key: Any, n: int) -> Row:
        parts = ", ".join(f"{type(part).__name__} {canonical(part)}" for part in key)
        return Row(what=what, key=f"{isinstance(key, tuple)} {len(key)}: {parts}", n=n)


KEYS_SAID = "what string, key string, n long"

EVERY_TYPE = (
    "b boolean, i8 byte, i16 short, i int, l long, f float, d double, s string, bin binary, dt date, ts timestamp, "
    "tn timestamp_ntz, dec decimal(20,3), st struct<x:int,y:string>, ar array<int>, mp map<string,int>, "
    "deep array<struct<a:int,b:map<string,array<double>>>>"
)
MAP_KEY = "i int, s string, dt date, dec decimal(20,3), bin binary, st struct<x:int,y:string>"


class EveryType(StatefulProcessor):
    """Keeps whole input rows in a value, a list and a map, and puts out what it finds there one batch later."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._value = handle.getValueState("value", EVERY_TYPE)
        self._list = handle.getListState("list", EVERY_TYPE)
        self._map = handle.getMapState("map", MAP_KEY, EVERY_TYPE)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        for where, held in [
            *([("value", self._value.get())] if self._value.exists() else []),
            *(("list", element) for element in self._list.get()),
            *(("map", value) for value in self._map.values()),
            *(("map key", (*k, *[None] * 11)) for k in self._map.keys()),  # noqa: SIM118 (a MapState is no dict)
        ]:
            if where == "map key":
                yield Row(key=key[0], place=where, said=canonical(list(held)))
                continue
            names = [part.split()[0] for part in EVERY_TYPE.split(", ")]
            yield Row(key=key[0], place=where, said=_with_types(held), **dict(zip(names, held)))
        for row in rows:
            values = _with_dicts(row)
            self._value.update(values)
            self._list.appendValue(values)
            self._map.updateValue((row.i, row.s, row.dt, row.dec, row.bin, row.st), values)
            known = self._map.getValue((row.i, row.s, row.dt, row.dec, row.bin, row.st))
            said = f"{type(known).__name__} {self._map.containsKey((row.i, 'no', row.dt, row.dec, row.bin, row.st))}"
            yield Row(key=key[0], place="input", said=f"{said} {_with_types(known)}")

    def close(self) -> None:
        pass


def _with_dicts(row: Row) -> tuple[Any, ...]:
    """The row's columns without the key, maps as dict: a row has them as pairs, which Spark's states silently store as null."""
    fields = {name: row[name] for name in row.__fields__ if name != "key"}
    if fields["mp"] is not None:
        fields["mp"] = dict(fields["mp"])
    if fields["deep"] is not None:
        fields["deep"] = [
            part and {"a": part["a"], "b": None if part["b"] is None else dict(part["b"])} for part in fields["deep"]
        ]
    return tuple(fields.values())


EVERY_SAID = f"key string, place string, said string, {EVERY_TYPE}"


def _with_types(values: Iterable[Any]) -> str:
    return ", ".join(f"{type(value).__name__} {canonical(value)}" for value in values)


class RowView(StatefulProcessor):
    """What an input row looks like."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        one_shot = iter(rows) is rows
        clock = (timerValues.getCurrentProcessingTimeInMs(), timerValues.getCurrentWatermarkInMs())
        for number, row in enumerate(rows):
            yield Row(
                key=key[0],
                number=number,
                said=f"{clock} {one_shot} {isinstance(row, Row)} {list(row.__fields__)} {_with_types(row)} {list(row.asDict())}",
            )

    def close(self) -> None:
        pass


VIEW_SAID = "key string, number long, said string"


class FrameView(StatefulProcessor):
    """What pandas makes of the rows of a key: types, names, index and pieces."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._seen = handle.getValueState("seen", "n long, at timestamp")

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[pd.DataFrame]:
        said, n, newest = [], 0, None
        for frame in rows:
            types = [f"{name}:{dtype}" for name, dtype in frame.dtypes.items()]
            cells = [
                f"{type(v).__name__} {canonical(v)}" for row in frame.itertuples(index=False, name=None) for v in row
            ]
            said.append(f"{types} {list(frame.index)} {cells}")
            n += len(frame)
            newest = frame["ts"].max()
        before = self._seen.get()
        # numpy and pandas scalars go into the state as they are.
        self._seen.update((frame["l"].count(), newest))
        yield pd.DataFrame({"key": [key[0]] * len(said), "number": range(len(said)), "said": said})
        yield pd.DataFrame({"said": [f"{type(key).__name__} {key!r} {n} {before!r}"], "number": [-1], "key": [key[0]]})

    def close(self) -> None:
        pass


class Pieces(StatefulProcessor):
    """Into which frames many rows of one key are cut."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        pass

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[pd.DataFrame]:
        for number, frame in enumerate(rows):
            said = f"{len(frame)} {frame['n'].dtype} {frame['n'].iloc[0]} {frame['n'].iloc[-1]} {frame.index[-1]}"
            yield pd.DataFrame({"key": [key[0]], "number": [number], "said": [said]})

    def close(self) -> None:
        pass


OUTPUTS = (
    "key string, n long, d double, s string, st struct<x:int,y:string>, ar array<int>, mp map<string,int>, ts timestamp"
)


class RowOutputs(StatefulProcessor):
    """All the forms in which rows may be put out: the form is named by the key."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Any:
        form = key[0]
        full = {"key": form, "n": 1, "d": 0.5, "s": "s", "st": Row(x=1, y="y"), "ar": [1, None], "mp": {"a": 1}}
        forms: dict[str, Callable[[], Any]] = {
            "list": lambda: [Row(**full), Row(**full)],
            "tuple": lambda: (Row(**full),),
            "generator": lambda: (Row(**full) for _ in range(2)),
            "iter": lambda: iter([Row(**full)]),
            "nothing": lambda: iter([]),
            "empty list": list,
            "missing fields": lambda: [Row(key=form)],
            "other order": lambda: [Row(s="last", n=3, key=form)],
            "dict for struct": lambda: [Row(key=form, st={"y": "named", "x": 7})],
            "struct without a field": lambda: [Row(key=form, st={"y": "alone"})],
            "int for double": lambda: [Row(key=form, d=3)],
            "pairs for map": lambda: [Row(key=form, mp=[("a", 1), ("b", None)])],
            "tuple for array": lambda: [Row(key=form, ar=(1, 2))],
            "rows unread": lambda: [Row(key=form, n=0)],
            "mixed": lambda: [Row(key=form, n=1), Row(s="only", key=form), Row(**full)],
            "reads later": lambda: (Row(key=form, n=row.n) for row in rows),
        }
        return forms[form]()

    def close(self) -> None:
        pass


class FrameOutputs(StatefulProcessor):
    """The same for data frames."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues) -> Any:
        form = key[0]
        names = [part.split()[0] for part in OUTPUTS.split(", ")]
        stamp = pd.Timestamp("2024-02-29 12:34:56.789012")
        values = [form, 1, 0.5, "s", {"x": 1, "y": "y"}, [1, None], {"a": 1}, stamp]
        full = pd.DataFrame({name: [value] for name, value in zip(names, values)})
        forms: dict[str, Callable[[], Any]] = {
            "list": lambda: [full, full],
            "tuple": lambda: (full,),
            "generator": lambda: (full for _ in range(2)),
            "nothing": lambda: iter([]),
            "empty list": list,
            "empty frame": lambda: [full[:0]],
            "other order": lambda: [full[names[::-1]]],
            "by position": lambda: [pd.DataFrame([values])],
            "small ints": lambda: [full.assign(n=full["n"].astype("int8"), d=full["d"].astype("float32"))],
            "whole floats": lambda: [full.assign(n=[2.0])],
            "missing numbers": lambda: [full.assign(n=pd.array([None], dtype="Int64"), d=[float("nan")], s=[None])],
            "ints for double": lambda: [full.assign(d=[4])],
            "extension types": lambda: [full.assign(s=pd.array(["t"], dtype="string"), n=pd.array([5], dtype="Int32"))],
            "other index": lambda: [full.set_axis([17], axis=0)],
            "row for struct": lambda: [full.assign(st=[Row(x=2, y="row")])],
            "python datetime": lambda: [full.assign(ts=[stamp.to_pydatetime()])],
            "rows unread": lambda: [full],
            "extra columns": lambda: [full.assign(unknown=1)],
        }
        return forms[form]()

    def close(self) -> None:
        pass


ROW_FORMS = (
    "list", "tuple", "generator", "iter", "nothing", "empty list", "missing fields", "other order",
    "dict for struct", "struct without a field", "int for double", "pairs for map", "tuple for array", "rows unread", "mixed",
    "reads later",
)  # fmt: skip
FRAME_FORMS = (
    "list", "tuple", "generator", "nothing", "empty list", "empty frame", "other order", "by position", "small ints",
    "whole floats", "missing numbers", "ints for double", "extension types", "other index", "row for struct",
    "python datetime", "rows unread", "extra columns",
)  # fmt: skip
