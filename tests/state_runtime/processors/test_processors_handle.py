"""pyspark's handle: what it refuses and how, its life cycle, and what user code's errors say."""

from __future__ import annotations

import operator
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from memory_reader import MemoryReader
from model import colliding, spread
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues
from spark_model import KEYS, TIMERS, Job, Scripted, Setup, grouped, operator_of, schemas_of

from state_runtime.base.errors import InvalidData, InvalidPipeline, StillstateError, UserCodeError
from state_runtime.processors.operator import EpochClock, RowSlice
from state_runtime.processors.user.handle import (
    DeclaringHandle,
    Handle,
    StateDeclaration,
    layout_of,
    timers_schema,
)
from state_runtime.processors.user.user_errors import InvalidStateUse, InvalidStateValue, plain

NO_ROWS = grouped([], spread)
ONE_ROW = grouped([("a", 0)], spread)


# --- when the job is built -----------------------------------------------------------------------------------------


def test_init_declares_states_with_kind_schemas_and_ttl() -> None:
    """0 and None are no TTL."""
    handle = DeclaringHandle("op", "processing")
    handle.getValueState("v", "n int", 5)
    handle.getListState("l", "n int", ttlDurationMs=None)
    handle.getMapState("m", "k int", "n int", 0)
    assert list(handle.declared.values()) == [
        StateDeclaration("v", "value", "n int", None, 5),
        StateDeclaration("l", "list", "n int", None, 0),
        StateDeclaration("m", "map", "n int", "k int", 0),
    ]
    assert handle.dropped == set()


@pytest.mark.parametrize("time_mode", ["none", "event"])
@pytest.mark.parametrize("ask", [lambda h, t: h.getValueState("s", "n int", t), lambda h, t: h.getListState("s", "n int", t), lambda h, t: h.getMapState("s", "k int", "n int", t)], ids=["value", "list", "map"])  # fmt: skip
def test_a_ttl_needs_processing_time(time_mode: Any, ask: Callable[[Any, Any], Any]) -> None:
    """With Spark's error class; 0 is no TTL and fine."""
    spark = {"none": "None", "event": "EventTime"}[time_mode]
    with pytest.raises(
        InvalidPipeline, match=rf"STATEFUL_PROCESSOR_INCORRECT_TIME_MODE_TO_ASSIGN_TTL.*timeMode={spark},"
    ):
        ask(DeclaringHandle("op", time_mode), 1)
    for none in (0, None):
        ask(DeclaringHandle("op", time_mode), none)
    ask(DeclaringHandle("op", "processing"), 1)


@pytest.mark.parametrize("ttl_ms", [-1, 1.5, "1"])
def test_a_ttl_that_is_no_positive_number_of_milliseconds_is_refused(ttl_ms: Any) -> None:
    """Spark refuses negative ones by the same name."""
    with pytest.raises(InvalidPipeline, match="STATEFUL_PROCESSOR_TTL_DURATION_MUST_BE_POSITIVE"):
        DeclaringHandle("op", "processing").getValueState("s", "n int", ttl_ms)


@pytest.mark.parametrize("name", ["", " a", "a ", "default", "$x", "$timers", 7])
def test_names_that_spark_refuses_are_refused(name: Any) -> None:
    """A pipeline must be able to go back to Spark's own operator; and the timers' name is taken."""
    for ask in (
        lambda h: h.getValueState(name, "n int"),
        lambda h: h.getListState(name, "n int"),
        lambda h: h.getMapState(name, "k int", "n int"),
        lambda h: h.deleteIfExists(name),
    ):
        with pytest.raises(InvalidPipeline, match="cannot name a state"):
            ask(DeclaringHandle("op"))


def test_a_state_is_declared_once_whatever_its_kind() -> None:
    """With Spark's error class."""
    handle = DeclaringHandle("op")
    handle.getValueState("s", "n int")
    with pytest.raises(InvalidPipeline, match=r"STATEFUL_PROCESSOR_DUPLICATE_STATE_VARIABLE_DEFINED.*'s'.*twice"):
        handle.getListState("s", "n int")
    assert handle.declared["s"].kind == "value"


def test_a_dropped_state_is_not_declared_and_cannot_come_back_in_the_same_init() -> None:
    """init() runs every epoch: dropping and asking again would empty the state each time (Spark does that silently)."""
    handle = DeclaringHandle("op")
    handle.getValueState("s", "n int")
    handle.deleteIfExists("s")
    handle.deleteIfExists("never")
    assert (handle.declared, handle.dropped) == ({}, {"s", "never"})
    with pytest.raises(InvalidPipeline, match="drops state 's' and asks for it again"):
        handle.getValueState("s", "n int")


def test_nothing_is_used_when_the_job_is_built() -> None:
    """There is no key yet."""
    state = DeclaringHandle("op").getListState("s", "n int")
    with pytest.raises(InvalidPipeline, match="there is no key yet"):
        state.get()


TIMER_CALLS = [lambda h: h.registerTimer(1), lambda h: h.deleteTimer(1), lambda h: h.listTimers()]


