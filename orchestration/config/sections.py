"""The sections of `stillstate.yaml`: the runtime's settings with Dagster's additions, and Dagster's own sections. The
text below a field is its description in docs/settings.md and in the JSON schema."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticCustomError

from state_runtime.base.settings import (
    CheckpointSettings,
    MaterializationSettings,
    RecoverySettings,
    RetentionSettings,
    SettingsGroup,
)
from state_runtime.maintenance.retention.policy import DELETED_SHARE_MAX
from stillstate.orchestration.config.schedules import Schedule, is_cron
from stillstate.orchestration.config.secrets import SecretMapping

__all__ = [
    "PER_JOB_MAX",
    "AvailableNow",
    "CheckpointSpec",
    "ConfValue",
    "DagsterSpec",
    "MaterializationSpec",
    "MigrationSpec",
    "ObservationSpec",
    "ProcessingTime",
    "RecoverySpec",
    "RetentionSpec",
    "RunTimeoutS",
    "SparkSpec",
    "Trigger",
]


PER_JOB_MAX: Final = 40
"""Largest number of streams that have separate Dagster jobs by default: these load in about 4 s of processor time."""

RunTimeoutS = Annotated[float, Field(ge=60, le=31 * 86_400)]
"""When Dagster ends a run."""


def _conf_text(value: object) -> object:
    """Return the text of a value: Spark's configuration is text, but in YAML people write `true` and `4`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


ConfValue = Annotated[str, BeforeValidator(_conf_text, json_schema_input_type=str | bool | int | float)]


class SparkSpec(SettingsGroup):
    """A Spark session: the driver's, or that of `materialization.spark`."""

    master: str = Field(default="local[*]", min_length=1)
    """The master, as `spark-submit` takes it."""
    conf: dict[str, ConfValue] = Field(default={})
    """Spark settings of the session."""


class ProcessingTime(SettingsGroup):
    """Look for new input at this interval."""

    processing_time_s: float = Field(gt=0, le=86_400)
    """Seconds between two looks."""


class AvailableNow(SettingsGroup):
    """Process the available input, then finish."""

    available_now: Literal[True]
    """Only `true`."""


def _trigger_kind(value: object) -> str | None:
    if isinstance(value, ProcessingTime) or (isinstance(value, dict) and list(value) == ["processing_time_s"]):
        return "[processing_time]"
    if isinstance(value, AvailableNow) or (isinstance(value, dict) and list(value) == ["available_now"]):
        return "[available_now]"
    return None


# The kind is chosen explicitly: a plain union would report the errors of both members and bury the reason.
Trigger = Annotated[
    Annotated[ProcessingTime, Tag("[processing_time]")] | Annotated[AvailableNow, Tag("[available_now]")],
    Discriminator(
        _trigger_kind,
        custom_error_type="trigger",
        custom_error_message="must be `{processing_time_s: <seconds>}` or `{available_now: true}`; "
        "leave it out to run as fast as possible",
    ),
]


class CheckpointSpec(CheckpointSettings):
    """When checkpoints are made and how they are written, and how old the newest one may be."""

    freshness_s: float | None = Field(default=None, ge=60, le=31 * 86_400)
    """Age of the newest checkpoint at which Dagster's badge turns red; at least twice `interval_s`."""


class MaterializationSpec(MaterializationSettings):
    """Which process folds the changelog into state tables, and when."""

    schedule: str = ""
    """Cron line in UTC, with `by: dagster`, for runs on top of those that the sensor starts."""
    spark: SparkSpec | None = None
    """The session of a fold outside the driver; absent: the job's own."""
    timeout_s: RunTimeoutS = 6 * 3600.0
    """Dagster ends a run that takes longer."""

    @field_validator("schedule")
    @classmethod
    def _cron(cls, value: str) -> str:
        if value and not is_cron(value):
            raise PydanticCustomError(
                "cron", "must be a cron line of five fields, for example `0 3 * * *` for every night at 3:00 UTC"
            )
        return value


