"""The plan of a job: what a user wrote and chose, as one frozen value; a run, a bootstrap and an import are made of
it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pyspark.sql import SparkSession

from state_runtime.base.clock import Clock
from state_runtime.base.ids import Ids
from state_runtime.base.settings import JobSettings
from state_runtime.base.usercode import step_at
from state_runtime.pipeline.compile import CompiledPipeline, Step, compile_pipeline
from state_runtime.pipeline.operators import IntervalJoinStep
from state_runtime.pipeline.sources import JoinedStreams, OpenedSource, Source, open_source
from state_runtime.store import Store

__all__ = ["JobPlan", "Planned"]


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """A job's pipeline and settings, and where its snapshots are.

    Attributes:
        source, steps: the pipeline, as it was written; not checked before `compiled`.
        source_at, steps_at: the lines of the job's own code that they come from, where these are known.
        store_url, storage_options: of the store that the job's root lies in; the options may hold secrets, so they are
            in no repr.
        store: the same, open.
    """

    name: str
    source: Source | None
    steps: tuple[Step, ...]
    settings: JobSettings
    store_url: str
    store: Store
    clock: Clock
    ids: Ids
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    source_at: str = ""
    steps_at: tuple[str, ...] = ()

    @property
    def root_url(self) -> str:
        """The job's root, as tasks open it."""
        return f"{self.store_url.rstrip('/')}/{self.name}"

    @property
    def joined(self) -> JoinedStreams | None:
        """The second stream, if the job begins with a join of two."""
        first = self.steps[0] if self.steps else None
        return first.streams if isinstance(first, IntervalJoinStep) else None

    def opened_source(self, spark: SparkSession) -> OpenedSource:
        """The streaming frame; raises what `open_source` raises."""
        with step_at(self.source_at):
            return open_source(spark, self.name, self.source, self.joined)

    def compiled(self, spark: SparkSession, source: OpenedSource) -> CompiledPipeline:
        """The pipeline on a source; raises what `compile_pipeline` raises."""
        return compile_pipeline(spark, source, self.steps, self.settings, self.steps_at)


class Planned(Protocol):
    """Whatever has a plan: a `StreamingJob`."""

    def plan(self) -> JobPlan: ...