@pytest.mark.parametrize("call", TIMER_CALLS, ids=["register", "delete", "list"])
def test_timers_are_refused_in_init_and_without_a_clock(call: Callable[[Any], Any]) -> None:
    """With Spark's error classes, both when the job is built and in a task."""

    def task(time_mode: Any) -> Handle:
        setup = Setup(time_mode)
        job = Job(setup)
        reader = MemoryReader(job.schemas)
        return Handle("op", job.schemas, {}, {}, frozenset(), time_mode, EpochClock(0), 0, reader)

    for handle in (DeclaringHandle("op", "none"), task("none")):
        with pytest.raises(InvalidPipeline, match=r"OPERATION_WITH_INVALID_TIME_MODE.*timeMode=None"):
            call(handle)
    for handle in (DeclaringHandle("op", "event"), task("event")):
        with pytest.raises(InvalidPipeline, match=r"OPERATION_WITH_INVALID_HANDLE_STATE.*state=CREATED"):
            call(handle)


PAIR = pa.schema([("n", pa.int64())])


def test_layouts_of_declarations() -> None:
    """Values one row a key; lists and maps many; a TTL is a column."""
    entry = pa.schema([("k", pa.string())])
    value = layout_of(StateDeclaration("s", "value", "", None, 7), KEYS, PAIR, None)
    assert (value.entries, value.time) == (None, "expires")
    several = layout_of(StateDeclaration("s", "list", "", None, 0), KEYS, PAIR, None)
    assert (several.entries, several.time) == (pa.schema([]), "")
    mapped = layout_of(StateDeclaration("s", "map", "", "", 0), KEYS, PAIR, entry)
    assert (mapped.entries, mapped.values, mapped.keys) == (entry, PAIR, KEYS)
    assert timers_schema(KEYS).arrow.names == ["key_hash", "deleted", "entry", "key.k", "due"]


@pytest.mark.parametrize(
    ("data_type", "fine"),
    [
        (pa.map_(pa.string(), pa.int64()), False),
        (pa.duration("us"), False),
        (pa.struct([("m", pa.list_(pa.map_(pa.string(), pa.int64())))]), False),
        (pa.struct([("a", pa.list_(pa.decimal128(5, 2))), ("b", pa.timestamp("us", "UTC"))]), True),
    ],
    ids=str,
)
def test_a_maps_key_must_have_a_hash(data_type: pa.DataType, fine: bool) -> None:
    """Said when the job is built, not when the first entry is written."""
    declaration, entry = StateDeclaration("s", "map", "", "", 0), pa.schema([("k", data_type)])
    if fine:
        assert layout_of(declaration, KEYS, PAIR, entry).entries == entry
    else:
        with pytest.raises(InvalidPipeline, match="state 's': field 'k' of the map's key has type"):
            layout_of(declaration, KEYS, PAIR, entry)


# --- in the task ---------------------------------------------------------------------------------------------------


@dataclass
class Calls:
    """A processor whose methods are given as functions of it."""

    setup: Setup = Setup()  # noqa: RUF009  (frozen)
    on_init: Any = None
    on_input: Any = None
    on_timer: Any = None
    on_initial: Any = None
    on_close: Any = None
    closed: int = 0

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.value = handle.getValueState("v", "n long, s string", self.setup.ttl_ms)
        self.list = handle.getListState("l", "n long, s string", self.setup.ttl_ms)
        self.map = handle.getMapState("m", "a long, b string", "n long, s string", self.setup.ttl_ms)
        if self.on_init:
            self.on_init(self)

    def handleInitialState(self, key: Any, initial: Any, timers: Any) -> None:
        if self.on_initial:
            self.on_initial(self, key, initial, timers)

    def handleInputRows(self, key: Any, rows: Any, timers: Any) -> Iterator[Any]:
        out = self.on_input(self, key, rows, timers) if self.on_input else None
        return iter([] if out is None else out)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        out = self.on_timer(self, key, timerValues, expiredTimerInfo) if self.on_timer else None
        return iter([] if out is None else out)

    def close(self) -> None:
        self.closed += 1
        if self.on_close:
            self.on_close(self)


def run(processor: Calls, rows: Any = ONE_ROW, clock: EpochClock | None = None, **more: Any) -> Any:
    """One epoch over an empty state."""
    return Job(processor.setup).run(processor, rows, clock or EpochClock(100), **more)


