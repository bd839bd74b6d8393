"""Spark's description of a native query's stateful operators, and their matches among a job's operators; pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from state_runtime.base.errors import CorruptData, InvalidConfiguration, InvalidData
from state_runtime.processors.user.stateful import StatefulProcessorOperator

__all__ = ["WRITTEN", "NativeOperator", "NativeState", "match_operators", "parse_operators", "refuse_plain"]

_KINDS: Mapping[str, Literal["value", "list", "map"]] = {"ValueState": "value", "ListState": "list", "MapState": "map"}
_TIME_MODES = {"eventtime": "event", "processingtime": "processing", "none": "none", "notime": "none"}
_NAME = "transformWithState"
# The user's code, by Spark's name of the operator that was made of it.
WRITTEN = {
    "stateStoreSave": "an aggregation such as groupBy().count()",
    "sessionWindowStateStoreSaveExec": "a groupBy(session_window(…)) with aggregates",
    "symmetricHashJoin": "a join of two streams",
    "dedupe": "a dropDuplicates()",
    "dedupeWithinWatermark": "a dropDuplicatesWithinWatermark()",
    "flatMapGroupsWithState": "a flatMapGroupsWithState()",
    "applyInPandasWithState": "an applyInPandasWithState()",
    "globalLimit": "a limit()",
    "transformWithStateInPySparkExec": "a transformWithState()",
}
# Those that a job.query has, too; `transformWithState` is in jobs of steps as well.
_OF_QUERIES = frozenset(
    {"stateStoreSave", "sessionWindowStateStoreSaveExec", "symmetricHashJoin", "dedupe", "dedupeWithinWatermark"}
    | {"applyInPandasWithState"}
)


@dataclass(frozen=True)
class NativeState:
    """A state variable of a native operator."""

    name: str
    kind: Literal["value", "list", "map"]
    has_ttl: bool


@dataclass(frozen=True)
class NativeOperator:
    """An operator of a native query.

    Attributes:
        number: Spark's operator id, by its place in the plan.
        partitions: of its state.
        time_mode, output_mode, states: of a `transformWithState`; of others "" and none.
        operator: Spark's name of its kind.
    """

    number: int
    partitions: int
    time_mode: str
    output_mode: str
    states: tuple[NativeState, ...]
    operator: str = _NAME

    @property
    def is_user_code(self) -> bool:
        """Whether it is a `transformWithState`."""
        return self.operator.startswith(_NAME)

    @property
    def signature(self) -> tuple[object, ...]:
        """The properties that an operator of a job must share with it."""
        return (
            self.time_mode,
            self.output_mode,
            tuple(sorted((s.name, s.kind, s.has_ttl) for s in self.states)),
        )


def parse_operators(rows: Sequence[Mapping[str, Any]], where: str) -> tuple[NativeOperator, ...]:
    """Parse rows of Spark's `state-metadata` source.

    Raises:
        InvalidData: an operator cannot be imported, or the query has no stateful operator at all.
        CorruptData: its description cannot be read.
    """
    found: dict[int, NativeOperator] = {}
    for row in rows:
        number, name = int(row["operatorId"]), str(row["operatorName"])
        if name in _OF_QUERIES:
            found[number] = NativeOperator(
                number=number,
                partitions=int(row["numPartitions"]),
                time_mode="",
                output_mode="",
                states=(),
                operator=name,
            )
            continue
        if not name.startswith(_NAME):
            raise InvalidData(
                f"operator {number} of the query in {where} is {WRITTEN.get(name, f'of kind {name!r}')}, which cannot "
                "be imported. Process the input again for it, in a job of its own"
            )
        found[number] = _operator(number, row, where)
    if not found:
        raise InvalidData(f"the query in {where} has no stateful operator; start a new job instead")
    return tuple(found[number] for number in sorted(found))


def _operator(number: int, row: Mapping[str, Any], where: str) -> NativeOperator:
    try:
        properties = json.loads(row["operatorProperties"] or "{}")
        variables = properties.get("stateVariables", [])
        if isinstance(variables, str):
            variables = json.loads(variables)
        states = tuple(
            NativeState(str(v["stateName"]), _KINDS[str(v["stateVariableType"])], bool(v["ttlEnabled"]))
            for v in variables
            if v["stateVariableType"] != "TimerState" and not str(v["stateName"]).startswith("$")  # Spark's own
        )
        time_mode = _TIME_MODES[str(properties["timeMode"]).lower()]
        output_mode = str(properties["outputMode"]).lower()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptData(
            f"Spark's description of operator {number} in {where} cannot be read ({type(error).__name__}: {error}); it "
            "was written by a version of Spark that is not known"
        ) from error
    return NativeOperator(
        number=number,
        partitions=int(row["numPartitions"]),
        time_mode=time_mode,
        output_mode=output_mode,
        states=states,
        operator=str(row["operatorName"]),
    )


def refuse_plain(native: Sequence[NativeOperator], where: str) -> None:
    """Refuse what only the same query has, for a job of steps.

    Raises:
        InvalidConfiguration: an operator is not user code.
    """
    for one in native:
        if not one.is_user_code:
            raise InvalidConfiguration(
                f"operator {one.number} of the query in {where} is {WRITTEN[one.operator]}; its state goes on in the "
                "same query only. Give the query's code to job.query instead of writing it in steps"
            )


def match_operators(
    native: Sequence[NativeOperator], own: Sequence[object], chosen: Mapping[int, str] | None = None
) -> list[tuple[NativeOperator, StatefulProcessorOperator]]:
    """Return the job's operator for each native one: the chosen one, else the only one that has the same states.

    Args:
        own: the job's operators, in order.
        chosen: uids by Spark's operator ids.

    Raises:
        InvalidConfiguration: none or several fit; the message says what differs.
    """
    candidates = [o for o in own if isinstance(o, StatefulProcessorOperator)]
    pairs: list[tuple[NativeOperator, StatefulProcessorOperator]] = []
    for one in native:
        uid = (chosen or {}).get(one.number)
        if uid is not None:
            fitting = [o for o in candidates if o.uid == uid]
            if not fitting:
                raise InvalidConfiguration(f"the job has no transform_with_state operator {uid!r}; {_have(candidates)}")
        else:
            fitting = [o for o in candidates if _signature(o) == one.signature]
            if not fitting and len(candidates) == len(native) == 1:
                fitting = candidates  # so that the message names the difference
        if len(fitting) != 1:
            raise InvalidConfiguration(
                f"operator {one.number} of the query ({_shown(one.signature)}) "
                f"{'may be any of' if fitting else 'is not one of'} the job's: {_have(candidates)}. Say which with "
                f"--operator {one.number}=UID"
            )
        _check(one, fitting[0])
        pairs.append((one, fitting[0]))
    uids = [o.uid for _, o in pairs]
    if len(set(uids)) != len(uids):
        raise InvalidConfiguration(f"two operators of the query would become one: {', '.join(uids)}; name each once")
    return pairs


def _check(native: NativeOperator, own: StatefulProcessorOperator) -> None:
    if _signature(own) != native.signature:
        raise InvalidConfiguration(
            f"operator {own.uid!r} of the job does not fit operator {native.number} of the query: it has "
            f"{_shown(_signature(own))}, and the query has {_shown(native.signature)}. Give the job the same class and "
            "the same modes; it can be changed after the import"
        )


def _signature(own: StatefulProcessorOperator) -> tuple[object, ...]:
    states = tuple(sorted((name, own.kind_of(name), name in own.ttls_ms) for name in own.state_ddl))
    return own.time_mode, own.output_mode.lower(), states


def _shown(signature: tuple[object, ...]) -> str:
    time_mode, output_mode, states = signature
    shown = [f"{kind} {name!r}{' with TTL' if ttl else ''}" for name, kind, ttl in states]  # type: ignore[attr-defined]
    listed = ", ".join(shown) or "no state"
    return f"time mode {time_mode}, output mode {output_mode}, {listed}"


def _have(operators: Sequence[StatefulProcessorOperator]) -> str:
    return "; ".join(f"{o.uid!r}: {_shown(_signature(o))}" for o in operators) or "it has none"
