"""The sections of a job in `stillstate.yaml` that schedule its upkeep by Dagster: savepoints, deletions, output,
verification, drills, and the limits of checks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from state_runtime.base.settings import SettingsGroup
from stillstate.orchestration.config.schedules import Schedule
from stillstate.orchestration.config.sections import RunTimeoutS

__all__ = ["ChecksSpec", "DrillSpec", "GarbageSpec", "OutputSpec", "SavepointsSpec", "VerificationSpec"]


class SavepointsSpec(SettingsGroup):
    """Savepoints that Dagster makes."""

    schedule: Schedule = "off"
    """When Dagster runs `savepoint_<job>`: `off`, `auto` (every night), or a cron line in UTC."""
    tags: list[Annotated[str, Field(min_length=1, max_length=100)]] = Field(default=["scheduled"], max_length=20)
    """Tags of savepoints that Dagster makes, for rules of retention."""
    timeout_s: RunTimeoutS = 6 * 3600.0
    """Dagster ends a run that takes longer."""


class GarbageSpec(SettingsGroup):
    """Collection of objects that no snapshot needs."""

    schedule: Schedule = "auto"
    """When Dagster runs `collect_<job>`: `off`, `auto` (every six hours, at a different time for each job), or a cron
    line in UTC."""
    min_age_s: float = Field(default=86_400.0, ge=3600, le=366 * 86_400)
    """Younger objects are not deleted, by Dagster and by `stillstate gc plan`."""
    deleted_share_max: float = Field(default=0.9, gt=0, le=1)
    """A plan that deletes a larger share of the objects, and more than a thousand, is stopped by its check."""
    timeout_s: RunTimeoutS = 6 * 3600.0
    """Dagster ends a run that takes longer."""


class OutputSpec(SettingsGroup):
    """Upkeep of what the job's sinks write: few large files, and old versions of tables go."""

    schedule: Schedule = "off"
    """When Dagster runs `compact_output_<job>`: `off`, `auto` (every night), or a cron line in UTC."""
    target_mib: int = Field(default=128, ge=1, le=4096)
    """Size of a new file."""
    min_age_s: float = Field(default=3600.0, ge=60, le=366 * 86_400)
    """Parquet: epochs that were published later are left alone."""
    history_s: float = Field(default=5 * 86_400.0, ge=3600, le=10 * 366 * 86_400)
    """Iceberg: snapshots that are older expire. A Delta table says itself how long it keeps files
    (`delta.deletedFileRetentionDuration`)."""
    timeout_s: RunTimeoutS = 6 * 3600.0
    """Dagster ends a run that takes longer."""


class VerificationSpec(SettingsGroup):
    """Reading the stored data again."""

    sample: Schedule = "auto"
    """When Dagster reads a share of the files: `off`, `auto` (every night), or a cron line in UTC."""
    sample_share: float = Field(default=0.1, gt=0, le=1)
    """Share of the files, another part each time."""
    full: Schedule = "auto"
    """When Dagster reads and decodes all of them: `off`, `auto` (once a week), or a cron line in UTC. Take `off` where
    each byte that is read costs money."""
    timeout_s: RunTimeoutS = 12 * 3600.0
    """Dagster ends a run that takes longer."""


class DrillSpec(SettingsGroup):
    """Restoring the newest snapshot into a scratch folder, and comparing."""

    schedule: Schedule = "off"
    """When Dagster runs the drill: `off`, `auto` (once a week), or a cron line in UTC. It reads all of the state
    twice."""
    timeout_s: RunTimeoutS = 12 * 3600.0
    """Dagster ends a run that takes longer."""


class ChecksSpec(SettingsGroup):
    """Limits of Dagster's checks; `null` removes a check."""

    replay_s: float | None = Field(default=60.0, gt=0, le=86_400)
    """Limit of `replay_time_bounded`: time that a restart would take to replay the log."""
    late_checkpoints: int | None = Field(default=3, ge=1, le=20)
    """Limit of `rows_on_time`: how many checkpoints with input in a row may drop as many rows as late as came in."""
    state_growth: float | None = Field(default=None, gt=1, le=1_000_000)
    """Limit of `state_growth`: how many times the rows of a day before the state may have."""
    savepoint_age_s: float | None = Field(default=None, ge=60, le=10 * 366 * 86_400)
    """Limit of `savepoint_recent`: age of the newest savepoint that is complete."""
    backlog_s: float | None = Field(default=None, gt=0, le=366 * 86_400)
    """Limit of `backlog`: how far the watermark is behind the clock, its delay included, and how long the oldest row in
    flight has waited. It also warns when each of the last four checkpoints has more of them."""
    source_lag_s: float | None = Field(default=600.0, gt=0, le=366 * 86_400)
    """Limit of `source_lag`, and at least two triggers: age of the oldest record that a job has not read, as long as it
    does not gain on it. A warning; of sources that can be asked: `sources.kafka`, `sources.delta`, folders."""
    retention_margin_s: float | None = Field(default=86_400.0, gt=0, le=366 * 86_400)
    """Limit of `retention_margin`: the time until a source removes the first record that a job has not read, at most
    half of what it keeps records for. Below a quarter of it the check fails, above it warns."""