REFUSED: list[tuple[str, type[StillstateError], str, Callable[[Any], Any]]] = [
    ("value-none", InvalidStateValue, r"update\(\) got a NoneType", lambda p: p.value.update(None)),
    ("value-dict", InvalidStateValue, r"update\(\) got a dict", lambda p: p.value.update({"n": 1, "s": "x"})),
    ("value-text", InvalidStateValue, r"update\(\) got a str", lambda p: p.value.update("ab")),
    ("value-number", InvalidStateValue, r"update\(\) got a int", lambda p: p.value.update(7)),
    ("value-short", InvalidStateValue, r"got 1 fields, the schema has 2: n, s", lambda p: p.value.update((1,))),
    ("value-long", InvalidStateValue, r"got 3 fields, the schema has 2: n, s", lambda p: p.value.update((1, "x", 2))),
    ("list-none", InvalidStateValue, r"appendValue\(\) got None as an element", lambda p: p.list.appendValue(None)),
    ("list-null", InvalidStateValue, r"NULL_VALUE", lambda p: p.list.appendList([(1, "x"), None])),
    ("list-short", InvalidStateValue, r"got 1 fields", lambda p: p.list.put([(1,)])),
    ("put-empty", InvalidStateValue, r"Error updating value state: \[ILLEGAL_STATE_STORE_VALUE.EMPTY_LIST_VALUE\]", lambda p: p.list.put([])),
    ("append-empty", InvalidStateValue, r"EMPTY_LIST_VALUE", lambda p: p.list.appendList([])),
    ("put-none", InvalidStateValue, r"put\(\) got a NoneType; give a list", lambda p: p.list.put(None)),
    ("map-key", InvalidStateValue, r"got 1 fields, the schema has 2: a, b", lambda p: p.map.getValue((1,))),
    ("map-bare-key", InvalidStateValue, r"containsKey\(\) got a int", lambda p: p.map.containsKey(1)),
    ("map-value", InvalidStateValue, r"got 1 fields, the schema has 2: n, s", lambda p: p.map.updateValue((1, "x"), (1,))),
    ("map-none", InvalidStateValue, r"updateValue\(\) got a NoneType", lambda p: p.map.updateValue((1, "x"), None)),
    ("timer-text", InvalidStateValue, r"registerTimer\(\) got a str", lambda p: p.handle.registerTimer("1")),
    ("timer-float", InvalidStateValue, r"deleteTimer\(\) got a float", lambda p: p.handle.deleteTimer(1.0)),
    ("timer-wide", InvalidStateValue, r"does not fit a long", lambda p: p.handle.registerTimer(1 << 63)),
    ("timer-first", InvalidStateValue, r"does not fit a long", lambda p: p.handle.registerTimer(-(1 << 63))),
    ("late-state", InvalidStateUse, r"INVALID_HANDLE_STATE.*get_value_state.*state=INITIALIZED", lambda p: p.handle.getValueState("v", "")),
    ("late-list", InvalidStateUse, r"INVALID_HANDLE_STATE.*get_list_state", lambda p: p.handle.getListState("l", "")),
    ("late-map", InvalidStateUse, r"INVALID_HANDLE_STATE.*get_map_state", lambda p: p.handle.getMapState("m", "", "")),
    ("late-drop", InvalidStateUse, r"INVALID_HANDLE_STATE.*delete_if_exists", lambda p: p.handle.deleteIfExists("v")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "call"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_what_spark_refuses_can_be_caught_as_in_spark_and_nothing_has_happened(
    kind: Any, message: str, call: Any
) -> None:
    """Also as our own error. In Spark most of these break the task for good."""

    def on_input(p: Calls, key: Any, rows: Any, timers: Any) -> None:
        p.value.update((1, "x"))
        p.list.appendValue((1, "x"))
        p.map.updateValue((1, "x"), (1, "x"))
        for caught in (PySparkRuntimeError, kind):
            with pytest.raises(caught, match=message):
                call(p)
        assert p.value.get() == (1, "x")
        assert list(p.list.get()) == [(1, "x")]
        assert list(p.map.iterator()) == [((1, "x"), (1, "x"))]
        assert list(p.handle.listTimers()) == []

    run(Calls(on_input=on_input))


@pytest.mark.parametrize(("kind", "message", "call"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_what_spark_refuses_ends_the_epoch_if_it_is_not_caught(kind: Any, message: str, call: Any) -> None:
    """As an error of ours alone: it travels from the task to the driver by its class."""
    processor = Calls(on_input=lambda p, *_: call(p))
    with pytest.raises(InvalidData if kind is InvalidStateValue else InvalidPipeline, match=message) as caught:
        run(processor)
    assert type(caught.value) in (InvalidData, InvalidPipeline)
    assert processor.closed == 1


def test_errors_survive_pickling_and_other_errors_stay_what_they_are() -> None:
    """Spark's workers pickle exceptions."""
    for error in (InvalidStateUse("text"), InvalidStateValue("text")):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), "text")
    other = UserCodeError("x")
    assert plain(other) is other


USES: list[Callable[[Any], Any]] = [
    lambda p: p.value.get(), lambda p: p.value.exists(), lambda p: p.value.update((1, "x")), lambda p: p.value.clear(),
    lambda p: p.list.exists(), lambda p: list(p.list.get()), lambda p: p.list.appendValue((1, "x")), lambda p: p.list.clear(),
    lambda p: p.list.put([(1, "x")]), lambda p: p.list.appendList([(1, "x")]),
    lambda p: p.map.exists(), lambda p: p.map.getValue((1, "x")), lambda p: p.map.updateValue((1, "x"), (1, "x")),
    lambda p: list(p.map.iterator()), lambda p: list(p.map.keys()), lambda p: p.map.clear(), lambda p: p.map.removeKey((1, "x")),
]  # fmt: skip


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("where", ["on_init", "on_close"])
def test_states_are_refused_where_no_key_is_current(where: str, use: Any) -> None:
    """Never the last key's state by accident."""
    with pytest.raises(InvalidPipeline, match="where no key is current"):
        run(Calls(**{where: use}))


@pytest.mark.parametrize("call", TIMER_CALLS, ids=["register", "delete", "list"])
def test_timers_are_refused_after_the_end(call: Callable[[Any], Any]) -> None:
    """The handle is closed by then."""
    with pytest.raises(InvalidPipeline, match=r"INVALID_HANDLE_STATE.*state=CLOSED"):
        run(Calls(on_close=lambda p: call(p.handle)))


@pytest.mark.parametrize(
    "ask",
    [
        lambda h: h.getValueState("unknown", ""),
        lambda h: h.getListState("v", ""),
        lambda h: h.getMapState("l", "", ""),
        lambda h: h.getValueState("v", "", 5),
    ],
)
def test_init_must_ask_for_the_same_states_every_time(ask: Callable[[Any], Any]) -> None:
    """A state that appears later, or as something else, would have no place in the manifest."""
    with pytest.raises(InvalidPipeline, match="must ask for the same states every time"):
        run(Calls(on_init=lambda p: ask(p.handle)))


DROPPED_USES = {
    "value": [("exists", ()), ("get", ()), ("update", ((1,),)), ("clear", ())],
    "list": [("exists", ()), ("get", ()), ("put", ([(1,)],)), ("appendValue", ((1,),)), ("appendList", ([(1,)],)), ("clear", ())],
    "map": [("exists", ()), ("getValue", ((1,),)), ("containsKey", ((1,),)), ("updateValue", ((1,), (1,))), ("iterator", ()),
            ("keys", ()), ("values", ()), ("removeKey", ((1,),)), ("clear", ())],
}  # fmt: skip


@pytest.mark.parametrize("kind", DROPPED_USES)
def test_a_dropped_state_says_so_when_it_is_used(kind: str) -> None:
    """Spark's words; and it can be caught."""

    def on_init(p: Calls) -> None:
        get = {"value": p.handle.getValueState, "list": p.handle.getListState}.get(kind)
        p.gone = get("gone", "n int") if get else p.handle.getMapState("gone", "k int", "n int")  # type: ignore[attr-defined]
        p.handle.deleteIfExists("gone")

    def on_input(p: Any, key: Any, rows: Any, timers: Any) -> None:
        for method, arguments in DROPPED_USES[kind]:
            with pytest.raises(
                PySparkRuntimeError, match=f"^Error .*: {kind.capitalize()} state gone is not initialized.$"
            ):
                getattr(p.gone, method)(*arguments)
        with pytest.raises(AttributeError):
            p.gone.unknown()

    run(Calls(on_init=on_init, on_input=on_input), dropped=frozenset({"gone"}))
    with pytest.raises(InvalidPipeline, match="drops state 'gone' in the task but did not when the job was built"):
        run(Calls(on_init=lambda p: p.handle.deleteIfExists("gone")))


def test_a_value_of_another_type_is_refused_at_once() -> None:
    """With operator, state and field in the message, and without the value."""
    for call in (
        lambda p: p.value.update(("s3cr3t", "x")),
        lambda p: p.list.appendValue(("s3cr3t", "x")),
        lambda p: p.map.updateValue((1, "x"), ("s3cr3t", "x")),
        lambda p: p.map.updateValue(("s3cr3t", "x"), (1, "x")),
    ):
        with pytest.raises(
            InvalidData, match=r"operator 'op', state '.'.*a str for field '[na]', which is declared as int64"
        ) as caught:
            run(Calls(on_input=lambda p, *_, call=call: call(p)))
        assert "s3cr3t" not in str(caught.value)


def test_query_info_says_where_user_code_runs() -> None:
    """An extension: Spark's Python handle has none."""
    seen = []
    processor = Calls(on_input=lambda p, *_: seen.append(p.handle.getQueryInfo()))
    Job(processor.setup).run(processor, ONE_ROW, EpochClock(0, epoch=9))
    assert [(i.operator, i.shard, i.snapshot_id) for i in seen] == [("op", 0, 9)]
    assert DeclaringHandle("op").getQueryInfo().operator == "op"


# --- the life cycle ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pandas", [True, False], ids=["pandas", "rows"])
@pytest.mark.parametrize("fail_in", ["init", "initial", "input", "generator", "timer", "close"])
def test_an_error_of_user_code_says_where_and_still_closes(pandas: bool, fail_in: str) -> None:
    """Operator, shard and key; the epoch leaves nothing behind; the cause is chained."""
    setup = Setup(pandas=pandas)

    def fail(*_: Any) -> Any:
        raise KeyError("why")

    def fail_late(*_: Any) -> Iterator[Any]:
        yield from ()
        raise KeyError("why")

    processor = Calls(setup)
    job = Job(setup)
    if fail_in == "timer":
        processor.on_input = lambda p, *_: p.handle.registerTimer(3)
    setattr(
        processor, f"on_{'input' if fail_in == 'generator' else fail_in}", fail_late if fail_in == "generator" else fail
    )
    reader = MemoryReader(job.schemas)
    result = operator_of(setup, processor).process([RowSlice(ONE_ROW)], reader, EpochClock(5), 3, ONE_ROW)
    where = "" if fail_in in ("init", "close") else r", key hash [0-9a-f]{16}"
    with pytest.raises(
        UserCodeError,
        match=f"^operator 'op', shard 3{where}: the processor raised KeyError: 'why' "
        rf"\({re.escape(__file__)}, line \d+, in fail(_late)?\)",
    ) as caught:
        list(result.outputs)
    assert isinstance(caught.value.__cause__, KeyError)
    assert processor.closed == (0 if fail_in == "init" else 1)
    assert result.changes == {}


def test_a_key_is_never_in_a_message() -> None:
    """Messages end up in logs; a key may be a name or a number of an account. Its hash finds it."""
    processor = Calls(on_input=lambda *_: operator.truediv(1, 0))
    with pytest.raises(UserCodeError) as caught:
        run(processor, grouped([("x" * 5000, 0)], spread))
    assert "xx" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_bare_assert_and_a_sys_exit_say_where_they_are() -> None:
    """An assert has no text, and `sys.exit` is no Exception: unguarded it would end the worker without a word."""

    def claims(*_: Any) -> None:
        if True:
            raise AssertionError

    for fail, said in ((claims, "AssertionError"), (lambda *_: sys.exit(3), "SystemExit: 3")):
        for where in ("on_init", "on_input", "on_close"):
            with pytest.raises(UserCodeError, match=rf"raised {said} \({re.escape(__file__)}, line \d+, in ") as caught:
                run(Calls(**{where: fail}))
            assert "pyspark" not in str(caught.value)


def test_a_misused_state_says_in_which_line() -> None:
    """The error is ours, the line that has to be changed is the user's."""
    with pytest.raises(InvalidData, match=rf"update\(\) got.*\({re.escape(__file__)}, line \d+, in <lambda>\)"):
        run(Calls(on_input=lambda p, *_: p.value.update((1,))))


def test_the_first_error_is_the_one_that_is_told() -> None:
    """close() may well fail after something else has."""

    def on_close(p: Calls) -> None:
        raise ValueError("second")

    with pytest.raises(UserCodeError, match="KeyError: 'first'"):
        run(Calls(on_input=lambda *_: {}["first"], on_close=on_close))
    with pytest.raises(UserCodeError, match="ValueError: second"):
        run(Calls(on_close=on_close))


def test_a_task_that_is_given_up_still_closes() -> None:
    """Spark abandons the iterator when a task is killed."""
    processor = Calls(on_input=lambda p, key, *_: [Row(k=key[0], what="x")] * 5)
    result = operator_of(processor.setup, processor).process(
        [RowSlice(grouped([("a", 0), ("b", 0)], spread))], MemoryReader(Job(processor.setup).schemas), EpochClock(0), 0
    )
    assert next(result.outputs).num_rows == 5
    result.outputs.close()  # type: ignore[attr-defined]
    assert processor.closed == 1


def test_a_shard_without_rows_and_timers_calls_init_and_close_only() -> None:
    """As Spark does in an empty partition."""
    processor = Calls(on_input=lambda *_: 1 / 0, on_timer=lambda *_: 1 / 0)
    result, outputs = run(processor, NO_ROWS)
    assert (processor.closed, outputs, result.rows_added) == (1, [], 0)


@pytest.mark.parametrize("pandas", [True, False], ids=["pandas", "rows"])
@pytest.mark.parametrize("handler", ["handleInputRows", "handleExpiredTimer"])
@pytest.mark.parametrize("produce", [None, 7], ids=repr)
def test_a_handler_that_returns_nothing_to_iterate_over_is_named_with_its_line(
    pandas: bool, handler: str, produce: Any
) -> None:
    """And with what to write instead; Spark raises a TypeError which names no line of the user's."""

    def returning(*_: Any, **__: Any) -> Any:
        return produce

    job, rows = Job(Setup(pandas=pandas)), grouped([("a", 0)], spread)
    processor = Calls(Setup(pandas=pandas), on_input=register({"a": [-10]}))
    setattr(processor, handler, returning)
    where = rf"returning \({__file__}, line {returning.__code__.co_firstlineno}\) returned .*`return iter\(\[\]\)`"
    call = partial(job.run, processor, rows, EpochClock(100))
    with pytest.raises(UserCodeError, match=where):
        call() if handler == "handleInputRows" else fired(processor, job, rows, 0)


def test_a_frame_that_is_returned_and_not_yielded_is_refused() -> None:
    """Iterated over, it would give its labels."""
    processor = Calls(Setup(pandas=True))
    processor.handleInputRows = lambda *_: pd.DataFrame({"k": ["a"]})  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(InvalidData, match=r"write `yield frame`"):
        run(processor)


@pytest.mark.parametrize("produce", [7, "row", {"name": "a"}], ids=repr)
def test_what_is_no_row_is_invalid_data(produce: Any) -> None:
    """With a next step in the message."""
    with pytest.raises(InvalidData, match=r"yield pyspark\.sql.Row objects or tuples"):
        run(Calls(on_input=lambda *_: [produce]))


@pytest.mark.parametrize("handler", ["handleInputRows", "handleExpiredTimer"])
def test_a_row_that_is_returned_and_not_yielded_is_refused(handler: str) -> None:
    """Iterated over, it would give its fields as rows: a field that is a tuple of the right length would be one."""
    job, rows = Job(Setup()), grouped([("a", 0)], spread)
    processor = Calls(on_input=register({"a": [-10]}))
    setattr(processor, handler, lambda *_, **__: Row(k=("a", "x"), what=("b", "y")))
    if handler == "handleInputRows":
        with pytest.raises(InvalidData, match=r"write `yield Row"):
            job.run(processor, rows, EpochClock(100))
    else:
        with pytest.raises(InvalidData, match=r"write `yield Row"):
            fired(processor, job, rows, 0)


def test_tuples_and_rows_without_names_are_taken_by_place() -> None:
    """Beside rows with names; what has another number of values is refused with the columns."""
    _, outputs = run(Calls(on_input=lambda *_: [("k", "x"), Row("l", "y"), Row(what="z", k="m")]))
    assert [(row["k"], row["what"]) for row in outputs] == [("k", "x"), ("l", "y"), ("m", "z")]
    with pytest.raises(InvalidData, match=r"yielded 1 values without names for 2 columns: k, what"):
        run(Calls(on_input=lambda *_: [("k",)]))


def test_rows_are_matched_by_name_and_missing_columns_are_null() -> None:
    """Spark's rule for the row flavour."""
    _, outputs = run(Calls(on_input=lambda *_: [Row(what="x"), Row(what="y", k="k")]))
    assert outputs == [{"k": None, "what": "x"}, {"k": "k", "what": "y"}]


@pytest.mark.parametrize("forms", [(0,), (1, 0), (1, 2, 0)], ids=str)
def test_a_field_that_the_schema_lacks_is_refused_with_its_name_and_its_processor(forms: tuple[int, ...]) -> None:
    """A misspelled name was a null in the output, without a word. Alone, behind good rows, and beside tuples."""
    made = (Row(k="a", waht="b"), Row(k="a", what="b"), ("a", "b"))
    place = rf"Calls \({re.escape(__file__)}, line \d+\) yielded a row with the field 'waht'.*\(k, what\)"
    with pytest.raises(InvalidData, match=place):
        run(Calls(on_input=lambda *_: [made[form] for form in forms]))


@pytest.mark.parametrize("forms", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)], ids=str)
def test_output_rows_of_every_form_are_the_same_columns(forms: tuple[int, ...]) -> None:
    """Named, made by a class of rows in another order or in this one, and without names: alone and side by side."""
    made = (Row(k="a", what="b"), Row("k", "what")("a", "b"), Row("what", "k")("b", "a"), ("a", "b"))
    _, outputs = run(Calls(on_input=lambda *_: [made[form] for form in forms for _ in range(2)]))
    assert outputs == [{"k": "a", "what": "b"}] * (2 * len(forms))


