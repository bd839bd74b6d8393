"""A plain streaming query, cut into what keeps state and what does not.

Spark's optimized plan is cut at its stateful nodes: the optimizer's rules decide which rows pass a watermark. What
stands between two cuts stays Spark's own. In each epoch its leaves become projections of an operator's output, with the
numbers by which the plan knows its columns; names, casts, functions and joins with tables need no translation
(docs/design/0045-queries.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from state_runtime.base.errors import InvalidPipeline
from state_runtime.base.joining import CONDITION
from state_runtime.spark.catalyst import WINDOW_END, WINDOW_START, Catalyst, distinct_names, id_of, is_marked, is_window
from state_runtime.spark.internals import Internal, given
from state_runtime.spark.jvm import items, kind_of, kinds_in
from state_runtime.spark.query_functions import made_call
from state_runtime.spark.query_joins import PairConditions, bounds_of, check_is_bounded
from state_runtime.spark.query_kept import KeptInPlan
from state_runtime.spark.query_names import Aliases, source_place
from state_runtime.spark.query_parts import Deduplicated, Given, Grouped, Joined, Part, Processed, Read, Rows, Stateful
from state_runtime.spark.query_processors import PROCESSORS, code_of
from state_runtime.spark.query_sessions import OWN_GAPS, is_session, session_gap_us
from state_runtime.spark.query_text import Texts, digest_of, plain_name, window_us_of

__all__ = ["cut_query", "streams_without_rows"]

_SETTLED: Final = "DataSourceV2ScanRelation"
_TIMES: Final = ("start", "end")
"""The fields of a window, and the ends of the names of their columns."""
_WATERMARK: Final = "EventTimeWatermark"
_MARK: Final = "UpdateEventTimeWatermarkColumn"
"""Marks the column with event time above a processor; Spark has no physical plan for it outside its own state."""
_STATEFUL: Final = frozenset(
    {"Aggregate", "Deduplicate", "DeduplicateWithinWatermark", "Distinct", "Window", "Sort", "Intersect", "Except"}
    | {"TransformWithState", "TransformWithStateInPySpark", "FlatMapGroupsWithState", "FlatMapGroupsInPandasWithState"}
    | {"GlobalLimit", "LocalLimit", "Tail", "Offset", "FlatMapGroupsInPandas", "FlatMapGroupsInArrow"}
)
_OF_TABLES: Final = frozenset({"Sort", "GlobalLimit", "LocalLimit"})
"""Above an aggregate in complete mode they see all of its rows in each epoch, as of a table."""
_KEPT_BY: Final[Mapping[str, str]] = {
    "TransformWithStateInPySpark": "transformWithStateInPySparkExec",
    "FlatMapGroupsInPandasWithState": "applyInPandasWithState",
}
"""Spark's names of the operators of user code, in checkpoints."""
_STATELESS: Final = frozenset(
    {"Project", "Filter", "SubqueryAlias", "View", "Union", "Expand", "Generate", "MapInArrow", "MapInPandas", "Join"}
    | {"TypedFilter", "MapPartitions", "SerializeFromObject", "DeserializeToObject", "MapElements", "CollectMetrics"}
    | {"ArrowEvalPython", "BatchEvalPython", "RepartitionByExpression", "Repartition", "RebalancePartitions"}
)


def cut_query(
    frame: DataFrame,
    output_mode: str,
    sources: Mapping[str, str],
    *,
    given_streams: Mapping[int, str] = MappingProxyType({}),
    allow_unbounded: bool = False,
) -> tuple[Part, ...]:
    """Cut a streaming frame into parts, each after those that it reads; the last one gives the query's rows.

    Args:
        output_mode: "append", "update" or "complete".
        sources: other names for sources, by the names that they would have.
        given_streams: the names of the streams of the job that the frame was made with (`stream_without_rows`), in
            the order of the query's inputs, by their numbers.
        allow_unbounded: joins may keep rows for ever.

    Raises:
        InvalidPipeline: something in the plan is not supported; the message names it.
        Py4JJavaError: Spark refuses the query for the output mode, too.
    """
    asked = _Asked(output_mode, sources, given_streams, allow_unbounded)
    return given(Internal.QUERY_PLANS, lambda: _cut(frame, asked), _refuse)


