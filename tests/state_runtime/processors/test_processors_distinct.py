"""Sketches of approximate distinct counts against a plain dictionary of registers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from state_runtime.processors.builtin.distinct import Distinct, _leading_zeros
from state_runtime.processors.builtin.partials import Groups
from state_runtime.state.keyhash import hash_rows

_NUMBERS = sorted({min((1 << 64) - 1, max(1, (1 << bit) + off)) for bit in range(65) for off in (-2, -1, 0, 1, 2)})
_INT32_GROUPS = 1 << 31 - 6 - 12  # so many groups of sketches of 4,096 registers have no room in 32 bits
Registers = Mapping[int, int]


def test_leading_zeros_are_those_of_each_number() -> None:
    """Beside each power of two: a conversion to a double would round some up to the next one."""
    counted = _leading_zeros(np.array(_NUMBERS, dtype=np.uint64)).tolist()
    assert counted == [64 - number.bit_length() for number in _NUMBERS]


def registers_of(values: Sequence[Any], p: int) -> Registers:
    """Of each register that was hit the highest rank: the place of the first one behind the register's bits."""
    registers: dict[int, int] = {}
    for hashed in hash_rows([pa.array([v for v in values if v is not None], pa.int64())]).tolist():
        rest = (hashed << p) & ((1 << 64) - 1) | 1 << (p - 1)
        register = hashed >> (64 - p)
        registers[register] = max(registers.get(register, 0), 64 - rest.bit_length() + 1)
    return registers


def decoded(sketches: pa.Array) -> list[Registers]:
    assert all(codes == sorted(codes) for codes in sketches.to_pylist()), "stored in order of register"
    return [{code >> 6: code & 63 for code in codes} for codes in sketches.to_pylist()]


def reduced(function: Distinct, groups_of_values: Sequence[Sequence[Any]]) -> pa.Array:
    """The sketch of each group."""
    values = [v for group in groups_of_values for v in group]
    starts = np.zeros(len(values), dtype=np.bool_)
    starts[np.cumsum([0, *map(len, groups_of_values)])[:-1]] = True
    rows = pa.RecordBatch.from_arrays([pa.array(values, pa.int64())], names=["v"])
    return function.reduce(rows, Groups.of(starts), None)[0]


_groups = st.lists(st.lists(st.none() | st.integers(0, 200), min_size=1, max_size=12), min_size=1, max_size=6)


@pytest.mark.parametrize("p", [4, 9, 10, 12])
@given(_groups, st.data())
@examples(60)
def test_a_sketch_is_the_highest_rank_of_each_register(p: int, groups: list[list[Any]], data: Any) -> None:
    """Of rows, of a stored sketch with new ones, and of sketches that are put together: it matters for nothing in which
    steps a value came."""
    function = Distinct("n", "v", p)
    new = reduced(function, groups)
    assert new.type == function.slots[0].type
    assert decoded(new) == [registers_of(group, p) for group in groups]
    before = [data.draw(st.lists(st.integers(0, 200), min_size=1, max_size=12)) for _ in groups]
    is_there = [data.draw(st.booleans()) for _ in groups]
    old = reduced(function, before).take(
        pa.array([n if there else None for n, there in enumerate(is_there)], pa.int64())
    )
    before = [values if there else [] for values, there in zip(before, is_there, strict=True)]
    merged = function.merge([old], [new])[0]
    assert merged.type == new.type
    assert decoded(merged) == [registers_of([*values, *more], p) for values, more in zip(before, groups, strict=True)]
    halves = np.zeros(len(groups), dtype=np.bool_)
    halves[[0, len(groups) // 2]] = True
    ends = [*np.flatnonzero(halves).tolist(), len(groups)]
    together = [[v for group in groups[a:b] for v in group] for a, b in itertools.pairwise(ends)]
    joined = function.merge_groups([new], Groups.of(halves))[0]
    assert decoded(joined) == [registers_of(values, p) for values in together]
    assert function.finish([joined]).equals(function.finish([reduced(function, together)]))


@pytest.mark.parametrize("count", [_INT32_GROUPS - 1, _INT32_GROUPS, _INT32_GROUPS + 1])
def test_many_sketches_are_told_apart(count: int) -> None:
    """Group and register are sorted as one number, of 32 bits only where both have room."""
    function = Distinct("n", "v", 12)
    groups = [[n, n + 1] for n in range(count)]
    sketches = reduced(function, groups)
    first, last = slice(0, 5), slice(count - 5, count)
    for part in (first, last):
        assert decoded(sketches[part]) == [registers_of(group, 12) for group in groups[part]]
    assert function.merge([sketches], [sketches])[0].equals(sketches)
    assert function.merge([sketches[last]], [sketches[last]])[0].equals(sketches[last])