def test_tuples_of_different_lengths_are_refused() -> None:
    """Columns made of them would be cut to the shortest."""
    with pytest.raises(InvalidData, match=r"yielded 3 values without names for 2 columns"):
        run(Calls(on_input=lambda *_: [("a", "b"), ("a", "b", "c")]))


# --- clocks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("time_mode", "expected"), [("none", (-1, -1)), ("processing", (100, 40)), ("event", (100, 40))]
)
def test_timer_values_are_the_epochs_clock(time_mode: Any, expected: Any) -> None:
    """-1 and -1 without a clock; of Spark's own classes."""
    seen: list[Any] = []

    def note(p: Any, key: Any, what: Any, timers: Any = None) -> None:
        timers = what if isinstance(what, TimerValues) else timers
        assert isinstance(timers, TimerValues)
        seen.append((timers.getCurrentProcessingTimeInMs(), timers.getCurrentWatermarkInMs()))

    def on_input(p: Any, key: Any, rows: Any, timers: Any) -> None:
        note(p, key, rows, timers)
        if time_mode != "none":
            p.handle.registerTimer(1)

    def on_timer(p: Any, key: Any, timers: Any, info: Any) -> None:
        assert isinstance(info, ExpiredTimerInfo)
        note(p, key, timers)

    run(Calls(Setup(time_mode), on_input=on_input, on_initial=note, on_timer=on_timer), ONE_ROW, EpochClock(100, 40), initial=ONE_ROW)  # fmt: skip
    assert seen == [expected] * (2 if time_mode == "none" else 3)