def streams_without_rows(spark: SparkSession, schemas: Sequence[T.StructType]) -> list[tuple[DataFrame, int]]:
    """Return a frame for each stream of the job that a query is made with, and the number by which its plan knows it.

    Raises:
        InvalidPipeline: this version of Spark has other plans.
    """

    def made() -> list[tuple[DataFrame, int]]:
        catalyst = Catalyst(spark)
        return [catalyst.stream_without_rows(schema) for schema in schemas]

    return given(Internal.QUERY_PLANS, made, _refuse) if schemas else []


def _refuse() -> Any:
    raise InvalidPipeline(
        f"plain queries need plans as Spark 4.1 to 4.3 make them, and Spark {pyspark.__version__} makes others (see "
        "docs/spark-internals.md); write the pipeline in steps: read(…), key_by(…), …"
    )


@dataclass(frozen=True)
class _Asked:
    """What a user says of a query, as `cut_query` has it."""

    output_mode: str
    sources: Mapping[str, str]
    given_streams: Mapping[int, str]
    allow_unbounded: bool


def _cut(frame: DataFrame, asked: _Asked) -> tuple[Part, ...]:
    catalyst = Catalyst(frame.sparkSession)
    analyzed = catalyst.analyzed(frame)
    catalyst.refused_by_spark(analyzed, asked.output_mode.capitalize())
    plan = catalyst.optimized(analyzed)
    if any(_SETTLED in kinds_in(each) for each in (plan, *items(plan.subqueriesAll()))):
        raise InvalidPipeline(
            "a subquery reads a table whose files Spark settles when it plans the query, and each epoch has to read it "
            "anew; join with the table instead"
        )
    return _Cutting(catalyst, analyzed, plan, asked).parts()


@dataclass(frozen=True)
class _Edge:
    """What a part gives, and how the plan above knows it.

    Attributes:
        columns: of the part's rows, one for each attribute.
        attributes: as the plan knows them.
        above: what is computed of them, above; None: nothing.
    """

    part: int
    columns: tuple[str, ...]
    attributes: tuple[Any, ...]
    above: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class _Piece:
    """A node of a stateless part, and those below it; known once, so that an epoch only puts plans together.

    Attributes:
        below: the nodes below it; () of a node that stays as it is, with all below it.
        cut: which of the part's inputs stands in its place; None: it stays.
        is_mark: it marks a column as event time.
    """

    node: Any
    below: tuple[_Piece, ...] = ()
    cut: int | None = None
    is_mark: bool = False

    def plan_on(self, catalyst: Catalyst, inputs: Sequence[Any]) -> Any:
        """Return the same plan upon other inputs."""
        if self.cut is not None:
            return inputs[self.cut]
        if not self.below:
            return self.node
        below = [piece.plan_on(catalyst, inputs) for piece in self.below]
        if self.is_mark:
            return _named_as(catalyst, below[0], items(self.node.output()))
        return self.node.withNewChildren(catalyst.sequence(below))


