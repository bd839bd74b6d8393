"""The context of a run's driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from state_runtime.base.clock import Clock
from state_runtime.base.ids import Ids
from state_runtime.base.settings import JobSettings
from state_runtime.pipeline.compile import CompiledPipeline
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.pipeline.watermark import Clocks, Policy
from state_runtime.snapshot.manifest import OperatorEntry
from state_runtime.store import Store

__all__ = ["DriverContext"]


@dataclass(frozen=True)
class DriverContext:
    """The inputs of an `EpochDriver`: the same from the start of a run to its end.

    Attributes:
        root: of the job; tasks open it by `store_url` and `storage_options`, which may hold secrets.
        local_dir: folder of local copies, where the environment of an executor names no other.
        sinks: as tasks see them, by name.
        entries: the operators' states as manifests describe them from this run on.
        drop_inflight: the user drops the rows that are in flight where the run begins.
        take_output: the user says that the output folders belong to this root (pipeline/output_owner.py).
        on_trial: the first epoch restores every shard, and ends in a checkpoint; see `StartedBy`.
        session: the settings of the Spark session that change results, as manifests name them.
    """

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
    take_output: bool = False
    drop_inflight: bool = False
    on_trial: bool = False
    session: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def clocks(self) -> Clocks:
        """Return what moves the clocks of the operators."""
        return self.pipeline.clocks(self.watermark_policy)

    def __repr__(self) -> str:
        return f"DriverContext({self.job_name!r})"
