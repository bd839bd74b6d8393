"""Run tags: Stillstate's runs find each other by them, and `dagster.yaml` limits runs by them; pure."""

from typing import Final

from stillstate.assets.mount import Mount
from stillstate.assets.specs import JOB_TAG
from stillstate.orchestration.recovery.plan import GIVE_UP

__all__ = [
    "ACTION_TAG",
    "AFTER_TAG",
    "ATTEMPT_TAG",
    "DAMAGE_TAG",
    "DOWN_TAG",
    "EXIT_TAG",
    "JOB_TAG",
    "KIND_TAG",
    "LOST_TAG",
    "MATERIALIZE_TAG",
    "PROGRESS_TAG",
    "RESTORED_TAG",
    "RESUMES_TAG",
    "SAVEPOINT_TAG",
    "SLOTS_TAG",
    "STREAK_TAG",
    "STREAM_TAGS",
    "TARGET_TAG",
    "TERM_TAG",
    "UPKEEP_TAG",
    "give_up_run_key",
    "give_up_run_tags",
    "migration_run_key",
    "migration_run_tags",
    "prune_tag",
    "recovery_run_key",
    "recovery_run_tags",
    "resume_run_key",
    "resume_run_tags",
]

MATERIALIZE_TAG: Final = "stillstate/materialize"
"""Not JOB_TAG, of which one run goes at a time: a long fold must not delay the recovery of a lost driver."""
UPKEEP_TAG: Final = "stillstate/upkeep"
"""One retention, collection, verification or drill of a job at a time; parallel to its recovery, like the one above."""
SAVEPOINT_TAG: Final = "stillstate/savepoint"
"""One savepoint of a job at a time; it does not wait for a verification that reads for hours."""
STREAM_TAGS: Final = (JOB_TAG, MATERIALIZE_TAG, UPKEEP_TAG, SAVEPOINT_TAG)
"""Each of Stillstate's runs about one job has one of them."""
SLOTS_TAG: Final = "stillstate/slots"
"""A few of all jobs at a time, so that a recovery always finds a slot."""
AFTER_TAG: Final = "stillstate/after-record"
ACTION_TAG: Final = "stillstate/action"
TERM_TAG: Final = "stillstate/term"
ATTEMPT_TAG: Final = "stillstate/attempt"
PROGRESS_TAG: Final = "stillstate/progress"
STREAK_TAG: Final = "stillstate/streak"
TARGET_TAG: Final = "stillstate/target"
"""On a migration that a sensor requested: the target settings."""
RESUMES_TAG: Final = "stillstate/resumes"
"""On a run that continues an interrupted migration: which one."""
EXIT_TAG: Final = "stillstate/exit-code"
"""On a failed recovery run: the exit code of the driver that it started."""

KIND_TAG: Final = "stillstate/error-kind"
"""On a recovery run: the kind of the error that ended the driver."""
DAMAGE_TAG: Final = "stillstate/damage"
"""On a recovery run that found the newest snapshot damaged and left the choice to a person: the damage."""
LOST_TAG: Final = "stillstate/lost"
"""On a recovery run that brought a driver back: how the previous driver ended."""
RESTORED_TAG: Final = "stillstate/restored-from"
"""The same: the snapshot that it continued from."""
DOWN_TAG: Final = "stillstate/down"
"""The same: from the last heartbeat to the first checkpoint."""


def recovery_run_key(job: str, term: int, attempt: int) -> str:
    """One failure, one attempt, one run: Dagster never starts a second run for a key."""
    return f"{job}:{term}:{attempt}"


def give_up_run_key(job: str, term: int) -> str:
    """Return the run key with which the recovery of one failure is abandoned, once."""
    return f"{job}:{term}:gave-up"


def give_up_run_tags(job: str, term: int) -> dict[str, str]:
    """Return tags that keep this run from counting as an attempt in a later tick."""
    return {JOB_TAG: job, ACTION_TAG: GIVE_UP, TERM_TAG: str(term)}


def recovery_run_tags(job: str, term: int, attempt: int, streak: int, progress: int, kind: str = "") -> dict[str, str]:
    """Return the facts about this run that a later tick needs."""
    return {
        **({KIND_TAG: kind} if kind else {}),
        JOB_TAG: job,
        ACTION_TAG: "recover",
        TERM_TAG: str(term),
        ATTEMPT_TAG: str(attempt),
        STREAK_TAG: str(streak),
        PROGRESS_TAG: str(progress),
    }


def migration_run_key(job: str, term: int, target: str) -> str:
    """Return the run key of one migration for one difference of one run of the driver."""
    return f"{job}:{term}:migrate:{target}"


def migration_run_tags(job: str, term: int, target: str) -> dict[str, str]:
    """Return the facts about this run that a later tick needs."""
    return {JOB_TAG: job, ACTION_TAG: "migrate", TERM_TAG: str(term), TARGET_TAG: target}


def prune_tag(mount: Mount) -> str:
    """Return the tag that replaces a stream's name on runs that prune Dagster's storage: they end and are deleted like
    those of streams."""
    return mount.name("stillstate_prune")


def resume_run_key(job: str, uid: str, attempt: int) -> str:
    """Return the run key of one attempt to continue a migration."""
    return f"{job}:{uid}:resume:{attempt}"


def resume_run_tags(job: str, uid: str, attempt: int) -> dict[str, str]:
    """Return the tags of such a run."""
    return {JOB_TAG: job, ACTION_TAG: "migrate", RESUMES_TAG: uid, ATTEMPT_TAG: str(attempt)}