@pytest.mark.parametrize("time_mode", ["none", "processing", "event"])
def test_late_rows_are_dropped_in_event_time_only(time_mode: Any) -> None:
    """Up to and with the late watermark; rows without a time are kept; a key without rows left gets no call."""
    seen: dict[str, list[int]] = {}
    processor = Calls(Setup(time_mode), on_input=lambda p, key, rows, _: seen.setdefault(key[0], []).extend(r.n for r in rows) or ())  # fmt: skip
    rows = grouped([("a", 9), ("a", 10), ("a", 11), ("b", 10), ("c", 12)], spread)
    nulls = pa.array(
        [None if n == 12 else n * 1000 for n in rows.rows.column("n").to_pylist()], pa.timestamp("us", "UTC")
    )
    rows.rows.set_column(2, "at", nulls)
    result, _ = run(processor, rows, EpochClock(100, 50, 10), event_time_column="at")
    if time_mode == "event":
        assert (seen, result.late_rows) == ({"a": [11], "c": [12]}, 3)
    else:
        assert (seen, result.late_rows) == ({"a": [9, 10, 11], "b": [10], "c": [12]}, 0)


def test_a_row_without_an_event_time_is_never_late() -> None:
    """Null is not less than anything."""
    rows = grouped([("a", 1)], spread)
    empty = rows.rows.set_column(2, "at", pa.nulls(1, pa.timestamp("us", "UTC")))
    seen: list[Any] = []
    processor = Calls(Setup("event"), on_input=lambda p, key, rows, _: seen.extend(r.at for r in rows))
    result, _ = run(
        processor, type(rows)(empty, *operator.attrgetter("starts", "stops", "hashes", "keys", "sequence")(rows)),
        EpochClock(0, 100, 100), event_time_column="at",
    )  # fmt: skip
    assert (seen, result.late_rows) == ([None], 0)


