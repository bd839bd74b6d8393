"""Reuse of an earlier epoch's plan for the rows and the functions of this one, without planning again.

Spark's work on a frame (resolved names, a hundred optimizer rules, a physical plan) gives the same result in each epoch
of one shape. Two things differ: the rows of the batch, which a `foreachBatch` gets as an RDD from any source, and the
functions of the stages. So the physical plan is kept, and the nodes above these two are made again around new ones
(docs/design/0038-rebound.md).

A plan is kept only if nothing else in it can differ: see `_Template.of`. These are internals of Spark; if a version has
others, each epoch is planned again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession

from state_runtime.spark.internals import INTERNALS, Internal
from state_runtime.spark.jvm import (
    analyzed,
    classes,
    execution_of,
    items,
    java_context,
    java_session,
    kind_of,
    kinds_in,
    object_of,
)

__all__ = ["ReboundPlan", "ReboundPlans", "function_name"]

_SHAPES_MAX = 16
"""Maximum number of kept plans: for instance one for each set of shards that wake."""
_MISSES_MAX = 3

# The nodes that a frame may consist of: each of its rows follows from rows of the batch, in the same way in each epoch
# and for any size. Joins are excluded: sizes decide how they are done, and tables must be read again.
_NODES: Final = frozenset(
    {"Project", "Filter", "Union", "Generate", "Aggregate", "SubqueryAlias", "CollectMetrics", "Range", "LogicalRDD"}
    | {"Repartition", "RepartitionByExpression", "MapInArrow", "MapInPandas"}
)
# Patterns of expressions that give another value when they are planned again.
_PATTERNS: Final = ("CURRENT_LIKE", "EXPRESSION_WITH_RANDOM_SEED", "PLAN_EXPRESSION")
_ROWS: Final = "RDDScanExec"
_CONSTANT: Final = "RangeExec"
_FUNCTION: Final = "MapInArrowExec"
_BATCH: Final = -1
"""The number of the rows that no plan of ours makes."""


def function_name(number: int) -> str:
    """Return the name of a stage's function in plans, by which a plan's functions are recognised."""
    return f"stillstate_stage_{number}"


@dataclass(frozen=True)
class ReboundPlan:
    """A plan that can be run once.

    Attributes:
        plans: physical; each reads the rows of the batch, or of plans before it.
        rows: of all that no other plan reads.
    """

    plans: tuple[Any, ...]
    rows: Any
    _collect: Any

    def run(self) -> None:
        """Compute all rows, and drop them where they are."""
        self.rows.count()

    def observed(self, name: str) -> Sequence[Any]:
        """Return the values that one of the plans observed under a name; empty if nothing was run."""
        found = (self._collect(plan).get(name) for plan in self.plans)
        return next((items(each.get().toSeq()) for each in found if each.isDefined()), ())


@dataclass
class _Shape:
    """The knowledge about the epochs of one shape.

    Attributes:
        misses: how often its plan could not be used for another batch, or could not be kept.
    """

    template: _Template | None = None
    misses: int = 0

    @property
    def is_refused(self) -> bool:
        """Whether each of its epochs must be planned."""
        return self.misses >= _MISSES_MAX


class ReboundPlans:
    """Plans of a run's epochs by their shape: everything that the plan depends on, except the rows and the functions.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._made: _Maker | None = None
        self._shapes: OrderedDict[Hashable, _Shape] = OrderedDict()
        self._is_able = not INTERNALS.is_refused(Internal.REBOUND_PLANS)

    def knows(self, shape: Hashable) -> bool:
        """Return whether there is a plan of a shape."""
        known = self._shapes.get(shape)
        return known is not None and known.template is not None

    def learns(self, shape: Hashable) -> bool:
        """Return whether to learn the plan of an epoch that is to be planned; not before a shape comes for the second
        time."""
        known = self._shapes.get(shape)
        if known is None and self._is_able:
            self._shapes[shape] = _Shape()
            if len(self._shapes) > _SHAPES_MAX:
                self._shapes.popitem(last=False)
        return known is not None and not known.is_refused

    def again(self, shape: Hashable, batch: DataFrame, functions: Sequence[Any]) -> ReboundPlan | None:
        """Return the plan of a shape for a batch; None: plan it.

        Args:
            functions: of all stages, as the JVM's Python functions.
        """
        known = self._shapes.get(shape)
        if known is None or known.template is None:
            return None
        self._shapes.move_to_end(shape)
        try:
            plan = known.template.bound(batch, functions)
        except (AttributeError, TypeError, Py4JError) as error:
            self._give_up(error)
            return None
        if plan is None:
            known.template, known.misses = None, known.misses + 1
        return plan

    def learn(self, shape: Hashable, batch: DataFrame, frames: Sequence[DataFrame]) -> None:
        """Keep the plan of an epoch that was run.

        Args:
            frames: each reads the rows of the batch, or of frames before it; empty if another batch may have other
                frames.
        """
        known = self._shapes.get(shape)
        if known is None:
            return
        if not frames:
            known.misses += 1
            return
        try:
            known.template = _Template.of(self._maker(batch), batch, frames)
        except (AttributeError, TypeError, Py4JError) as error:
            self._give_up(error)
            return
        if known.template is None:
            known.misses = _MISSES_MAX

    def _maker(self, batch: DataFrame) -> _Maker:
        if self._made is None:
            # Batches come in a separate session, with its own settings.
            self._made = _Maker(batch.sparkSession)
        return self._made

    def _give_up(self, error: Exception) -> None:
        self._is_able = False
        self._shapes.clear()
        INTERNALS.refuse(Internal.REBOUND_PLANS, error)