class _Cutting:
    """A plan that is being cut."""

    def __init__(self, catalyst: Catalyst, analyzed: Any, plan: Any, asked: _Asked) -> None:
        self._catalyst = catalyst
        self._plan = plan
        self._output = items(analyzed.output())
        self._asked = asked
        self._aliases = Aliases(analyzed)
        self._texts = Texts(catalyst, plan, self._name_of_leaf)
        self._parts: list[Part] = []
        self._read: list[tuple[Any, _Edge]] = []
        self._times: dict[int, str] = {}  # columns of processors that were marked as event time
        self._operators = 0  # that were met; Spark numbers them in the same order, before those below them

    def parts(self) -> tuple[Part, ...]:
        """Cut the whole plan."""
        # The optimizer may have dropped the last names.
        inner = partial(_named_as, self._catalyst, attributes=self._output)
        if any(distinct_names(each.dataType) != each.dataType for each in self._catalyst.schema_of(self._output)):
            inner = partial(inner, made=self._catalyst.with_distinct_names)
        self._rows(self._plan, inner, is_last=True)
        return tuple(self._parts)

    def _add(self, part: Part) -> int:
        self._parts.append(part)
        return len(self._parts) - 1

    # --- what stands between -------------------------------------------------------------------------------------

    def _rows(self, plan: Any, inner: Callable[[Any], Any], *, is_last: bool = False) -> int:
        """Add the stateless part of a plan, down to its cuts, with what `inner` computes of its rows."""
        edges: list[_Edge] = []
        kinds: dict[str, None] = {}  # in order
        piece, catalyst = self._piece(plan, edges, kinds), self._catalyst
        # A limit would end tasks before they have acknowledged, and for a sort Spark would run them twice: once to
        # find the ranges of its tasks.
        in_one_task = not _OF_TABLES.isdisjoint(kinds)

        def rows(*frames: DataFrame) -> DataFrame:
            adopted = [_adopted(catalyst, edge, frame) for edge, frame in zip(edges, frames, strict=True)]
            if in_one_task:
                adopted = [catalyst.in_one_task(each) for each in adopted]
            return catalyst.frame(inner(piece.plan_on(catalyst, adopted)), frames[0].sparkSession)

        is_of_operator = len(edges) == 1 and isinstance(self._parts[edges[0].part], Stateful)
        renames = self._renames(edges[0], rows) if is_last and is_of_operator else {}
        return self._add(Rows(tuple(edge.part for edge in edges), ", ".join(kinds), rows, renames))

    def _renames(self, edge: _Edge, rows: Callable[[DataFrame], DataFrame]) -> Mapping[str, tuple[str, ...]]:
        """Return the operator's columns by the names that rows have for them; empty if something is computed."""
        catalyst, part = self._catalyst, self._parts[edge.part]
        windows: set[str] = set()  # which are two columns there
        if isinstance(part, Grouped) and part.gap_us is None:
            windows = set(part.says) - set(part.keys)
        fields: list[T.StructField] = []
        for name, field in zip(edge.columns, catalyst.schema_of(edge.attributes).fields, strict=True):
            if name in windows and isinstance(field.dataType, T.StructType):
                fields += [T.StructField(f"{name}_{each}", field.dataType[each].dataType) for each in _TIMES]
            elif distinct_names(field.dataType) != field.dataType:
                return {}
            else:
                fields.append(T.StructField(name, field.dataType))
        frame, _ = catalyst.stream_without_rows(T.StructType(fields))
        plan = catalyst.optimized(catalyst.analyzed(rows(frame)))
        is_project = kind_of(plan) == "Project"
        leaf = plan.child() if is_project else plan
        if items(leaf.children()):
            return {}
        known = {id_of(each): each for each in items(leaf.output())}
        made: dict[str, tuple[str, ...]] = {}
        for column in items(plan.projectList() if is_project else plan.output()):
            value = _value(column)
            read = {id_of(each) for each in items(column.references().toSeq())}
            of = [each for number, each in known.items() if number in read]
            is_window_of_two = len(of) == 2 and str(value.sql()) == str(catalyst.window(*of).sql())
            if kind_of(value) != "AttributeReference" and not is_window_of_two:
                return {}
            made[str(column.name())] = tuple(str(each.name()) for each in of)
        return made

    def _piece(self, node: Any, edges: list[_Edge], kinds: dict[str, None]) -> _Piece:
        """Return the stateless part of a plan from a node down; add its cuts, and the classes of its nodes.

        Raises:
            InvalidPipeline: a node is neither known to be stateless nor a cut.
        """
        if not node.isStreaming():
            return _Piece(node)
        if self._is_cut(node):
            edges.append(self._edge(node))
            return _Piece(node, cut=len(edges) - 1)
        kind = kind_of(node)
        kinds[kind] = None
        if kind == _MARK:
            self._times[id_of(node.eventTime())] = str(node.eventTime().name())
        elif kind == _WATERMARK:
            raise InvalidPipeline(
                f"withWatermark on {node.eventTime().name()!r} stands behind an operator with state; call it once, on "
                "the stream that is read"
            )
        elif kind not in _STATELESS and not self._is_of_table(node):
            raise InvalidPipeline(f"{kind} is not supported in a query on a stream: {_line(node)}")
        below = tuple(self._piece(child, edges, kinds) for child in items(node.children()))
        return _Piece(node, below, is_mark=kind == _MARK)

    def _is_cut(self, node: Any) -> bool:
        return self._is_stateful(node) or self._is_source(node)

    def _is_stateful(self, node: Any) -> bool:
        if not node.isStreaming():
            return False
        kind = kind_of(node)
        if kind == "Join":
            return all(child.isStreaming() for child in items(node.children()))
        return kind in _STATEFUL and not self._is_of_table(node)

    def _is_of_table(self, node: Any) -> bool:
        """Return whether a node sorts or cuts the table that an aggregate in complete mode gives."""
        if self._asked.output_mode != "complete" or kind_of(node) not in _OF_TABLES:
            return False
        return any(kind_of(each) == "Aggregate" and each.isStreaming() for each in _nodes_of(node))

    def _is_source(self, node: Any) -> bool:
        if not node.isStreaming():
            return False
        if not items(node.children()):
            return True
        return kind_of(node) == _WATERMARK and not self._has_stateful(node)

    def _has_stateful(self, node: Any) -> bool:
        return self._is_stateful(node) or any(map(self._has_stateful, items(node.children())))

    # --- cuts ----------------------------------------------------------------------------------------------------

    def _edge(self, node: Any) -> _Edge:
        """Return what a cut gives. A stream that is read twice in the same way is read once: Spark would read it for
        both at different times."""
        attributes = tuple(items(node.output()))
        if not self._is_source(node):
            return self._made(node, attributes)
        same = next((edge for known, edge in self._read if node.sameResult(known)), None)
        if same is not None:
            return replace(same, attributes=attributes)
        edge = self._source(node, attributes)
        self._read.append((node, edge))
        return edge

    def _made(self, node: Any, attributes: tuple[Any, ...]) -> _Edge:
        kind = kind_of(node)
        number, self._operators = self._operators, self._operators + 1
        if kind == "Aggregate":
            return self._aggregate(node, number)
        if kind in ("Deduplicate", "DeduplicateWithinWatermark"):
            return self._deduplicate(node, attributes, number, within_watermark=kind != "Deduplicate")
        if kind == "Join":
            return self._join(node, attributes, number)
        if kind in PROCESSORS:
            return self._processor(node, attributes, number)
        raise InvalidPipeline(f"{kind} is not supported in a query on a stream: {_line(node)}")

    def _source(self, node: Any, attributes: tuple[Any, ...]) -> _Edge:
        _check_one_watermark(node)
        columns = _distinct([str(attribute.name()) for attribute in attributes])
        leaf = next(each for each in items(node.collectLeaves()) if each.isStreaming())
        if kind_of(leaf) == "LocalRelation":
            raise InvalidPipeline("the query gives no row, whatever its streams have (LIMIT 0); remove that part of it")
        if (stream := self._stream_of(leaf)) is not None:
            if kind_of(node) == _WATERMARK:
                raise InvalidPipeline(
                    f"withWatermark on {node.eventTime().name()!r} of {stream[1]!r}, which is a stream of the job: "
                    "call it where the job reads that stream"
                )
            return _Edge(self._add(Given(stream[0])), columns, attributes)
        read = Read(self._catalyst.frame(node).toDF(*columns), self._name_of_leaf(leaf) or "")
        return _Edge(self._add(read), columns, attributes)

    def _stream_of(self, leaf: Any) -> tuple[int, str] | None:
        """Return which input of the query a leaf stands for, and its name."""
        number = self._catalyst.number_of(leaf)
        streams = enumerate(self._asked.given_streams.items())
        return next(((place, name) for place, (known, name) in streams if known == number), None)

    def _name_of_leaf(self, leaf: Any) -> str | None:
        """Return the name of the source that a leaf reads; None of a table. What is read twice has one name here."""
        if items(leaf.children()) or not leaf.isStreaming():
            return None
        if (stream := self._stream_of(leaf)) is not None:
            return stream[1]
        name = self._aliases.of_source(leaf) or source_place(leaf)
        return self._asked.sources.get(name, name)

    def _aggregate(self, node: Any, number: int) -> _Edge:
        catalyst = self._catalyst
        grouping = catalyst.grouping_of(node)
        if grouping is None:
            raise InvalidPipeline(f"Python aggregate functions are not supported on a stream: {_line(node)}")
        by, called, results = grouping
        time = self._time_of(by, node)
        made_calls = [made_call(catalyst, self._texts, each) for each in called]
        distinct = _distinct([made.name for made in made_calls])
        calls = [made.renamed(name) for made, name in zip(made_calls, distinct, strict=True)]
        says = self._says(by)
        gap_us = session_gap_us(time, node.child(), self._is_cut) if time is not None else None
        if gap_us is not None and len(by) == 1:
            raise InvalidPipeline(f"a session window needs another key beside it, as in Spark: {_line(node)}")
        columns: dict[str, Any] = {}
        own_keys: dict[str, str] = {}
        names: list[str] = []
        event_time, end_column, window, window_us = "", "", "", 0
        for place, (name, key) in enumerate(zip(says, by, strict=True)):
            is_time = time is not None and id_of(key) == id_of(time)
            names.append("window" if is_time and gap_us is not None else name)
            if not (is_time and is_window(key)):
                columns[name] = catalyst.named(_value(key), name, marked=key if is_time else None)
                own_keys[name] = f"k{place}"
                event_time = name if is_time else event_time
                continue
            # Both times are the key, and not the struct of them: they are plain columns.
            window, window_us = f"k{place}", window_us_of(says[name]) if gap_us is None else gap_us
            start, end = (f"{name}_{each}" for each in _TIMES)
            event_time = end if gap_us is None else start
            end_column = end if gap_us == OWN_GAPS else ""
            for end_of, field, each in ((WINDOW_START, "start", start), (WINDOW_END, "end", end)):
                if gap_us is None or each in (event_time, end_column):
                    value = catalyst.field_of(_value(key), end_of)
                    is_event_time = each == event_time and is_marked(key)
                    columns[each] = catalyst.named(value, each, marked=key if is_event_time else None)
                    own_keys[each] = f"k{place}.{field}"
        keys = tuple(name for name in columns if gap_us is None or name not in (event_time, end_column))
        for made in calls:
            columns |= {name: catalyst.named(value, name) for name, value in made.arguments.items()}
        kind = "session" if gap_us is not None else "window" if "window" in says else "aggregate"
        part = Grouped(
            inputs=(self._rows(node.child(), partial(catalyst.project, list(columns.values()))),),
            name=self._aliases.of(node) or _named(kind, says.values(), by),
            keys=keys,
            says=says,
            reads=digest_of(self._texts.of_rows(node)),
            is_ambiguous=_are_twice(says.values()) or _are_twice(made.name for made in made_calls),
            kept=KeptInPlan(
                number=number,
                operator="stateStoreSave" if gap_us is None else "sessionWindowStateStoreSaveExec",
                keys=[key.toAttribute() for key in by],
                own_keys={name: sql for name, sql in own_keys.items() if name in keys},
                called={made.name: each for made, each in zip(calls, called, strict=True)},
                window=window,
                window_us=window_us,
            ),
            calls={made.name: made.call for made in calls},
            # In complete mode no key is late or forgotten; a session needs the time of its rows.
            event_time=event_time if gap_us is not None or self._asked.output_mode != "complete" else "",
            gap_us=gap_us,
            end_column=end_column,
        )
        attributes = (*(key.toAttribute() for key in by), *(made.result for made in calls))
        edge = (*names, *(made.name for made in calls))
        return _Edge(self._add(part), edge, attributes, partial(catalyst.project, results))

    def _time_of(self, keys: Sequence[Any], node: Any) -> Any:
        """Return the key with event time of a grouping, or its session window; None if it has neither."""
        marked = [key for key in keys if is_marked(key)]
        if self._asked.output_mode == "complete":
            return next((key for key in keys if is_session(key)), marked[0] if len(marked) == 1 else None)
        if len(marked) > 1:
            names = ", ".join(str(key.name()) for key in marked)
            raise InvalidPipeline(f"groupBy has several columns with event time ({names}); Spark goes by one: keep one")
        if self._asked.output_mode == "append" and not marked:
            raise InvalidPipeline(f"output mode append needs event time among the keys of {_line(node)}")
        return marked[0] if marked else None

    def _deduplicate(self, node: Any, attributes: tuple[Any, ...], number: int, *, within_watermark: bool) -> _Edge:
        catalyst, wanted = self._catalyst, {id_of(key) for key in items(node.keys())}
        named = self._named_columns(items(node.child().output()))
        keys = [name for name, attribute in named.items() if id_of(attribute) in wanted]
        says = {name: self._texts.of(named[name]) for name in keys}
        times = [name for name, attribute in named.items() if is_marked(attribute)]
        if len(times) > 1:
            names = ", ".join(str(named[name].name()) for name in times)
            raise InvalidPipeline(f"{_line(node)} gets several columns with event time ({names}); select one before it")
        columns = [
            catalyst.named(attribute, name, marked=attribute if name in times and not is_window(attribute) else None)
            for name, attribute in named.items()
        ]
        places = {id_of(key): f"k{place}" for place, key in enumerate(items(node.keys()))}
        own_keys = {name: places[id_of(named[name])] for name in keys}
        for name in times:
            if is_window(named[name]):
                end = f"{name}_end"
                columns.append(catalyst.named(catalyst.field_of(named[name], WINDOW_END), end, marked=named[name]))
                if name in keys:
                    keys.append(end)
                    own_keys[end] = f"{own_keys[name]}.end"
        below = self._rows(node.child(), partial(catalyst.project, columns))
        part = self._add(
            Deduplicated(
                inputs=(below,),
                name=self._aliases.of(node) or _named("deduplicate", says.values(), [named[key] for key in says]),
                keys=tuple(keys),
                says=says,
                reads=digest_of(self._texts.of_rows(node)),
                is_ambiguous=_are_twice(says.values()),
                kept=KeptInPlan(
                    number, "dedupeWithinWatermark" if within_watermark else "dedupe", items(node.keys()), own_keys
                ),
                within_watermark=within_watermark,
            )
        )
        return _Edge(part, tuple(named), attributes)

    def _join(self, node: Any, attributes: tuple[Any, ...], number: int) -> _Edge:
        catalyst, bounds = self._catalyst, bounds_of(self._catalyst, node)
        if not self._asked.allow_unbounded:
            check_is_bounded(bounds, node)
        asked = PairConditions(catalyst, self._texts, node, bounds)
        says = self._says(bounds.keys[0])
        other = [self._texts.of(key) for key in bounds.keys[1]]
        inputs: list[int] = []
        names: list[str] = []
        sides: list[tuple[Sequence[Any], Callable[[DataFrame], DataFrame]]] = []
        is_ambiguous = False
        for side, letter in enumerate("lr"):
            child = items(node.children())[side]
            named = self._named_columns(items(child.output()))
            is_ambiguous |= _are_twice(self._texts.of(attribute) for attribute in named.values())
            columns = [catalyst.named(_value(key), name) for name, key in zip(says, bounds.keys[side], strict=True)]
            columns += [catalyst.named(attribute, f"{letter}_{name}") for name, attribute in named.items()]
            columns += [catalyst.named(each, name) for name, each in asked.columns[side].items()]
            if (time := bounds.times[side]) is not None:
                marked = next(
                    each for one in (child, *items(node.children())) for each in items(one.output()) if is_marked(each)
                )
                columns.append(catalyst.named(time, f"{letter}_time", marked=marked))
            inputs.append(self._rows(child, partial(catalyst.project, columns)))
            sides.append((items(child.output()), partial(_rows_kept, catalyst, items(child.output()), columns)))
            # A semi join gives nothing of its right side.
            names += [f"{letter}_{name}" for name in named] if len(names) < len(attributes) else []
        part = self._add(
            Joined(
                inputs=tuple(inputs),
                name=self._aliases.of(node) or _named("join", says.values(), bounds.keys[0]),
                keys=tuple(says),
                says={
                    **{name: f"{text} = {right}" for (name, text), right in zip(says.items(), other, strict=True)},
                    **({CONDITION: " AND ".join(map(self._texts.of, bounds.others))} if bounds.others else {}),
                },
                reads=digest_of(self._texts.of_rows(node)),
                is_ambiguous=_are_twice(says.values()) or is_ambiguous,
                kept=KeptInPlan(number, "symmetricHashJoin", [], {}, sides=sides),
                right_keys=tuple(says),
                terms=asked.terms,
                held_back_ms=bounds.held_back_ms,
            )
        )
        above = partial(catalyst.filter, bounds.condition) if bounds.condition is not None else None
        return _Edge(part, tuple(names), attributes, above)

    def _processor(self, node: Any, attributes: tuple[Any, ...], number: int) -> _Edge:
        catalyst, code = self._catalyst, code_of(self._catalyst, node)
        named = {str(column.name()): column for column in (*code.keys, *code.columns)}
        columns = [
            catalyst.named(column, name, marked=column if is_marked(column) and not is_window(column) else None)
            for name, column in named.items()
        ]
        says = {str(key.name()): self._texts.of(key) for key in code.keys}
        below = self._rows(node.child(), partial(catalyst.project, columns))
        marked = [self._times[id_of(each)] for each in attributes if id_of(each) in self._times]
        part = self._add(
            Processed(
                inputs=(below,),
                name=self._aliases.of(node) or _named("processor", says.values(), code.keys),
                keys=tuple(says),
                says=says,
                reads=digest_of(self._texts.of_rows(node)),
                is_ambiguous=_are_twice(says.values()),
                kept=KeptInPlan(number, _KEPT_BY[kind_of(node)], code.keys, {}),
                processor=code.processor,
                output_schema=catalyst.schema_of(attributes),
                is_pandas=code.is_pandas,
                time_mode=code.time_mode,
                event_time=marked[0] if marked else "",
                initial=code.initial,
            )
        )
        return _Edge(part, tuple(str(each.name()) for each in attributes), attributes)

    # --- names of columns ----------------------------------------------------------------------------------------

    def _says(self, keys: Sequence[Any]) -> dict[str, str]:
        """Return the texts of keys by the names of their columns."""
        texts = [self._texts.of(_value(key)) for key in keys]
        plain = [plain_name(text) for text in texts]
        made = {f"{name}_{each}" for name in plain for each in _TIMES}  # of windows
        names = [
            name if name and plain.count(name) == 1 and name not in made else f"{name or 'key'}_{digest_of(text)}"
            for name, text in zip(plain, texts, strict=True)
        ]
        return dict(zip(_distinct(names), texts, strict=True))

    def _named_columns(self, attributes: Sequence[Any]) -> dict[str, Any]:
        """Return columns by names that follow from what each says, and not from the others."""
        texts = [self._texts.of(attribute) for attribute in attributes]
        names = _distinct([f"{plain_name(text) or 'column'}_{digest_of(text)}" for text in texts])
        return dict(zip(names, attributes, strict=True))


