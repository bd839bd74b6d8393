"""The sections of a job in `stillstate.yaml` that say when Dagster looks after it: savepoints, deletions, verification,
drills, and the limits of checks."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, Field

from stillstate.orchestration.config.schedules import Schedule
from stillstate.orchestration.config.sections import Strict

__all__ = [
    "UPKEEP_SECTIONS",
    "ChecksSpec",
    "DrillSpec",
    "GarbageSpec",
    "SavepointsSpec",
    "VerificationSpec",
]


def _timeout_s(hours: float) -> float:
    found: float = Field(default=hours * 3600, ge=60, le=31 * 86_400)
    return found


class SavepointsSpec(Strict):
    """Savepoints that Dagster makes.

    Attributes:
        schedule: when; `auto` is every night.
        tags: of those that the schedule or a run of `savepoint_<job>` makes, for rules of retention.
    """

    schedule: Schedule = "off"
    tags: list[Annotated[str, Field(min_length=1, max_length=100)]] = Field(
        default_factory=lambda: ["scheduled"], max_length=20
    )
    timeout_s: float = _timeout_s(6)


class GarbageSpec(Strict):
    """Collection of what nothing needs.

    Attributes:
        schedule: `auto` is every six hours.
        min_age_s: nothing younger is touched.
        deleted_share_max: a plan that deletes a larger share of the objects waits for a person. Small plans do not.
    """

    schedule: Schedule = "auto"
    min_age_s: float = Field(default=86_400.0, ge=3600, le=366 * 86_400)
    deleted_share_max: float = Field(default=0.9, gt=0, le=1)
    timeout_s: float = _timeout_s(6)


class VerificationSpec(Strict):
    """Reading again what is stored.

    Attributes:
        sample: when a share of the files is read; `auto` is every night.
        sample_share: of the files, another part each night.
        full: when all of them are read and decoded; `auto` is once a week.
    """

    sample: Schedule = "auto"
    sample_share: float = Field(default=0.1, gt=0, le=1)
    full: Schedule = "auto"
    timeout_s: float = _timeout_s(12)


class DrillSpec(Strict):
    """Restoring the newest snapshot into a scratch folder, and comparing.

    Attributes:
        schedule: `auto` is once a week; it reads all of the state twice.
    """

    schedule: Schedule = "off"
    timeout_s: float = _timeout_s(12)


class ChecksSpec(Strict):
    """Limits of Dagster's checks; one without a limit is not there.

    Attributes:
        replay_s: `replay_time_bounded`: what a restart would need to replay the log.
        late_checkpoints: `rows_on_time`: how many checkpoints in a row may drop all of their rows as late.
        state_growth: `state_growth`: how many times the rows of a day before the state may have.
        savepoint_age_s: `savepoint_recent`: age of the newest savepoint that is complete.
        backlog_s: `backlog`: how far the watermark is behind the clock.
    """

    replay_s: float | None = Field(default=60.0, gt=0, le=86_400)
    late_checkpoints: int | None = Field(default=3, ge=1, le=20)
    state_growth: float | None = Field(default=None, gt=1, le=1_000_000)
    savepoint_age_s: float | None = Field(default=None, ge=60, le=10 * 366 * 86_400)
    backlog_s: float | None = Field(default=None, gt=0, le=366 * 86_400)


UPKEEP_SECTIONS: Final[dict[str, type[BaseModel]]] = {
    "savepoints": SavepointsSpec,
    "garbage": GarbageSpec,
    "verification": VerificationSpec,
    "drill": DrillSpec,
    "checks": ChecksSpec,
}
