"""The sections of a job in `stillstate.yaml`: strict models with limits, and what the runtime gets of them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticCustomError

from state_runtime.base.settings import (
    JOB_BOUNDS,
    RETENTION_BOUNDS,
    Bounds,
    ChangelogMode,
    CheckpointMode,
    JobSettings,
    PartialAggregation,
    PlacementMode,
    RetentionPolicy,
)
from state_runtime.maintenance.retention.policy import DELETED_SHARE_MAX
from stillstate.orchestration.config.schedules import Schedule, is_cron
from stillstate.orchestration.config.secrets import SECRET_MODEL, SecretMapping

__all__ = [
    "PER_JOB_MAX",
    "SECTIONS",
    "AvailableNow",
    "CheckpointSpec",
    "ConfValue",
    "DagsterSpec",
    "LocalRecovery",
    "LocalRecoverySpec",
    "MaterializationSpec",
    "MigrationSpec",
    "ObservationSpec",
    "OnOff",
    "Placement",
    "ProcessingTime",
    "RecoverySpec",
    "RetentionSpec",
    "SparkSpec",
    "Strict",
    "Trigger",
    "UploadSpec",
    "setting",
]


PER_JOB_MAX: Final = 40
"""Streams that have Dagster jobs of their own unless the file says otherwise: they load in about four seconds of
processor time."""


def setting(name: str) -> Any:
    """A field that has the default and the limits of a setting of the runtime, which states them."""
    return _bounded(getattr(JobSettings, name), JOB_BOUNDS[name])


def _rule(name: str) -> Any:
    """The same of a rule of retention."""
    return _bounded(getattr(RetentionPolicy, name), RETENTION_BOUNDS[name])


def _bounded(default: object, bounds: Bounds) -> Any:
    if bounds.above:
        return Field(default=default, gt=bounds.low, le=bounds.high)
    return Field(default=default, ge=bounds.low, le=bounds.high)


class Strict(BaseModel):
    """Base of every model of the file."""

    # `hide_input_in_errors` matters: pydantic would otherwise print what was in a secret's place.
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False)


def _conf_text(value: object) -> object:
    """Spark's configuration is text; YAML's `true` and `4` are what people write."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


ConfValue = Annotated[str, BeforeValidator(_conf_text)]


class SparkSpec(Strict):
    """The Spark session of the driver."""

    master: str = Field(default="local[*]", min_length=1)
    conf: dict[str, ConfValue] = Field(default_factory=dict)


class ProcessingTime(Strict):
    """Look for new input at this interval."""

    processing_time_s: float = Field(gt=0, le=86_400)


class AvailableNow(Strict):
    """Process what is there, then finish."""

    available_now: Literal[True]


def _trigger_kind(value: object) -> str | None:
    if isinstance(value, ProcessingTime) or (isinstance(value, dict) and list(value) == ["processing_time_s"]):
        return "[processing_time]"
    if isinstance(value, AvailableNow) or (isinstance(value, dict) and list(value) == ["available_now"]):
        return "[available_now]"
    return None


# The kind is decided by hand: a plain union would report the errors of both members and bury the reason.
Trigger = Annotated[
    Annotated[ProcessingTime, Tag("[processing_time]")] | Annotated[AvailableNow, Tag("[available_now]")],
    Discriminator(
        _trigger_kind,
        custom_error_type="trigger",
        custom_error_message="must be `{processing_time_s: <seconds>}` or `{available_now: true}`; "
        "leave it out to run as fast as possible",
    ),
]


def _on_off(value: object) -> object:
    """`on` and `off` are words in YAML 1.2 and booleans in 1.1; people and tools write either."""
    return ("on" if value else "off") if isinstance(value, bool) else value


OnOff = Annotated[ChangelogMode, BeforeValidator(_on_off)]
AutoOnOff = Annotated[PartialAggregation, BeforeValidator(_on_off)]
Placement = Annotated[PlacementMode, BeforeValidator(lambda value: _on_off(value) if value is False else value)]


class CheckpointSpec(Strict):
    """When checkpoints are made and how they are written, and how old the newest one may be.

    Attributes:
        interval_s: at least so long from one checkpoint to the next; output is published at checkpoints only. 0: after
            each epoch.
        batches: at least so many epochs from one to the next. Either of the two makes one due.
        mode: `aligned`, `unaligned` or `aligned-with-timeout`: when an epoch ends that has rows left.
        aligned_timeout_s: with `aligned-with-timeout` an epoch waits so long for its rows.
        unaligned_epoch_s: an unaligned epoch takes so long.
        max_inflight_bytes: rows that wait in one snapshot at most.
        pending_bytes_max: changes of epochs without a checkpoint that the driver holds before it writes them.
        tolerable_failures: in a row, of epochs and checkpoints, while a store is away; then the run ends.
        drain_epochs_max: epochs that draining runs at most.
        freshness_s: age of the newest checkpoint at which Dagster's badge turns red.
    """

    heartbeat_interval_s: float = setting("heartbeat_interval_s")
    inline_bytes_max: int = setting("inline_bytes_max")
    interval_s: float = setting("checkpoint_interval_s")
    batches: int = setting("checkpoint_batches")
    mode: CheckpointMode = JobSettings.checkpoint_mode
    aligned_timeout_s: float = setting("aligned_timeout_s")
    unaligned_epoch_s: float = setting("unaligned_epoch_s")
    max_inflight_bytes: int = setting("max_inflight_bytes")
    pending_bytes_max: int = setting("pending_bytes_max")
    tolerable_failures: int = setting("tolerable_failures")
    drain_epochs_max: int = setting("drain_epochs_max")
    freshness_s: float | None = Field(default=None, ge=60, le=31 * 86_400)