class _Maker:
    """The JVM objects with which plans are made."""

    def __init__(self, spark: SparkSession) -> None:
        jvm = classes(spark)
        self._rdd = jvm.org.apache.spark.sql.execution.SQLExecutionRDD
        self._conf = java_session(spark).sessionState().conf()
        self.collect = object_of(jvm.org.apache.spark.sql.execution, "CollectMetricsExec").collect
        patterns = jvm.org.apache.spark.sql.catalyst.trees.TreePattern
        self.patterns = tuple(getattr(patterns, name)() for name in _PATTERNS)
        self.no_rows = java_context(spark.sparkContext).emptyRDD().rdd()
        self._followed_by = getattr(jvm.scala.collection.immutable, "$colon$colon")
        self._nothing = object_of(jvm.scala.collection.immutable, "Nil")

    def sequence(self, of: Sequence[Any]) -> Any:
        """Return a Scala sequence; one call of the JVM for each item, and most sequences have one item."""
        made = self._nothing
        for item in reversed(of):
            made = self._followed_by(item, made)
        return made

    def rows_of(self, plan: Any) -> Any:
        """Return the rows as `QueryExecution.toRdd` does: tasks get the settings of the session."""
        return self._rdd(plan.execute(), self._conf)


@dataclass(frozen=True)
class _Template:
    """Plans whose rows and functions are to be replaced; these plans themselves were never run.

    Attributes:
        rows: class of the node of the batch's rows.
        output: their columns as Spark knows them.
        order: partitioning and order of the rows, if the plan may have used them.
        plans: for each plan its nodes that are made again.
    """

    maker: _Maker
    rows: Any
    output: Any
    order: tuple[Any, Any] | None
    plans: tuple[_Node, ...]

    @staticmethod
    def of(maker: _Maker, batch: DataFrame, frames: Sequence[DataFrame]) -> _Template | None:
        """Make a template of an epoch's plans; None if anything else in them could differ from one epoch to the next.

        That is: a node that is not in `_NODES`; a clock, random numbers or a subquery; rows that are not the batch's; a
        plan that Spark may change while it runs.
        """
        given = analyzed(batch)
        if kind_of(given) != "LogicalRDD":
            return None
        numbers = {int(given.rdd().id()): _BATCH}
        plans: list[_Node] = []
        order: tuple[Any, Any] | None = None
        for frame in frames:
            execution, asked = execution_of(frame), analyzed(frame)
            kinds = kinds_in(asked)
            if not kinds <= _NODES or any(map(asked.containsPattern, maker.patterns)):
                return None
            if "Aggregate" in kinds and not plans:
                order = given.outputPartitioning(), given.outputOrdering()
            node = _node(execution.executedPlan(), numbers)
            if node is None or not node.is_made:
                return None
            numbers[int(execution.toRdd().id())] = len(plans)
            plans.append(node)
        # Of new nodes: one that was run keeps the files of its shuffle for as long as it is there.
        new = tuple(node.with_new_nodes(maker) for node in plans)
        return _Template(maker, given.getClass(), given.output(), order, new)

    def bound(self, batch: DataFrame, functions: Sequence[Any]) -> ReboundPlan | None:
        """Return the plan for a batch; None if its rows differ in kind, or if the plan runs a stage whose function
        cannot be told from a user's: a large one is sent in another way (spark/prepared.py)."""
        given = analyzed(batch)
        stages = frozenset[int]().union(*(node.stages for node in self.plans))
        if not self._fits(given) or stages != frozenset(range(len(functions))):
            return None
        rows, plans = {_BATCH: given.rdd()}, []
        for number, node in enumerate(self.plans):
            plan = node.bound(self.maker, rows, functions)
            plans.append(plan)
            rows[number] = self.maker.rows_of(plan)
        read = frozenset[int]().union(*(node.reads for node in self.plans))
        first, *others = (made for number, made in rows.items() if number != _BATCH and number not in read)
        return ReboundPlan(tuple(plans), reduce(lambda a, b: a.union(b), others, first), self.maker.collect)

    def _fits(self, given: Any) -> bool:
        if not (self.rows.isInstance(given) and given.output().equals(self.output)):
            return False
        return self.order is None or (
            bool(given.outputPartitioning().equals(self.order[0]))
            and bool(given.outputOrdering().equals(self.order[1]))
        )