@pytest.mark.parametrize("pandas", [True, False], ids=["pandas", "rows"])
@pytest.mark.parametrize(("at_ms", "fine"), [(10, False), (9, False), (11, True), (None, True)])
def test_rows_must_not_be_emitted_before_the_late_watermark(pandas: bool, at_ms: int | None, fine: bool) -> None:
    """Spark's rule for a chained operator: it would drop such rows without a word. Times above the late watermark, even if
    below the current one, are what expired timers emit."""
    at = None if at_ms is None else pd.Timestamp(at_ms, unit="ms", tz="UTC")
    row = (
        pd.DataFrame({"k": ["a"], "at": pd.Series([at], dtype="datetime64[us, UTC]")}) if pandas else Row(k="a", at=at)
    )
    schema = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", "UTC"))])
    processor = Calls(Setup("event", pandas=pandas), on_input=lambda *_: [row])
    more = {"output_schema": schema, "output_event_time": "at"}
    if fine:
        assert len(run(processor, ONE_ROW, EpochClock(0, 20, 10), **more)[1]) == 1
    else:
        with pytest.raises(InvalidData, match=r"EMITTING_ROWS_OLDER_THAN_WATERMARK_NOT_ALLOWED.*'op'.*'at'"):
            run(processor, ONE_ROW, EpochClock(0, 20, 10), **more)


