"""What an interval join is made of: its kinds, its sides and their columns, checked on the schemas of its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, get_args

import pyarrow as pa

from state_runtime.base.errors import InvalidPipeline
from state_runtime.base.joining import UNBOUNDED_US, How, JoinTerms, SideName, columns_of
from state_runtime.processors.event_time import check_event_time
from state_runtime.processors.sides import LEFT_COLUMN, RIGHT_COLUMN, JoinSide

__all__ = [
    "LEFT",
    "MATCHED",
    "RIGHT",
    "IntervalJoinPlan",
    "check_keys_match",
    "plan_interval_join",
]

LEFT: Final = "left"
RIGHT: Final = "right"
MATCHED = "__stillstate_matched"
"""Value column of the state of an outer side: whether the row has been emitted with a match."""


@dataclass(frozen=True)
class IntervalJoinPlan:
    """The inputs and output of the join, as Arrow schemas.

    Attributes:
        keys: key columns, named as on the left side.
        right_keys: their names on the right side.
        left, right: the other columns of each side, which the input's structs hold.
        left_time, right_time: names of the event-time columns among them; "": the side has none.
    """

    keys: pa.Schema
    right_keys: tuple[str, ...]
    left: pa.Schema
    right: pa.Schema
    left_time: str
    right_time: str
    terms: JoinTerms

    @cached_property
    def sides(self) -> Mapping[SideName, JoinSide]:
        """Both streams."""
        left = (LEFT_COLUMN, self.left, self.left_time, self.terms.when[0])
        right = (RIGHT_COLUMN, self.right, self.right_time, self.terms.when[1])
        return {
            "left": JoinSide("left", 0, tuple(self.keys.names), *left, *self._fate("left")),
            "right": JoinSide("right", 1, self.right_keys, *right, *self._fate("right")),
        }

    def _fate(self, side: SideName) -> tuple[bool, bool, int | None]:
        """Return the last fields of a `JoinSide`: what becomes of its rows."""
        return self.terms.is_outer(side), self.terms.undated != side, self.terms.stays_ms(side)

    @property
    def is_semi(self) -> bool:
        """Left rows are emitted once, with their first match, and nothing of the right side."""
        return self.terms.how == "left-semi"

    @cached_property
    def output_schema(self) -> pa.Schema:
        """Keys, then the left side's other columns, then (but for a semi join) the right side's; those of a side that a
        row may lack can be null, whatever they are in the input."""
        left, right = self.sides["left"], self.sides["right"]
        keys, ours = (_nullable(fields) if right.is_outer else fields for fields in (self.keys, self.left))
        theirs = _nullable(self.right) if left.is_outer else self.right
        return pa.schema([*keys, *ours, *(() if self.is_semi else theirs)])

    @cached_property
    def state_values(self) -> Mapping[str, pa.Schema]:
        """The value columns of both states, for the manifest's DDL."""
        matched = pa.field(MATCHED, pa.bool_())
        return {
            name: pa.schema([*side.columns, *([matched] if side.is_outer else [])]) for name, side in self.sides.items()
        }

    @property
    def modes(self) -> str:
        """The settings that cannot change while there is state: stored rows hold when they are due, their time, and
        whether they matched."""
        terms = self.terms
        if not terms.has_range:
            return f"{terms.how}, at any time"
        lower = "any time before" if terms.lower_us == -UNBOUNDED_US else f"{terms.lower_us}"
        upper = "any" if terms.upper_us == UNBOUNDED_US else f"{terms.upper_us}"
        return f"{terms.how}, {self.right_time} from {lower} to {upper} µs after {self.left_time}"


def _nullable(columns: pa.Schema) -> pa.Schema:
    return pa.schema([column.with_nullable(True) for column in columns])


def check_keys_match(
    left: pa.Schema, right: pa.Schema, left_keys: Sequence[str], right_keys: Sequence[str], where: str
) -> None:
    """Check that the keys of two streams have the same types, pair by pair: equal keys of others have other hashes.

    Raises:
        InvalidPipeline: with the pair.
    """
    for ours, theirs in zip(left_keys, right_keys):
        if left.field(ours).type != right.field(theirs).type:
            raise InvalidPipeline(
                f"{where}: key {ours!r} has type {left.field(ours).type}, its counterpart {theirs!r} "
                f"{right.field(theirs).type}; cast one"
            )


def plan_interval_join(
    left: pa.Schema,
    right: pa.Schema,
    *,
    left_keys: Sequence[str],
    right_keys: Sequence[str],
    left_time: str,
    right_time: str,
    terms: JoinTerms,
    uid: str,
) -> IntervalJoinPlan:
    """Check a join on the schemas of its inputs.

    Args:
        left, right: all columns of the two streams.
        left_keys, right_keys: equally many, in the same order.
        left_time, right_time: "": the side has no event time; then the range has no end on either side.

    Raises:
        InvalidPipeline: a column is missing, has another type than its counterpart or a name twice in the output, or
            the range is empty.
    """
    where = f"operator {uid!r}, interval join"
    if terms.how not in get_args(How):
        raise InvalidPipeline(f"{where}: how={terms.how!r}; there are {', '.join(map(repr, get_args(How)))}")
    if terms.lower_us > terms.upper_us:
        raise InvalidPipeline(
            f"{where}: the range is empty: its lower end lies {terms.lower_us - terms.upper_us} µs above its upper end"
        )
    if len(left_keys) != len(right_keys) or not left_keys:
        raise InvalidPipeline(
            f"{where}: {len(left_keys)} keys on the left, {len(right_keys)} on the right; pair them up"
        )
    for side, schema, names, time in (("left", left, left_keys, left_time), ("right", right, right_keys, right_time)):
        missing = [name for name in names if schema.get_field_index(name) < 0]
        if missing:
            raise InvalidPipeline(
                f"{where}: the {side} side has no key column {missing[0]!r}; it has {', '.join(schema.names)}"
            )
        if time or terms.has_range:
            check_event_time(schema, time, f"{where}, {side} side")
        if time in names:
            raise InvalidPipeline(
                f"{where}: event-time column {time!r} of the {side} side is a key; keys must be equal, "
                "times lie in a range"
            )
    check_keys_match(left, right, left_keys, right_keys, where)
    plan = IntervalJoinPlan(
        keys=pa.schema([left.field(name) for name in left_keys]),
        right_keys=tuple(right_keys),
        left=pa.schema([f for f in left if f.name not in left_keys]),
        right=pa.schema([f for f in right if f.name not in right_keys]),
        left_time=left_time,
        right_time=right_time,
        terms=terms,
    )
    for column in columns_of(terms.condition) if terms.condition is not None else ():
        if plan.sides[column.side].columns.get_field_index(column.name) < 0:
            raise InvalidPipeline(f"{where}: its condition reads {column.name!r}, and its {column.side} side has none")
    names = [name.lower() for name in plan.output_schema.names]
    twice = sorted({name for name in plan.output_schema.names if names.count(name.lower()) > 1})
    if twice:
        raise InvalidPipeline(
            f"{where}: both sides have columns named {', '.join(map(repr, twice))} (Spark does not tell case apart); "
            "rename them on one side before the join, or leave out columns that are not needed"
        )
    return plan