def _named_as(
    catalyst: Catalyst, plan: Any, attributes: Sequence[Any], made: Callable[[Any], Any] = lambda column: column
) -> Any:
    """Return a plan's columns under the names and numbers of others.

    Args:
        made: what is made of each column.
    """
    pairs = zip(map(made, items(plan.output())), attributes, strict=True)
    return catalyst.project([catalyst.as_attribute(*pair) for pair in pairs], plan)


def _rows_kept(catalyst: Catalyst, attributes: Sequence[Any], columns: Sequence[Any], frame: DataFrame) -> DataFrame:
    """Return columns that are computed of attributes, for a frame that has values of these; its other columns stay."""
    plan = catalyst.analyzed(frame)
    given = items(plan.output())
    further = given[len(attributes) :]
    own = [catalyst.as_attribute(*pair) for pair in zip(given, attributes)]
    return catalyst.frame(
        catalyst.project([*columns, *further], catalyst.project([*own, *further], plan)), frame.sparkSession
    )


def _adopted(catalyst: Catalyst, edge: _Edge, frame: DataFrame) -> Any:
    """Return a frame's plan with the numbers by which the plan above knows its columns."""
    plan = catalyst.analyzed(frame)
    given = {str(attribute.name()): attribute for attribute in items(plan.output())}
    columns = []
    for name, wanted in zip(edge.columns, edge.attributes, strict=True):
        have = given.get(name)
        if have is None:
            have = catalyst.window(*(given[f"{name}_{each}"] for each in _TIMES))
        column = catalyst.with_names_of(have, wanted)
        if column is None:
            raise InvalidPipeline(
                f"{wanted.name()} is {have.dataType().catalogString()} here and {wanted.dataType().catalogString()} in "
                "Spark; cast what it is made of"
            )
        columns.append(catalyst.as_attribute(column, wanted))
    adopted = catalyst.project(columns, plan)
    return edge.above(adopted) if edge.above is not None else adopted


