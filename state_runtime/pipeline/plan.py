"""The plan of a job: the user's pipeline and settings as one frozen value, of which a run, a bootstrap and an import
are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pyspark.sql import SparkSession

from state_runtime.base.clock import Clock
from state_runtime.base.errors import InvalidPipeline
from state_runtime.base.ids import Ids
from state_runtime.base.settings import JobSettings
from state_runtime.base.usercode import step_at
from state_runtime.pipeline.compile import CompiledPipeline, compile_pipeline
from state_runtime.pipeline.graph import Graph, OperatorNode, QueryNode, SourceNode, check_graph
from state_runtime.pipeline.query import with_queries
from state_runtime.pipeline.side_outputs import with_side_outputs
from state_runtime.pipeline.sources import OpenedSources, open_sources
from state_runtime.spark.versions import check_session
from state_runtime.store import Store

__all__ = ["JobPlan", "Planned", "refuse_unsupported"]


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """A job's pipeline and settings, and the place of its snapshots.

    Attributes:
        graph: the pipeline, as it was written. This class checks that it can be run; `compiled` checks that it fits the
            data.
        store_url, storage_options: of the store that holds the job's root; the options may hold secrets, so they are in
            no repr.
        store: the same store, open.
    """

    name: str
    graph: Graph
    settings: JobSettings
    store_url: str
    store: Store
    clock: Clock
    ids: Ids
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_graph(self.graph)
        refuse_unsupported(self.graph)

    @property
    def root_url(self) -> str:
        """Return the job's root, as tasks open it."""
        return f"{self.store_url.rstrip('/')}/{self.name}"

    @property
    def has_queries(self) -> bool:
        """Return whether the nodes of the graph are known only when Spark has planned a query."""
        return any(isinstance(node, QueryNode) for node in self.graph.nodes)

    def expanded(self, spark: SparkSession) -> JobPlan:
        """Return the plan as a run compiles it: side outputs are nodes, and so is what each query is made of; raises
        the errors of `with_queries`.

        Raises:
            InvalidConfiguration: the session is of Spark Connect, or of a Spark that is too old.
        """
        check_session(spark)
        graph = with_side_outputs(self.graph)
        if self.has_queries:
            graph = with_queries(spark, self.name, graph, self.settings)
        return self if graph is self.graph else replace(self, graph=graph)

    def opened_sources(self, spark: SparkSession) -> OpenedSources:
        """Return the streaming frames; raises the errors of `open_sources`."""
        return open_sources(spark, self.name, self.graph, max_ahead_ms=self.settings.max_ahead_ms)

    def compiled(self, spark: SparkSession, sources: OpenedSources) -> CompiledPipeline:
        """Return the pipeline on its sources; raises the errors of `compile_pipeline`."""
        return compile_pipeline(spark, sources, self.graph, self.settings)


class Planned(Protocol):
    """An object that has a plan: a `StreamingJob`."""

    def plan(self) -> JobPlan: ...


def refuse_unsupported(graph: Graph) -> None:
    """Refuse a graph that a run does not support: each source is read, and no operator has more than two inputs.

    Raises:
        InvalidPipeline: with the line of the node that must be written differently.
    """
    sources = [index for index, node in enumerate(graph.nodes) if isinstance(node, SourceNode)]
    for index, each in enumerate(graph.nodes):
        with step_at(each.at):
            if isinstance(each, OperatorNode) and len(each.ports) > 2:
                raise InvalidPipeline(f"operator {each.uid!r} has {len(each.ports)} inputs; a join has two")
            is_unread = not graph.readers(index) and not graph.sinks(index)
            if isinstance(each, SourceNode) and is_unread and len(sources) > 1:
                raise InvalidPipeline(f"no step reads source {each.name!r}; remove its read(), or write it somewhere")