class RecoverySpec(RecoverySettings):
    """When a driver counts as lost, and how often it is started again."""

    enabled: bool = True
    """Whether Dagster starts a lost driver again."""
    heartbeat_timeout_s: float = Field(default=30.0, gt=0, le=86_400)
    """A running driver whose newest heartbeat is older is silent; at least twice `checkpoint.heartbeat_interval_s`."""
    start_grace_s: float = Field(default=120.0, gt=0, le=86_400)
    """The same limit for a driver that is still starting."""
    max_attempts: int = Field(default=5, ge=1, le=50)
    """Recoveries in a row without a new checkpoint; after them a person must act."""
    backoff_s: float = Field(default=10.0, ge=0, le=3600)
    """Wait before the second attempt; it doubles with each further one."""
    restart_stalled: bool = True
    """Whether a stalled driver is ended and started again. `false`: it is only shown."""
    first_checkpoint_s: float = Field(default=600.0, gt=0, le=86_400)
    """How long a recovery run waits for the driver's first checkpoint."""
    fallback: Literal["never", "same_output", "older"] = "never"
    """How a recovery handles a damaged newest snapshot. `never`: a person decides. `same_output`: it goes back to an
    older one if no output was published since. `older`: it goes back in any case."""


class RetentionSpec(RetentionSettings):
    """Which snapshots are kept: those that any rule keeps, and the newest ones that the driver keeps by itself. A rule
    that is left out keeps nothing."""

    deleted_share_max: float = Field(default=DELETED_SHARE_MAX, gt=0, le=1)
    """`stillstate retention plan` refuses to delete a larger share of the snapshots. In Dagster the plan is shown, and
    its check stops it."""
    schedule: Schedule = "off"
    """When Dagster runs `retain_<job>`: `off`, `auto` (every night), or a cron line in UTC."""
    timeout_s: RunTimeoutS = 6 * 3600.0
    """Dagster ends a run that takes longer."""


class MigrationSpec(SettingsGroup, arbitrary_types_allowed=True):
    """How Dagster handles a running job whose settings differ from those of the file."""

    automatic: bool = False
    """Whether Dagster migrates the job when the file's `parallelism` or `backend` differs from the running job's: once
    for each difference. After a migration was taken back, Dagster does not try again until the job's part of the file
    changes. `false`: a check warns, and a person migrates the job."""
    to_store: str = ""
    """Where `stillstate migrate JOB --move` moves the job to. The job lives there from then on; `store` remains the
    place where it was before, until the file is edited."""
    to_storage_options: SecretMapping | None = Field(default=None, repr=False)
    """Storage options of `to_store`; absent: the job's."""


class ObservationSpec(SettingsGroup):
    """How Dagster's sensors look at all jobs of the file, and what they publish."""

    timeout_s: float = Field(default=5.0, ge=0.1, le=30)
    """Limit for the look at one job; a store that takes longer counts as unavailable. Raise it for a distant store that
    is slow and healthy."""
    tick_budget_s: float = Field(default=20.0, ge=1, le=45)
    """Limit for all looks of one tick; jobs that it did not reach come first in the next. At least twice `timeout_s`;
    Dagster ends a tick after 60 s."""
    interval_s: float = Field(default=1800.0, ge=0, le=86_400)
    """Time from one materialization of `<job>/checkpoints` to the next, which covers all events in between. 0: at every
    tick that finds a new checkpoint. Lower it for more points in the plots: each takes ten to twenty kilobytes in
    Dagster's storage. The Prometheus exporter has the numbers at any pace."""


class DagsterSpec(SettingsGroup):
    """How the jobs of the file become Dagster jobs."""

    jobs: Literal["auto", "per_job", "shared"] = "auto"
    """`per_job`: Dagster has `start_<job>`, `retain_<job>` … for each of them. `shared`: it has one `start`, one
    `retain` …, each of which takes the stream as its configuration. `auto` is `per_job` up to 40 jobs: with more,
    Dagster takes long to load them."""
    keep_days: float = Field(default=30.0, ge=0, le=3650)
    """Runs and events of streams in Dagster's storage are deleted when they are older (`stillstate_prune`, each night).
    The newest hundred events without a run of each asset and check stay, and so do the newest hundred runs of each
    stream and kind with what they published. 0: never."""

    def is_shared(self, jobs: int) -> bool:
        """Whether this many jobs share Dagster jobs."""
        return self.jobs == "shared" or (self.jobs == "auto" and jobs > PER_JOB_MAX)