# --- timers --------------------------------------------------------------------------------------------------------


def fired(processor: Calls, job: Job, rows: Any, now_ms: int, snapshot_id: int = 1) -> list[tuple[str, int]]:
    """Which timers an epoch fires, in order."""
    found: list[tuple[str, int]] = []
    before = processor.on_timer

    def on_timer(p: Any, key: Any, values: Any, info: Any) -> Any:
        found.append((key[0], info.getExpiryTimeInMs()))
        return before(p, key, values, info) if before else None

    processor.on_timer = on_timer
    job.run(processor, rows, EpochClock(now_ms, epoch=snapshot_id))
    processor.on_timer = before
    return found


def register(wanted: dict[str, list[int]]) -> Any:
    """A handler that registers timers per key."""

    def handle(p: Any, key: Any, *_: Any) -> None:
        for ts in wanted.get(key[0], []):
            p.handle.registerTimer(ts)

    return handle


def test_timers_fire_in_order_of_their_times_over_all_keys_up_to_now() -> None:
    """Inclusive; also in the epoch that registers them; once, however often they are registered."""
    job = Job(Setup())
    wanted = {"a": [-5, 101, 100, 100], "b": [-10, -3, 200]}
    first = fired(Calls(on_input=register(wanted)), job, grouped([("a", 0), ("b", 0)], spread), 100)
    assert first == [("b", -10), ("a", -5), ("b", -3), ("a", 100)]
    assert fired(Calls(), job, NO_ROWS, 100, 2) == []
    assert fired(Calls(), job, NO_ROWS, 250, 3) == [("a", 101), ("b", 200)]
    assert job.stored(0)[TIMERS] == []


