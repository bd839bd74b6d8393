"""Spark's aggregation buffers as the slots of our aggregate functions: SQL over the columns `v0`, `v1`, … of a value;
pure.

A buffer has the columns that Spark's function declares (`aggBufferAttributes`), in its order, and functions stand side
by side. What a function keeps beside Spark's buffer is the place of a value in the source (`first`, `max_by`, …): all
that is imported came before what comes, so its place is 0, below that of any row to come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.processors.builtin.aggregate import AggregatePlan
from state_runtime.processors.builtin.distinct import RANK_BITS, Distinct
from state_runtime.processors.builtin.extremes import ByExtreme
from state_runtime.processors.builtin.partials import Chosen, Moments, PartialFunction, Scalar
from state_runtime.spark.query_parts import NativeColumn

__all__ = ["slots_of"]

_REGISTERS_PER_WORD: Final = 10
"""Of 6 bits each in a long of Spark's HyperLogLog++."""


def slots_of(plan: AggregatePlan, buffers: Mapping[str, Sequence[NativeColumn]], uid: str) -> dict[str, str]:
    """Return SQL for each slot of an operator's aggregates.

    Args:
        buffers: the columns of each function's buffer, by its name; of a GROUP BY without functions {}.

    Raises:
        InvalidConfiguration: a function's state cannot be made of Spark's.
    """
    found: dict[str, str] = {}
    at = 0
    for name, function in plan.functions:
        # Without functions a group is kept all the same, and here it has a count that nobody reads.
        columns = buffers[name] if buffers else ()
        places = [f"v{number}" for number in range(at, at + len(columns))]
        at += len(columns)
        made = _slots(function, columns, places) if buffers else ["1L"]
        if made is None:
            told = ", ".join(f"{column.name} {column.type}" for column in columns)
            raise InvalidConfiguration(
                f"operator {uid!r}: the state of {plan.texts[name]} cannot be made of what Spark keeps for it "
                f"({told}). Leave the function out of the query until after the import, or begin the job without one"
            )
        found |= {slot.name: sql for slot, sql in zip(function.slots, made, strict=True)}
    return found


def _slots(function: PartialFunction, columns: Sequence[NativeColumn], v: Sequence[str]) -> list[str] | None:
    """Return SQL for the slots of a function; None if its buffer has another form."""
    make = _FORMS.get((type(function), *(column.name for column in columns)))
    if make is not None:
        return make(v)
    if isinstance(function, Distinct):
        words = [f"MS[{number}]" for number in range(-(-(1 << function.p) // _REGISTERS_PER_WORD))]
        if [column.name for column in columns] == words:
            return [_codes(v, function.p, function.slots[0].type.value_type.bit_width)]
    return None


def _codes(words: Sequence[str], p: int, bits: int) -> str:
    """Return the registers of a sketch that are not 0, each as `register << 6 | rank`."""
    registers = f"sequence(0, {(1 << p) - 1})"
    word = f"element_at(array({', '.join(words)}), CAST(r div {_REGISTERS_PER_WORD} + 1 AS INT))"
    rank = f"(shiftrightunsigned({word}, {RANK_BITS} * (r % {_REGISTERS_PER_WORD})) & {(1 << RANK_BITS) - 1}L)"
    kind = "SMALLINT" if bits == 16 else "INT"
    codes = f"transform({registers}, r -> CAST(r * {1 << RANK_BITS} + {rank} AS {kind}))"
    return f"filter({codes}, c -> (c & {(1 << RANK_BITS) - 1}) <> 0)"


def _sum_of_decimals(v: Sequence[str]) -> list[str]:
    overflown = "raise_error('a sum of decimals has left its range in Spark, which has kept nothing of it')"
    return [f"CASE WHEN {v[1]} THEN NULL WHEN {v[0]} IS NULL THEN {overflown} ELSE {v[0]} END"]


def _itself(v: Sequence[str]) -> list[str]:
    return list(v)


def _chosen(v: Sequence[str]) -> list[str]:
    return [v[0], f"CASE WHEN {v[1]} THEN 0L END"]


_Form: TypeAlias = Callable[[Sequence[str]], list[str]]

# By the function here and the names of the columns of Spark's buffer.
_FORMS: Final[Mapping[tuple[object, ...], _Form]] = {
    (Scalar, "count"): _itself,
    (Scalar, "sum"): _itself,
    (Scalar, "sum", "isEmpty"): _sum_of_decimals,
    (Scalar, "min"): _itself,
    (Scalar, "max"): _itself,
    (ByExtreme, "min"): lambda v: [v[0], v[0], f"CASE WHEN {v[0]} IS NOT NULL THEN 0L END"],
    (ByExtreme, "max"): lambda v: [v[0], v[0], f"CASE WHEN {v[0]} IS NOT NULL THEN 0L END"],
    # Spark begins a sum at 0; here there is none before the first value.
    (Scalar, "sum", "count"): lambda v: [f"CASE WHEN {v[1]} > 0 THEN {v[0]} END", v[1]],
    (Moments, "n", "avg", "m2"): lambda v: [f"CAST({v[0]} AS BIGINT)", v[1], v[2]],
    (Chosen, "first", "valueSet"): _chosen,
    (Chosen, "last", "valueSet"): _chosen,
    (ByExtreme, "valueWithExtremumOrdering", "extremumOrdering"): (
        lambda v: [v[0], v[1], f"CASE WHEN {v[1]} IS NOT NULL THEN 0L END"]
    ),
}
