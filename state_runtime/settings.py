"""Settings of one job's runtime; pure values with limits."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from state_runtime.errors import InvalidConfiguration
from state_runtime.limits import KIB, MAX_PARALLELISM, MIB

__all__ = ["JobSettings"]


@dataclass(frozen=True)
class JobSettings:
    """How a job runs; nothing here changes a result.

    Attributes:
        parallelism: shards of every stateful operator; 0 takes Spark's default parallelism at the first start
            and the newest snapshot's value after that.
        local_dir: folder for local runs and Spark's scratch checkpoint; "" is a folder of the user in the
            system's temporary directory. It should outlive the driver, for quick restarts.
        heartbeat_interval_s: how often the driver says that it lives, and looks for control requests.
        inline_bytes_max: changes of one task up to this size ride in its acknowledgement and are packed into the
            epoch's one segment; larger ones are uploaded by the task itself.
        materialize: whether the driver folds its changelog into state tables in the background.
        materialize_min_bytes: log size below which nothing is folded.
        materialize_ratio: fold everything (major) once the log and the deltas exceed this share of the base.
        materialize_max_segments: fold the log (minor) at this many segments, whatever their size, so that the
            manifest and the number of reads at a restart stay bounded.
        runs_max: about how many local runs a look-up searches per shard and state: more make merges rarer, fewer make
            look-ups quicker.
        backend: what keeps a shard's state on local disk: "arrow" (sorted, memory-mapped runs) or "rocksdb" (needs the package
            rocksdict). Snapshots do not depend on it.
        output_rows_per_batch: rows of one output Arrow batch.
    """

    parallelism: int = 0
    local_dir: str = ""
    heartbeat_interval_s: float = 2.0
    inline_bytes_max: int = 256 * KIB
    materialize: bool = True
    materialize_min_bytes: int = 64 * MIB
    materialize_ratio: float = 1.0
    materialize_max_segments: int = 256
    runs_max: int = 8
    output_rows_per_batch: int = 65_536
    backend: Literal["arrow", "rocksdb"] = "arrow"

    def __post_init__(self) -> None:
        if self.backend not in ("arrow", "rocksdb"):
            raise InvalidConfiguration(f"setting backend = {self.backend!r} is neither arrow nor rocksdb")
        bounds: dict[str, tuple[float, float]] = {
            "parallelism": (0, MAX_PARALLELISM),
            "heartbeat_interval_s": (0.05, 3600),
            "inline_bytes_max": (0, 64 * MIB),
            "materialize_min_bytes": (1, 1 << 50),
            "materialize_ratio": (0.01, 100),
            "materialize_max_segments": (2, 4096),
            "runs_max": (2, 64),
            "output_rows_per_batch": (1, 10_000_000),
        }
        known = {f.name for f in fields(self)}
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if name not in known or not low <= value <= high:
                raise InvalidConfiguration(
                    f"setting {name} = {value!r} is outside {low} … {high}; choose a value inside"
                )