@pytest.mark.parametrize("real", [False, True], ids=["memory", "local"])
def test_a_timer_registered_while_timers_fire_waits_for_the_next_epoch(tmp_path: Path, real: bool) -> None:
    """Even one of the past, and even one that has just fired: it was taken, and must be seen again."""
    job = Job(Setup(), tmp_path if real else None)
    rows = grouped([("a", 0)], spread)

    def on_timer(p: Any, key: Any, values: Any, info: Any) -> None:
        if info.getExpiryTimeInMs() == 20:  # 10 has fired before
            p.handle.registerTimer(10)
            p.handle.registerTimer(15)

    processor = Calls(on_input=register({"a": [10, 20]}), on_timer=on_timer)
    assert fired(processor, job, rows, 5) == []
    assert fired(Calls(), job, NO_ROWS, 6, 2) == []
    processor.on_input = None
    assert fired(processor, job, NO_ROWS, 30, 3) == [("a", 10), ("a", 20)]
    assert fired(Calls(), job, NO_ROWS, 30, 4) == [("a", 10), ("a", 15)]
    assert fired(Calls(), job, NO_ROWS, 30, 5) == []


def test_a_timer_deleted_while_timers_fire_still_fires() -> None:
    """Which timers fire is settled when the input is done."""
    job = Job(Setup())
    processor = Calls(on_input=register({"b": [-10, -3]}), on_timer=lambda p, key, _, info: p.handle.deleteTimer(-3))
    assert fired(processor, job, grouped([("b", 0)], spread), 0) == [("b", -10), ("b", -3)]


def test_a_timer_deleted_with_the_input_does_not_fire() -> None:
    """Whether it is stored or registered in the same epoch."""
    job = Job(Setup())
    rows = grouped([("a", 0)], spread)
    assert fired(Calls(on_input=register({"a": [50, 60]})), job, rows, 0) == []

    def on_input(p: Any, *_: Any) -> None:
        p.handle.deleteTimer(50)
        p.handle.registerTimer(7)
        p.handle.deleteTimer(7)

    processor = Calls(on_input=on_input)
    assert fired(processor, job, rows, 100, 2) == [("a", 60)]


def test_a_handler_still_sees_its_own_timer_and_registering_it_again_is_in_vain() -> None:
    """Spark deletes it when the handler's output is drained."""
    seen: list[Any] = []

    def on_timer(p: Any, key: Any, values: Any, info: Any) -> Iterator[Any]:
        seen.append(list(p.handle.listTimers()))
        p.handle.registerTimer(info.getExpiryTimeInMs())
        yield Row(k=key[0], what=str(list(p.handle.listTimers())))

    job = Job(Setup())
    processor = Calls(on_input=register({"a": [5, 9]}), on_timer=on_timer)
    assert fired(processor, job, grouped([("a", 0)], spread), 5) == [("a", 5)]
    assert seen == [[5, 9]]
    assert [r["due"] for r in job.stored(0)[TIMERS]] == [9]


def test_timers_of_one_key_are_not_seen_by_another() -> None:
    """All state is scoped by the key; also with equal hashes."""
    seen: dict[str, Any] = {}

    def on_input(p: Any, key: Any, *_: Any) -> None:
        p.handle.registerTimer({"a": 500, "b": 400}[key[0]])
        seen[key[0]] = list(p.handle.listTimers())

    run(Calls(on_input=on_input), grouped([("a", 0), ("b", 0)], lambda key: 7))
    assert seen == {"a": [500], "b": [400]}


def test_numpy_integers_are_times() -> None:
    """They come out of pandas."""
    job = Job(Setup())
    assert fired(Calls(on_input=lambda p, *_: p.handle.registerTimer(np.int64(3))), job, ONE_ROW, 5) == [("a", 3)]


# --- the manifest --------------------------------------------------------------------------------------------------


def test_the_manifest_names_states_kinds_times_and_modes() -> None:
    """What a restore and the readers outside need."""
    op = operator_of(Setup(ttl_ms=9), Scripted(Setup()), output_mode="append")
    entry = op.entry()
    assert (entry.kind, entry.key_schema, entry.modes, op.time_domain) == ("stateful-processor", "k string", "processing/append", "processing")  # fmt: skip
    assert [(s.name, s.kind, s.schema, s.entry_schema, s.time) for s in entry.states] == [
        ("l", "list", "n long, s string", "", "expires"),
        ("m", "map", "n long, s string", "a long, b string", "expires"),
        ("v", "value", "n long, s string", "", "expires"),
        (TIMERS, "timers", "", "", "due"),
    ]
    assert set(op.state_schemas) == {"l", "m", "v", TIMERS}
    timeless = operator_of(Setup("none"), None)
    assert (timeless.time_domain, set(timeless.state_schemas)) == ("", {"l", "m", "v"})
    assert schemas_of(Setup())["v"] == timeless.state_schemas["v"]
    assert colliding(("a",)) in range(1 << 64)