def _value(key: Any) -> Any:
    """Return the expression of a key: of a named one what is named."""
    return key.child() if kind_of(key) == "Alias" else key


def _named(kind: str, texts: Iterable[str], keys: Sequence[Any]) -> str:
    """Return a name for an operator: what it does, and the names of its keys.

    Args:
        texts: what the keys say.
    """
    words = [plain_name(text) or _own_name(key) or "key" for text, key in zip(texts, keys, strict=True)]
    return "-".join([kind, *(word for word in words if word != kind)])[:60]


def _own_name(key: Any) -> str:
    """Return the name that the user gave to an expression; "" if it is Spark's."""
    name = str(key.name()) if kind_of(key) in ("AttributeReference", "Alias") else ""
    return name if name.isidentifier() and not name.startswith("_") else ""


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of which none is there twice, case aside: later ones get a number."""
    taken: set[str] = set()
    found = []
    for name in names:
        made = next(n for n in (name, *(f"{name}_{i}" for i in range(2, 10_000))) if n.lower() not in taken)
        taken.add(made.lower())
        found.append(made)
    return tuple(found)


def _are_twice(texts: Iterable[str]) -> bool:
    found = list(texts)
    return len(set(found)) < len(found)


def _check_one_watermark(source: Any) -> None:
    """Refuse a second watermark below the one that a source is cut at: its column would be lost without a word, and
    Spark refuses it when the query runs."""
    times = [str(node.eventTime().name()) for node in _nodes_of(source) if kind_of(node) == _WATERMARK]
    if len(times) > 1:
        raise InvalidPipeline(
            f"withWatermark is called on {' and on '.join(map(repr, times))}, one behind the other; Spark refuses that "
            "when the query runs (Redefining watermark is disallowed). Call it once for each stream that is read"
        )


def _nodes_of(node: Any) -> Iterator[Any]:
    yield node
    for child in items(node.children()):
        yield from _nodes_of(child)


def _line(node: Any) -> str:
    """Return a node as Spark prints it, in one line."""
    text = str(node.simpleString(40)).lstrip("~")
    return text if len(text) <= 200 else f"{text[:200]}…"
