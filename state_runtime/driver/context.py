"""What the driver of a run works on, and where it stands between two epochs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from state_runtime.base.clock import Clock
from state_runtime.base.ids import Ids
from state_runtime.base.settings import JobSettings
from state_runtime.driver.file_book import FileBook
from state_runtime.driver.interval import Interval
from state_runtime.driver.shard_book import Shards
from state_runtime.pipeline.compile import CompiledPipeline
from state_runtime.pipeline.sinks import SinkSpec
from state_runtime.pipeline.watermark import Policy
from state_runtime.processors.operator import EpochClock
from state_runtime.snapshot.manifest import OperatorEntry, TimeEntry
from state_runtime.store import Store
from state_runtime.task.stage import Acknowledgement

__all__ = ["DriverContext", "Processed", "Standing"]


@dataclass(frozen=True)
class DriverContext:
    """What an `EpochDriver` works on; see the classes for what each part promises."""

    job_name: str
    store_url: str
    storage_options: Mapping[str, Any]
    root: Store
    local_dir: str
    settings: JobSettings
    parallelism: int
    pipeline: CompiledPipeline
    sinks: Mapping[str, SinkSpec]
    entries: tuple[OperatorEntry, ...]
    watermark_policy: Policy
    clock: Clock
    ids: Ids

    def __repr__(self) -> str:
        return f"DriverContext({self.job_name!r})"


@dataclass
class Standing:
    """Where a run stands. Epochs and checkpoints take turns to change it, under the driver's lock.

    Attributes:
        interval: the head, and what is pending since the newest manifest.
        shards: the local version of each shard, and what is due in it.
        files: with the changelog off, the files of all shards.
    """

    interval: Interval
    shards: Shards
    files: FileBook | None


@dataclass(frozen=True)
class Processed:
    """An epoch's action, done.

    Attributes:
        time: the epoch's clock, with the event times that were seen.
        planned_s, processed_s: when (monotonic) the plan was ready, and when the action was done.
        flushed_ms, flushed_bytes: of a segment that had to be written before the action could succeed; between the two
            plans.
    """

    acknowledged: list[Acknowledgement]
    time: TimeEntry
    clock: EpochClock
    started_s: float
    planned_s: float
    processed_s: float
    flushed_ms: float = 0.0
    flushed_bytes: int = 0

    @property
    def phases(self) -> dict[str, float]:
        """How long its parts took, in milliseconds."""
        return {
            "plan": (self.planned_s - self.started_s) * 1000 - self.flushed_ms,
            "process": (self.processed_s - self.planned_s) * 1000,
        }
