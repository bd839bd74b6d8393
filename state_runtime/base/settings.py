"""Settings of one job's runtime; pure values with limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Final, Literal, get_args

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.limits import GIB, KIB, MAX_PARALLELISM, MIB

__all__ = [
    "CHOICES",
    "FAILED_TTL_S",
    "JOB_BOUNDS",
    "RETENTION_BOUNDS",
    "Backend",
    "Bounds",
    "ChangelogMode",
    "CheckpointMode",
    "Compression",
    "FoldMode",
    "JobSettings",
    "PartialAggregation",
    "PlacementMode",
    "RetentionPolicy",
    "VerifyLevel",
]

FAILED_TTL_S = 7 * 86_400.0

Backend = Literal["arrow", "rocksdb"]
ChangelogMode = Literal["on", "off"]
Compression = Literal["lz4", "zstd", "none"]
FoldMode = Literal["auto", "minor", "major"]
PlacementMode = Literal["sticky", "off"]
PartialAggregation = Literal["auto", "on", "off"]
VerifyLevel = Literal["structure", "sample", "full"]
CheckpointMode = Literal["aligned", "unaligned", "aligned-with-timeout"]


@dataclass(frozen=True)
class Bounds:
    """Which numbers a setting may have: from `low` to `high`, both included.

    Attributes:
        above: `low` itself is not allowed.
    """

    low: float
    high: float
    above: bool = False

    def hold(self, value: float) -> bool:
        """Whether a number is inside. NaN and the infinities are not."""
        # NaN compares as neither, so it is turned away too.
        return (self.low < value if self.above else self.low <= value) and value <= self.high


# The limits and choices of all settings. The checks below and the models of `stillstate.yaml` both take them from here.
_COUNT: Final = Bounds(1, 10_000_000)
_AGE_S: Final = Bounds(0, 100 * 366 * 86_400.0, above=True)
RETENTION_BOUNDS: Final[Mapping[str, Bounds]] = MappingProxyType(
    {
        "keep_last": _COUNT,
        "keep_hourly": _COUNT,
        "keep_daily": _COUNT,
        "keep_weekly": _COUNT,
        "keep_monthly": _COUNT,
        "keep_yearly": _COUNT,
        "max_count": _COUNT,
        "keep_within_s": _AGE_S,
        "max_age_s": _AGE_S,
        "failed_ttl_s": _AGE_S,
    }
)
JOB_BOUNDS: Final[Mapping[str, Bounds]] = MappingProxyType(
    {
        "parallelism": Bounds(0, MAX_PARALLELISM),
        "heartbeat_interval_s": Bounds(0.05, 3600),
        "stall_timeout_s": Bounds(0, 31 * 86_400),
        "inline_bytes_max": Bounds(0, 64 * MIB),
        "materialize_min_bytes": Bounds(1, 1 << 50),
        "materialize_ratio": Bounds(0.01, 100),
        "materialize_max_segments": Bounds(2, 4096),
        "runs_max": Bounds(2, 64),
        "output_rows_per_batch": Bounds(1, 10_000_000),
        "checkpoint_interval_s": Bounds(0, 86_400),
        "checkpoint_batches": Bounds(1, 100_000),
        "aligned_timeout_s": Bounds(0.1, 86_400),
        "unaligned_epoch_s": Bounds(0.1, 86_400),
        "max_inflight_bytes": Bounds(MIB, 1 << 50),
        "task_bytes_max": Bounds(MIB, 64 * GIB),
        "pending_bytes_max": Bounds(0, GIB),
        "tolerable_failures": Bounds(0, 1000),
        "upload_timeout_s": Bounds(0.01, 600),
        "upload_attempts_max": Bounds(1, 10),
        "upload_in_flight_bytes_max": Bounds(MIB, 64 * GIB),
        "upload_deadline_s": Bounds(1, 3600),
        "upload_bytes_per_s": Bounds(64 * KIB, 64 * GIB),
        "materialize_interval_s": Bounds(0.1, 31 * 86_400),
        "materialize_replay_s": Bounds(0.1, 86_400),
        "materialize_takeover_s": Bounds(0, 31 * 86_400),
        "materialize_cells_max": Bounds(1, 4096),
        "materialize_cell_bytes_max": Bounds(32 * MIB, GIB),
        "local_bytes_max": Bounds(0, 1 << 60),
        "local_copies_max": Bounds(1, 1000),
        "drain_epochs_max": Bounds(1, 1_000_000),
        "retained_checkpoints": Bounds(0, 1_000_000),
    }
)
CHOICES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "backend": get_args(Backend),
        "changelog": get_args(ChangelogMode),
        "compression": get_args(Compression),
        "placement": get_args(PlacementMode),
        "partial_aggregation": get_args(PartialAggregation),
        "checkpoint_mode": get_args(CheckpointMode),
    }
)


@dataclass(frozen=True)
class RetentionPolicy:
    """What is kept. None leaves a rule out; zero and less are refused, they would mean "delete everything" by mistake.

    Attributes:
        keep_last: so many newest.
        keep_within_s: everything that is not older than this before the newest.
        keep_hourly … keep_yearly: the newest of each of so many newest hours (days, ISO weeks, …) that have any. The
            oldest of all is held too as long as a series is not full, so that history reaches back as far as it can.
        keep_tags: savepoints with one of these tags.
        max_age_s, max_count: see above.
        failed_ttl_s: how long savepoints that failed are kept, to be looked at; not counted from the newest, but from
            now.
    """

    keep_last: int | None = None
    keep_within_s: float | None = None
    keep_hourly: int | None = None
    keep_daily: int | None = None
    keep_weekly: int | None = None
    keep_monthly: int | None = None
    keep_yearly: int | None = None
    keep_tags: tuple[str, ...] = ()
    max_age_s: float | None = None
    max_count: int | None = None
    failed_ttl_s: float = FAILED_TTL_S

    def __post_init__(self) -> None:
        for name, bounds in RETENTION_BOUNDS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if bounds is _COUNT and (type(value) is not int or not bounds.hold(value)):
                raise InvalidConfiguration(
                    f"retention: {name} = {value!r} must be {bounds.low:,} … {bounds.high:,}; leave it out for none"
                )
            if not bounds.hold(value):
                raise InvalidConfiguration(
                    f"retention: {name} = {value!r} must be more than 0 seconds and at most 100 years; leave it out "
                    "for none"
                )

    @property
    def is_empty(self) -> bool:
        """Whether it decides nothing of snapshots: then nothing is planned by it."""
        return all(not getattr(self, f.name) for f in fields(self) if f.name != "failed_ttl_s")

    @property
    def goes_by_age(self) -> bool:
        """Whether the times of snapshots decide anything; their number and their tags cannot be wrong."""
        by_age = (
            "keep_within_s",
            "keep_hourly",
            "keep_daily",
            "keep_weekly",
            "keep_monthly",
            "keep_yearly",
            "max_age_s",
        )
        return any(getattr(self, name) is not None for name in by_age)

    @property
    def evicts(self) -> bool:
        """Whether `max_age_s` or `max_count` say what goes."""
        return self.max_age_s is not None or self.max_count is not None


@dataclass(frozen=True)
class JobSettings:
    """How a job runs; nothing here changes a result.

    Attributes:
        parallelism: shards of every stateful operator; 0 takes Spark's default parallelism at the first start
            and the newest snapshot's value after that.
        local_dir: folder for local copies of state; "" is a folder of the user in the system's temporary directory. It
            should outlive the driver, for quick restarts.
        scratch_dir: folder for Spark's checkpoint directory, which a run removes at its end; "" is that same folder of
            the user, wherever `local_dir` is. A run cannot go on while its disk is full; a full `local_dir` does not
            matter.
        heartbeat_interval_s: how often the driver says that it lives, and looks for control requests.
        stall_timeout_s: a run in which nothing has ended for so long, neither an epoch nor a task, logs what its
            threads do, and says so; 0: never. A quiet source does not count.
        inline_bytes_max: changes of one task up to this size ride in its acknowledgement and are packed into the
            epoch's one segment; larger ones are uploaded by the task itself.
        materialize: whether the driver folds its changelog into state tables in the background.
        materialize_min_bytes: log size below which nothing is folded for its size.
        materialize_ratio: a cell of the tables gets a new base once its deltas reach about this share of its base; the
            log is folded once it reaches half of this share of all tables.
        materialize_max_segments: fold the log at this many segments, whatever their size, so that the manifest and the
            number of reads at a restart stay bounded.
        runs_max: about how many local runs a look-up searches per shard and state: more make merges rarer, fewer make
            look-ups quicker.
        backend: what keeps a shard's state on local disk: "arrow" (sorted, memory-mapped runs) or "rocksdb" (needs the
            package rocksdict). Snapshots do not depend on it.
        output_rows_per_batch: rows of one output Arrow batch of an operator, as sinks get it; Spark gets at most 10,000
            at a time.
        changelog: "on" writes what an epoch changed; "off" uploads the new files of the backend at each checkpoint.
        compression: of what is written to the changelog.
        checkpoint_interval_s: at least so long from one checkpoint to the next; 0 makes one after each epoch. Output is
            published at checkpoints only.
        checkpoint_batches: at least so many epochs from one checkpoint to the next. A checkpoint is made when either of
            the two that are set says so.
        checkpoint_mode: when an epoch ends. "aligned": when all rows that it read are processed. "unaligned": after
            `unaligned_epoch_s`; what is not processed by then waits, in the snapshot too, and is gone on with in the
            next epoch, before anything else is read. "aligned-with-timeout": as aligned, until an epoch has taken
            `aligned_timeout_s`; then it ends as an unaligned one.
        aligned_timeout_s, unaligned_epoch_s: see there. With a checkpoint interval epochs last until the next
            checkpoint is due, if that is longer.
        max_inflight_bytes: rows that wait in one snapshot at most, all operators and shards together, by their size in
            memory. An epoch that would leave more goes on.
        task_bytes_max: input that a task holds in memory, about; what is more waits on the host's disk.
        pending_bytes_max: changes of epochs without a checkpoint that the driver holds in memory before it writes them.
        tolerable_failures: so many times in a row an epoch or checkpoint may fail because a store is away, and is run
            again in the same process, before the run ends; 0: it ends at once.
        upload_timeout_s: an upload that has taken so long (and what `upload_bytes_per_s` adds for its size) is begun
            again beside itself; the first to succeed wins.
        upload_attempts_max: uploads of one object under way at most.
        upload_in_flight_bytes_max: bytes that uploads of one executor may hold; tasks wait beyond it.
        upload_deadline_s: an upload fails, and its epoch is run again, after this, or after `upload_attempts_max`
            timeouts if those take longer.
        upload_bytes_per_s: what one upload reaches at least while the store is well.
        materialize_interval_s: fold the log at least so often, if there is anything to fold.
        materialize_replay_s: fold the log when a restart would need about so long to replay it.
        materialize_takeover_s: where the driver does not materialize, it does so all the same once a materialization
            has been due for so long and no other process has made it; 0: never.
        materialize_cells_max: into so many tables a state is cut at most, of 32 MiB or more each; manifests name them
            all. A state that is larger than `materialize_cell_bytes_max` times this has more, up to 8,192.
        materialize_cell_bytes_max: a table's bytes, about (it is split at twice as many): a fold reads it whole, and
            takes several times as much memory.
        local_recovery: whether shards may be restored from copies on the host's disk.
        local_bytes_max: what local copies of one job may take of one host's disk.
        local_copies_max: copies of one shard that a restart looks at, the newest first.
        drain_epochs_max: after the end of all input so many epochs are run at most, for timers that set timers.
        retained_checkpoints: so many newest checkpoints are kept; the driver gives older ones up, in the background,
            that nobody needs. `retention.keep_last` counts instead of it, if it is set. 0: the driver gives nothing up.
        retention: rules that keep more than these.
        placement: "sticky" keeps a shard on the executor that has its copy, as long as that lives.
        partial_aggregation: "auto" lets Spark aggregate an operator's rows before the shuffle where its newest epochs
            had many rows of few keys; "on" and "off" always and never. Only for functions that give the same result to
            the last digit.
    """

    parallelism: int = 0
    local_dir: str = ""
    heartbeat_interval_s: float = 2.0
    inline_bytes_max: int = 256 * KIB
    materialize: bool = True
    materialize_min_bytes: int = 64 * MIB
    materialize_ratio: float = 0.3
    materialize_max_segments: int = 256
    runs_max: int = 8
    output_rows_per_batch: int = 65_536
    backend: Backend = "arrow"
    changelog: ChangelogMode = "on"
    compression: Compression = "lz4"
    checkpoint_interval_s: float = 0.0
    checkpoint_batches: int = 1
    checkpoint_mode: CheckpointMode = "aligned-with-timeout"
    aligned_timeout_s: float = 10.0
    unaligned_epoch_s: float = 1.0
    max_inflight_bytes: int = GIB
    task_bytes_max: int = 128 * MIB
    pending_bytes_max: int = 16 * MIB
    tolerable_failures: int = 3
    upload_timeout_s: float = 1.0
    upload_attempts_max: int = 3
    upload_in_flight_bytes_max: int = 100 * MIB
    upload_deadline_s: float = 120.0
    upload_bytes_per_s: int = 4 * MIB
    materialize_interval_s: float = 600.0
    materialize_replay_s: float = 10.0
    materialize_takeover_s: float = 1800.0
    materialize_cells_max: int = 256
    materialize_cell_bytes_max: int = 256 * MIB
    local_recovery: bool = True
    local_bytes_max: int = 64 * GIB
    local_copies_max: int = 4
    drain_epochs_max: int = 100
    placement: PlacementMode = "sticky"
    partial_aggregation: PartialAggregation = "auto"
    retained_checkpoints: int = 100
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    scratch_dir: str = ""
    stall_timeout_s: float = 900.0

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InvalidConfiguration(
                    f"setting {name} = {getattr(self, name)!r} is not one of {', '.join(allowed)}"
                )
        for name, bounds in JOB_BOUNDS.items():
            value = getattr(self, name)
            if not bounds.hold(value):
                raise InvalidConfiguration(
                    f"setting {name} = {value!r} is outside {bounds.low} … {bounds.high}; choose a value inside"
                )
