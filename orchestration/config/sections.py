"""The sections of a job in `stillstate.yaml`: strict models with limits, and what the runtime gets of them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticCustomError

from state_runtime.base.settings import (
    JOB_BOUNDS,
    RETENTION_BOUNDS,
    Bounds,
    ChangelogMode,
    JobSettings,
    PlacementMode,
    RetentionPolicy,
)
from state_runtime.maintenance.retention.policy import DELETED_SHARE_MAX

__all__ = [
    "SECTIONS",
    "AvailableNow",
    "CheckpointSpec",
    "LauncherSpec",
    "LocalRecovery",
    "LocalRecoverySpec",
    "MaterializationSpec",
    "OnOff",
    "Placement",
    "ProcessingTime",
    "RecoverySpec",
    "RetentionSpec",
    "SparkSpec",
    "Strict",
    "Trigger",
    "UploadSpec",
    "is_cron",
    "setting",
]


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
Placement = Annotated[PlacementMode, BeforeValidator(lambda value: _on_off(value) if value is False else value)]


class CheckpointSpec(Strict):
    """When checkpoints are made and how they are written, and how old the newest one may be.

    Attributes:
        interval_s: at least so long from one checkpoint to the next; output is published at checkpoints only. 0: after
            each epoch.
        batches: at least so many epochs from one to the next. Either of the two makes one due.
        pending_bytes_max: changes of epochs without a checkpoint that the driver holds before it writes them.
        tolerable_failures: in a row, of epochs and checkpoints, while a store is away; then the run ends.
        freshness_s: age of the newest checkpoint at which Dagster's badge turns red.
    """

    heartbeat_interval_s: float = setting("heartbeat_interval_s")
    inline_bytes_max: int = setting("inline_bytes_max")
    interval_s: float = setting("checkpoint_interval_s")
    batches: int = setting("checkpoint_batches")
    pending_bytes_max: int = setting("pending_bytes_max")
    tolerable_failures: int = setting("tolerable_failures")
    freshness_s: float | None = Field(default=None, ge=60, le=31 * 86_400)


class UploadSpec(Strict):
    """How changelog objects reach the store.

    Attributes:
        timeout_s: an attempt that takes longer (and a second more per few megabytes) gets another beside it; the first
            wins.
        attempts_max: of one object, under way at once at most.
        in_flight_bytes_max: held by uploads of one executor; its tasks wait beyond it.
    """

    timeout_s: float = setting("upload_timeout_s")
    attempts_max: int = setting("upload_attempts_max")
    in_flight_bytes_max: int = setting("upload_in_flight_bytes_max")


class LocalRecoverySpec(Strict):
    """Whether shards come back from copies on their host's disk, and what those may take of it."""

    enabled: bool = JobSettings.local_recovery
    bytes_max: int = setting("local_bytes_max")


LocalRecovery = Annotated[
    LocalRecoverySpec,
    BeforeValidator(lambda value: {"enabled": value} if isinstance(value, bool) else value),
]


class MaterializationSpec(Strict):
    """Who folds the changelog into state tables, and when.

    Attributes:
        by: `driver` folds beside its epochs; `dagster` in a Spark job of its own, when a sensor finds it due and on a
            schedule; `nobody` only when a person asks for it.
        interval_s: fold at least so often, if there is anything to fold.
        min_bytes: log size below which nothing is folded for its size.
        ratio: fold everything once log and deltas exceed this share of the base.
        max_segments: fold at this many segments, whatever their size.
        replay_s: fold when a restart would need about so long to replay the log.
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


_CRON_RANGES: Final = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_CRON_PART = re.compile(r"(?:\*|(?P<low>\d{1,2})(?:-(?P<high>\d{1,2}))?)(?:/(?P<step>\d{1,2}))?")


def is_cron(line: str) -> bool:
    """Whether a line is five fields of numbers, ranges, lists and steps, each within its bounds.

    Checked here and not by Dagster, so that a bad one is an error with file and line, and the command line need not
    load Dagster.
    """
    cron_fields = line.split()
    return len(cron_fields) == len(_CRON_RANGES) and all(
        _is_cron_part(part, low, high)
        for field, (low, high) in zip(cron_fields, _CRON_RANGES)
        for part in field.split(",")
    )


def _is_cron_part(part: str, low: int, high: int) -> bool:
    match = _CRON_PART.fullmatch(part)
    if match is None or (match["step"] is not None and int(match["step"]) == 0):
        return False
    if match["low"] is None:
        return True
    first = int(match["low"])
    return low <= first <= int(match["high"] or first) <= high


class RecoverySpec(Strict):
    """When a driver counts as lost, and how often it is brought back.

    Attributes:
        heartbeat_timeout_s: a running driver whose newest heartbeat is older is silent.
        start_grace_s: the same for a driver that is still starting.
        max_attempts: recoveries in a row without a new checkpoint; after that a person must look.
        backoff_s: wait before the second attempt; doubled for each further one.
    """

    enabled: bool = True
    heartbeat_timeout_s: float = Field(default=30.0, gt=0, le=86_400)
    start_grace_s: float = Field(default=120.0, gt=0, le=86_400)
    max_attempts: int = Field(default=5, ge=1, le=50)
    backoff_s: float = Field(default=10.0, ge=0, le=3600)


class RetentionSpec(Strict):
    """Which snapshots are kept. Rules are OR-ed; see `state_runtime/maintenance/retention/policy.py` for what each
    means.

    Attributes:
        retained_checkpoints: what the driver keeps by itself; it gives older ones up that no rule below holds and
            nobody needs. With `keep_last` that counts instead. 0: the driver gives nothing up.
        keep_last … keep_tags, max_age_s, max_count: the rules, for the driver and for `stillstate retention plan`.
        failed_ttl_s: how long savepoints that failed are kept.
        deleted_share_max: `retention plan` refuses to delete a larger share of the snapshots.
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


class LauncherSpec(Strict):
    """How a driver process comes to be."""

    kind: Literal["local"] = "local"
    log_dir: str = Field(default="logs", min_length=1)
    start_timeout_s: float = Field(default=120.0, gt=0, le=3600)
    stop_timeout_s: float = Field(default=120.0, gt=0, le=86_400)


SECTIONS: Final[dict[str, type[BaseModel]]] = {
    "spark": SparkSpec,
    "checkpoint": CheckpointSpec,
    "upload": UploadSpec,
    "local_recovery": LocalRecoverySpec,
    "materialization": MaterializationSpec,
    "recovery": RecoverySpec,
    "retention": RetentionSpec,
    "launcher": LauncherSpec,
}