class UploadSpec(Strict):
    """How changelog objects reach the store.

    Attributes:
        timeout_s: an attempt that takes longer (and what `bytes_per_s` adds for its size) gets another beside it; the
            first wins.
        attempts_max: of one object, under way at once at most.
        in_flight_bytes_max: held by uploads of one executor; its tasks wait beyond it.
        deadline_s: of one object, all attempts together; never less than `attempts_max` timeouts.
        bytes_per_s: what one upload reaches at least while the store is well.
    """

    timeout_s: float = setting("upload_timeout_s")
    attempts_max: int = setting("upload_attempts_max")
    in_flight_bytes_max: int = setting("upload_in_flight_bytes_max")
    deadline_s: float = setting("upload_deadline_s")
    bytes_per_s: int = setting("upload_bytes_per_s")


class LocalRecoverySpec(Strict):
    """Whether shards come back from copies on their host's disk, and what those may take of it.

    Attributes:
        copies_max: of one shard, that a restart looks at.
    """

    enabled: bool = JobSettings.local_recovery
    bytes_max: int = setting("local_bytes_max")
    copies_max: int = setting("local_copies_max")


LocalRecovery = Annotated[
    LocalRecoverySpec,
    BeforeValidator(lambda value: {"enabled": value} if isinstance(value, bool) else value),
]


class MaterializationSpec(Strict):
    """Who folds the changelog into state tables, and when.

    Attributes:
        by: `driver` folds beside its epochs; `dagster` in a Spark job of its own, when a sensor finds it due and on a
            schedule; `nobody` only when a person asks for it.
        takeover_s: with `by: dagster`: once a materialization has been due for so long and Dagster has not made it,
            the driver makes it, until Dagster does again. 0: never.
        interval_s: fold at least so often, if there is anything to fold.
        min_bytes: log size below which nothing is folded for its size.
        ratio: fold everything once log and deltas exceed this share of the base.
        max_segments: fold at this many segments, whatever their size.
        replay_s: fold when a restart would need about so long to replay the log.
        cells_max: into so many tables a state is cut at most, as long as none exceeds `cell_bytes_max`.
        cell_bytes_max: of a table, about; a fold holds several times as much in memory.
        schedule: cron line for runs by Dagster on top of what the sensor starts; "" is none.
        spark: the session of a fold that is not the driver's; absent: the job's own.
        timeout_s: Dagster ends a run that takes longer.
    """

    by: Literal["driver", "dagster", "nobody"] = "driver"
    interval_s: float = setting("materialize_interval_s")
    min_bytes: int = setting("materialize_min_bytes")
    ratio: float = setting("materialize_ratio")
    max_segments: int = setting("materialize_max_segments")
    replay_s: float = setting("materialize_replay_s")
    takeover_s: float = setting("materialize_takeover_s")
    cells_max: int = setting("materialize_cells_max")
    cell_bytes_max: int = setting("materialize_cell_bytes_max")
    schedule: str = ""
    spark: SparkSpec | None = None
    timeout_s: float = Field(default=6 * 3600, ge=60, le=31 * 86_400)

    @field_validator("schedule")
    @classmethod
    def _cron(cls, value: str) -> str:
        if value and not is_cron(value):
            raise PydanticCustomError(
                "cron", "must be a cron line of five fields, for example `0 3 * * *` for every night at 3:00 UTC"
            )
        return value


class RecoverySpec(Strict):
    """When a driver counts as lost, and how often it is brought back.

    Attributes:
        heartbeat_timeout_s: a running driver whose newest heartbeat is older is silent.
        start_grace_s: the same for a driver that is still starting.
        max_attempts: recoveries in a row without a new checkpoint; after that a person must look.
        backoff_s: wait before the second attempt; doubled for each further one.
        stall_timeout_s: a driver in which nothing has ended for so long, neither an epoch nor a task, although its
            source is not quiet, is stalled; 0: never.
        restart_stalled: whether a stalled driver is ended and brought back, or only shown.
        first_checkpoint_s: a recovery run waits so long for the driver's first checkpoint.
        fallback: what becomes of a damaged newest snapshot: `never` leaves the choice to a person; `same_output` goes
            back if nothing was published since; `older` goes back in any case.
    """

    enabled: bool = True
    heartbeat_timeout_s: float = Field(default=30.0, gt=0, le=86_400)
    start_grace_s: float = Field(default=120.0, gt=0, le=86_400)
    max_attempts: int = Field(default=5, ge=1, le=50)
    backoff_s: float = Field(default=10.0, ge=0, le=3600)
    stall_timeout_s: float = setting("stall_timeout_s")
    restart_stalled: bool = True
    first_checkpoint_s: float = Field(default=600.0, gt=0, le=86_400)
    fallback: Literal["never", "same_output", "older"] = "never"


