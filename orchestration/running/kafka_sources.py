"""Finds what asks Kafka about the sources of a job, by its code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from state_runtime.base.errors import InvalidConfiguration
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.running.run import build_job, opened_with_spark

if TYPE_CHECKING:
    from state_runtime.sources.kafka_lag import KafkaLag
    from state_runtime.sources.kafka_offsets import Positions

__all__ = ["kafka_source"]


def kafka_source(spec: JobSpec, folder: Path, position: Positions) -> KafkaLag:
    """Return what asks about the source that a position belongs to. The job's code is imported; Spark is started only
    where sources are opened by functions.

    Args:
        folder: of the configuration file.

    Raises:
        InvalidConfiguration: the job's code reads no such topics with sources.kafka. UserCodeError: it raised.
    """
    from state_runtime.pipeline.graph import SourceNode
    from state_runtime.sources.kafka import KafkaSource
    from state_runtime.sources.kafka_lag import KafkaLag
    from state_runtime.sources.watch import opened_lags

    plan = build_job(spec, folder).plan()
    reads = [node.read for node in plan.graph.nodes if isinstance(node, SourceNode)]
    given = [read for read in reads if isinstance(read, KafkaSource)]
    if plan.has_queries or len(given) < len(reads):
        opened_with_spark(spec, plan)
        lags = [lag for lag in opened_lags() if isinstance(lag, KafkaLag)]
    else:
        lags = [source.lag() for source in given]
    offset = position.to_json()
    found = next((lag for lag in lags if lag.reads(offset)), None)
    if found is None:
        topics = ", ".join(sorted({topic for topic, _ in position.next}))
        raise InvalidConfiguration(
            f"job {spec.name!r} has a position in {topics}, and its code reads no such topics with sources.kafka: only "
            "the position of a source that it reads can be set"
        )
    return found
