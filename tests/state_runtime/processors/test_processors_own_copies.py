"""What user code reads of a state is its own: changing it in place changes no state and no other read."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from memory_reader import MemoryReader

from state_runtime.processors.user.handle import StateDeclaration, layout_of
from state_runtime.processors.user.list_state import ListState
from state_runtime.processors.user.map_state import MapState
from state_runtime.processors.user.scope import Scope
from state_runtime.processors.user.value_state import NestedValueState, ValueState, value_state
from state_runtime.state.table import StateSchema

DAY = dt.date(2024, 2, 29)
KEYS = pa.schema([("k", pa.string())])
KEY = [pa.array(["a"])]
HASH = np.array([7], dtype=np.uint64)
INNER = pa.struct([("tags", pa.list_(pa.string())), ("n", pa.int64())])
NESTED = pa.schema(
    [
        ("numbers", pa.list_(pa.int64())),
        ("named", pa.map_(pa.string(), pa.list_(pa.int64()))),
        ("inner", INNER),
        ("inners", pa.list_(INNER)),
    ]
)
ENTRIES = pa.schema([("by", pa.list_(pa.int64()))])


def written() -> tuple[Any, ...]:
    return ([1], {"a": [1]}, (["x"], 1), [(["y"], 2)])


def spoil(row: Any) -> None:
    """Change all that can be changed in a value, at every depth."""
    numbers, named, inner, inners = row
    numbers.append(99)
    named["a"].append(99)
    named["z"] = [99]
    inner[0].append("spoilt")
    inners[0][0].append("spoilt")
    inners.append(None)


class Slot:
    """One state of one key, over what an epoch before left."""

    def __init__(self, kind: Any, values: pa.Schema = NESTED, row: Callable[[], tuple[Any, ...]] = written) -> None:
        declaration = StateDeclaration("s", kind, "", "" if kind == "map" else None, 0)
        self.schema: StateSchema = layout_of(declaration, KEYS, values, ENTRIES if kind == "map" else None)
        self.kind = kind
        self.written = row
        self.batches: list[pa.RecordBatch] = []
        self.epoch = 0
        self.begin()

    def begin(self) -> None:
        """The next epoch."""
        self.epoch += 1
        reader: Any = MemoryReader({"s": self.schema}, {"s": self.batches})
        scope = Scope(reader)
        self.state: Any = {
            "value": lambda: value_state("s", "here", self.schema, scope, None),
            "list": lambda: ListState("s", "here", self.schema, scope, None, self.epoch),
            "map": lambda: MapState("s", "here", self.schema, scope, None),
        }[self.kind]()
        scope.enter(reader, HASH, KEY)
        self.state.attach()
        scope.group = 0

    def end(self) -> None:
        """What was changed becomes the state; then the next epoch."""
        changed, _ = self.state.changes()
        self.batches = [b for b in (changed, *self.batches) if b.num_rows]
        self.begin()

    def write(self) -> None:
        writes: dict[str, Callable[[], None]] = {
            "value": lambda: self.state.update(self.written()),
            "list": lambda: self.state.appendValue(self.written()),
            "map": lambda: self.state.updateValue(([1],), self.written()),
        }
        writes[self.kind]()

    def reads(self) -> Iterator[Any]:
        """Every way to read the value."""
        if self.kind == "value":
            yield self.state.get()
        elif self.kind == "list":
            yield from self.state.get()
        else:
            yield self.state.getValue(([1],))
            yield from self.state.values()
            yield from (value for _, value in self.state.iterator())

    def map_keys(self) -> Iterator[Any]:
        if self.kind == "map":
            yield from self.state.keys()
            yield from (key for key, _ in self.state.iterator())


@pytest.mark.parametrize("kind", ["value", "list", "map"])
def test_what_user_code_changes_in_place_without_a_write_changes_nothing(kind: str) -> None:
    """Spark hands out a new object with each call. Before a write is stored, after it, and in the next epochs."""
    slot = Slot(kind)
    slot.write()
    for _ in range(3):
        for row in slot.reads():
            spoil(row)
        for key in slot.map_keys():
            key[0].append(99)
        assert [tuple(row) for row in slot.reads()] == [written()] * (1 if kind != "map" else 3)
        assert list(slot.map_keys()) == [([1],)] * (2 if kind == "map" else 0)
        slot.end()


@pytest.mark.parametrize("kind", ["value", "list", "map"])
@pytest.mark.parametrize(
    ("values", "row"),
    [
        (pa.schema([("n", pa.int64()), ("s", pa.string())]), (1, "x")),
        (
            pa.schema([("n", pa.int64()), ("last", pa.struct([("at", pa.date32()), ("odd", pa.bool_())]))]),
            (1, (DAY, True)),
        ),
        (pa.schema([("n", pa.int64()), ("inner", INNER)]), (1, (["x"], 1))),
        (pa.schema([("n", pa.int64()), ("inner", INNER)]), (1, None)),
        (pa.schema([("inners", pa.list_(INNER))]), ([(["x"], 1), None],)),
        (pa.schema([("named", pa.map_(pa.string(), pa.date32()))]), ({"a": DAY, "b": None},)),
    ],
    ids=["plain", "struct", "struct of a list", "null", "list of structs", "map"],
)
def test_what_was_written_is_read(kind: str, values: pa.Schema, row: tuple[Any, ...]) -> None:
    """Values that hold a list somewhere, and those that hold only structs: at once, and in the next epochs."""
    slot = Slot(kind, values, lambda: row)
    slot.write()
    for _ in range(3):
        assert [tuple(read) for read in slot.reads()] == [row] * (1 if kind != "map" else 3)
        slot.end()


def test_states_of_plain_values_pay_nothing_for_it() -> None:
    """A number, a text or a Row of such cannot be changed in place: such states have the plain `get`."""
    reader: Any = MemoryReader({})
    plain, nested = (
        layout_of(StateDeclaration("s", "value", "", None, 0), KEYS, values, None)
        for values in (pa.schema([("n", pa.int64()), ("r", pa.struct([("s", pa.string())]))]), NESTED)
    )
    assert type(value_state("s", "here", plain, Scope(reader), None)) is ValueState
    assert type(value_state("s", "here", nested, Scope(reader), None)) is NestedValueState
