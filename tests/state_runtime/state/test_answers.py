"""The answers of a look-up, put together from several runs, against a plain list."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_reader import canonical
from model import examples

from state_runtime.state.answers import Answers

_TIME = dt.datetime(2024, 5, 17, 8, 30, 1, 17, tzinfo=dt.UTC)
_TYPES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int8(), [-128, 0, 127]),
    (pa.int64(), [-(1 << 63), 0, (1 << 63) - 1]),
    (pa.uint64(), [0, (1 << 64) - 1]),
    (pa.float32(), [float("nan"), -0.0, 0.0, 1.5]),
    (pa.float64(), [float("nan"), -0.0, 0.0, float("-inf")]),
    (pa.bool_(), [True, False]),
    (pa.date32(), [_TIME.date()]),
    (pa.timestamp("us", "UTC"), [_TIME, dt.datetime(1, 1, 1, tzinfo=dt.UTC)]),
    (pa.timestamp("us"), [_TIME.replace(tzinfo=None)]),
    (pa.duration("us"), [dt.timedelta(microseconds=-1)]),
    (pa.decimal128(38, 2), [Decimal("1.50"), Decimal("-99999999999999999999999999.99")]),
    (pa.string(), ["", "a", "ü"]),
    (pa.binary(), [b"", b"\x00"]),
    (pa.list_(pa.int64()), [[], [1, None], [3]]),
    (pa.struct([("a", pa.int64()), ("b", pa.string())]), [{"a": 1, "b": None}, {"a": None, "b": ""}]),
]


@pytest.mark.parametrize(("kind", "values"), _TYPES, ids=[str(kind) for kind, _ in _TYPES])
@given(st.data())
@examples(60)
def test_answers_are_the_values_where_they_were_found(kind: pa.DataType, values: list[Any], data: Any) -> None:
    """Of every type, from any number of runs, with nulls that are values, nulls elsewhere in the run, slices, and
    nothing at all; each digit as it was, the sign of zero too."""
    count = data.draw(st.integers(0, 12))
    expected: list[Any] = [None] * count
    answers = Answers(count)
    still_open = list(range(count))
    for _ in range(data.draw(st.integers(0, 3))):
        stored = data.draw(st.lists(st.none() | st.sampled_from(values), min_size=2, max_size=9))
        if data.draw(st.booleans()):
            stored[1:] = [v for v in stored[1:] if v is not None] or [values[0]]
        column = pa.array([values[0], *stored], kind).slice(1)
        wanted = [n for n in still_open if data.draw(st.booleans())]
        at = [data.draw(st.integers(1 if len(stored) > 1 else 0, len(stored) - 1)) for _ in wanted]
        answers.add(np.array(wanted, dtype=np.int64), [column], np.array(at, dtype=np.int64))
        for row, place in zip(wanted, at, strict=True):
            expected[row] = stored[place]
        still_open = [n for n in still_open if n not in wanted]
    (column,) = answers.columns([kind])
    column.validate(full=True)
    assert column.type == kind
    assert [_exact(v) for v in column.to_pylist()] == [_exact(v) for v in pa.array(expected, kind).to_pylist()]
    assert answers.found.tolist() == [n not in still_open for n in range(count)]


def _exact(value: Any) -> Any:
    return repr(value) if isinstance(value, float) else canonical(value)
