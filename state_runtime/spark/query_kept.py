"""How Spark's own streaming keeps the state of a query's operators, as its plan says it; asked by imports only.

The key has the grouping or key columns; the value of an aggregate has the buffers of its functions side by side, in the
order of the functions. Spark's names and types of all of them are in the checkpoint, too, so that both can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.spark.internals import Internal, given
from state_runtime.spark.jvm import items
from state_runtime.spark.query_parts import Kept, KeptSide, NativeColumn

__all__ = ["KeptInPlan", "native_columns"]


@dataclass(frozen=True)
class KeptInPlan:
    """An operator of a plan. Nothing is asked of the plan until it is called.

    Attributes:
        keys: Spark's attributes of the key.
        own_keys, window, window_us: see `Kept`.
        called: of an aggregate its function calls, by the name of the call.
        sides: of a join the attributes of each side, and what makes the side's columns here of them (`KeptSide.rows`).
    """

    number: int
    operator: str
    keys: Sequence[Any]
    own_keys: Mapping[str, str]
    called: Mapping[str, Any] = field(default_factory=dict)
    window: str = ""
    window_us: int = 0
    sides: Sequence[tuple[Sequence[Any], Callable[[DataFrame], DataFrame]]] = ()

    def __call__(self) -> Kept:
        """Return how it keeps its state.

        Raises:
            InvalidConfiguration: this version of Spark does not say it.
        """
        return given(Internal.QUERY_PLANS, self._kept, _unknown)

    def _kept(self) -> Kept:
        buffers = {
            name: native_columns(items(each.aggregateFunction().aggBufferAttributes()))
            for name, each in self.called.items()
        }
        return Kept(
            number=self.number,
            operator=self.operator,
            keys=native_columns(self.keys),
            own_keys=self.own_keys,
            window=self.window,
            window_us=self.window_us,
            buffers=buffers,
            sides=tuple(KeptSide(native_columns(attributes), rows) for attributes, rows in self.sides),
        )


def native_columns(attributes: Iterable[Any]) -> tuple[NativeColumn, ...]:
    """Return attributes as columns of Spark's state."""
    return tuple(NativeColumn(str(each.name()), str(each.dataType().catalogString())) for each in attributes)


def _unknown() -> Kept:
    raise InvalidConfiguration(
        "how this version of Spark keeps the state of a query is not known (see docs/spark-internals.md), so a "
        "checkpoint of one cannot be imported"
    )