class RetentionSpec(Strict):
    """Which snapshots are kept. Rules are OR-ed; see `state_runtime/maintenance/retention/policy.py` for what each
    means.

    Attributes:
        retained_checkpoints: what the driver keeps by itself; it gives older ones up that no rule below holds and
            nobody needs. With `keep_last` that counts instead. 0: the driver gives nothing up.
        keep_last … keep_tags, max_age_s, max_count: the rules, for the driver and for `stillstate retention plan`.
        failed_ttl_s: how long savepoints that failed are kept.
        deleted_share_max: `retention plan` refuses to delete a larger share of the snapshots.
        schedule: when Dagster runs `retain_<job>`; `auto` is every night.
        timeout_s: Dagster ends a run that takes longer.
    """

    retained_checkpoints: int = setting("retained_checkpoints")
    keep_last: int | None = _rule("keep_last")
    keep_within_s: float | None = _rule("keep_within_s")
    keep_hourly: int | None = _rule("keep_hourly")
    keep_daily: int | None = _rule("keep_daily")
    keep_weekly: int | None = _rule("keep_weekly")
    keep_monthly: int | None = _rule("keep_monthly")
    keep_yearly: int | None = _rule("keep_yearly")
    keep_tags: list[str] = Field(default_factory=list, max_length=100)
    max_age_s: float | None = _rule("max_age_s")
    max_count: int | None = _rule("max_count")
    failed_ttl_s: float = _rule("failed_ttl_s")
    deleted_share_max: float = Field(default=DELETED_SHARE_MAX, gt=0, le=1)
    schedule: Schedule = "off"
    timeout_s: float = Field(default=6 * 3600, ge=60, le=31 * 86_400)


class MigrationSpec(Strict):
    """What becomes of a running job when the file says something else than it runs with.

    Attributes:
        automatic: a sensor of Dagster's migrates it, once for each difference; else a check warns, and a person does.
        to_store: where `stillstate migrate JOB --move` moves the job to. The job lives there from then on; `store` is
            still where it was before, until somebody edits both.
        to_storage_options: of that store; absent: the job's.
    """

    model_config = SECRET_MODEL

    automatic: bool = False
    to_store: str = ""
    to_storage_options: SecretMapping | None = Field(default=None, repr=False)


class ObservationSpec(Strict):
    """How Dagster's sensors look at all jobs of the file, and what they publish; beside `jobs`, not below one.

    Attributes:
        timeout_s: for the look at one job; longer, and its store counts as away.
        tick_budget_s: for the looks of one tick; jobs that were not reached come first in the next. Dagster ends a
            tick after 60 s.
        interval_s: one materialization of `<job>/checkpoints` for so long, with what happened meanwhile; 0: at every
            tick that finds a new checkpoint. Each is about ten kilobytes in Dagster's storage.
    """

    timeout_s: float = Field(default=5.0, ge=0.1, le=30)
    tick_budget_s: float = Field(default=20.0, ge=1, le=45)
    interval_s: float = Field(default=1800.0, ge=0, le=86_400)


class DagsterSpec(Strict):
    """How the jobs of the file become jobs of Dagster; beside `jobs`.

    Attributes:
        jobs: `per_job` has `start_<job>`, `retain_<job>` … for each of them; `shared` has one `start`, one `retain` …
            which are told the stream. `auto` is `per_job` up to `PER_JOB_MAX` jobs: beyond, Dagster needs long to load
            them.
        keep_days: runs and events of our streams in Dagster's storage are deleted when they are older, but for the
            newest of each asset, check and stream; 0: never.
    """

    jobs: Literal["auto", "per_job", "shared"] = "auto"
    keep_days: float = Field(default=30.0, ge=0, le=3650)

    def is_shared(self, jobs: int) -> bool:
        """What is meant, for so many jobs."""
        return self.jobs == "shared" or (self.jobs == "auto" and jobs > PER_JOB_MAX)


SECTIONS: Final[dict[str, type[BaseModel]]] = {
    "spark": SparkSpec,
    "checkpoint": CheckpointSpec,
    "upload": UploadSpec,
    "local_recovery": LocalRecoverySpec,
    "materialization": MaterializationSpec,
    "recovery": RecoverySpec,
    "retention": RetentionSpec,
    "migration": MigrationSpec,
}