@dataclass(frozen=True)
class _Node:
    """A node of a physical plan.

    Attributes:
        is_made: whether it is made again; else it stays, with all nodes below it.
        fields: the values that a new node takes from it.
        number: of a stage, if it runs its function.
        source: of the plan whose rows it reads, or `_BATCH`; None if it reads none.
    """

    plan: Any
    is_made: bool
    children: tuple[_Node, ...] = ()
    fields: Mapping[str, Any] | None = None
    number: int | None = None
    source: int | None = None

    @property
    def reads(self) -> frozenset[int]:
        """The plans, `_BATCH` among them, whose rows are read in it and below it."""
        own = frozenset(() if self.source is None else (self.source,))
        return own.union(*(child.reads for child in self.children))

    @property
    def stages(self) -> frozenset[int]:
        """The stages whose functions it runs, with all nodes below it."""
        own = frozenset(() if self.number is None else (self.number,))
        return own.union(*(child.stages for child in self.children))

    def bound(self, maker: _Maker, rows: Mapping[int, Any], functions: Sequence[Any]) -> Any:
        """A new plan, of other rows and functions."""
        if not self.is_made:
            return self.plan
        children = [child.bound(maker, rows, functions) for child in self.children]
        own = rows[self.source] if self.source is not None else None
        return self._with(maker, children, own, functions[self.number] if self.number is not None else None)

    def _with(self, maker: _Maker, children: list[Any], rows: Any, function: Any = None) -> Any:
        of = self.fields
        if of is None:
            return self.plan.withNewChildren(maker.sequence(children))
        if self.number is None:
            return self.plan.copy(of["output"], rows, of["name"], of["partitioning"], of["ordering"], of["stream"])
        udf = of["udf"]
        if function is not None:
            udf = udf.copy(of["name"], function, of["type"], of["reads"], of["kind"], of["steady"], of["id"])
        return self.plan.copy(udf, of["output"], children[0], of["barrier"], of["profile"])

    def with_new_nodes(self, maker: _Maker) -> _Node:
        """Return the same node, made of new plan nodes that are not shared."""
        if not self.is_made:
            return self
        children = tuple(child.with_new_nodes(maker) for child in self.children)
        return replace(
            self, plan=self._with(maker, [child.plan for child in children], maker.no_rows), children=children
        )


def _node(plan: Any, numbers: Mapping[int, int]) -> _Node | None:
    """From a physical plan; None if it has other rows than those of known RDDs, or constant ones.

    Args:
        numbers: of the plans that make the rows, or `_BATCH`, by the ids of their RDDs.
    """
    kind = kind_of(plan)
    below = items(plan.children())
    if not below:
        source = numbers.get(int(plan.rdd().id())) if kind == _ROWS else None
        if source is not None:
            return _Node(plan, True, (), _fields_of_rows(plan), source=source)
        return _Node(plan, False) if kind == _CONSTANT else None
    found = [_node(child, numbers) for child in below]
    children = tuple(child for child in found if child is not None)
    if len(children) < len(found):
        return None
    number = _stage_of(plan) if kind == _FUNCTION else None
    if number is not None:
        return _Node(plan, True, children, _fields_of_function(plan), number)
    return _Node(plan, any(child.is_made for child in children), children)


def _stage_of(plan: Any) -> int | None:
    """Return the stage whose function a node runs; None for a user's own function."""
    _, is_stage, number = str(plan.func().name()).partition(function_name(0)[:-1])
    return int(number) if is_stage else None


def _fields_of_rows(plan: Any) -> Mapping[str, Any]:
    return {
        "output": plan.output(),
        "name": plan.name(),
        "partitioning": plan.outputPartitioning(),
        "ordering": plan.outputOrdering(),
        "stream": plan.getStream(),
    }


def _fields_of_function(plan: Any) -> Mapping[str, Any]:
    udf = plan.func()
    return {
        "udf": udf,
        "name": udf.name(),
        "type": udf.dataType(),
        "reads": udf.children(),
        "kind": udf.evalType(),
        "steady": udf.udfDeterministic(),
        "id": udf.resultId(),
        "output": plan.output(),
        "barrier": plan.isBarrier(),
        "profile": plan.profile(),
    }
