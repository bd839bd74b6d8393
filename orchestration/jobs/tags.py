"""Run tags: how our runs find each other, and what `dagster.yaml` limits by; pure."""

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
"""Not JOB_TAG, of which one run goes at a time: a long fold must not keep a lost driver from being recovered."""
UPKEEP_TAG: Final = "stillstate/upkeep"
"""One retention, collection, verification or drill of a job at a time; beside its recovery, like the one above."""
SAVEPOINT_TAG: Final = "stillstate/savepoint"
"""One savepoint of a job at a time; not behind a verification that reads for hours."""
STREAM_TAGS: Final = (JOB_TAG, MATERIALIZE_TAG, UPKEEP_TAG, SAVEPOINT_TAG)
"""Each run of ours about one job has one of them."""
SLOTS_TAG: Final = "stillstate/slots"
"""A few of all jobs at a time, so that a recovery always finds a slot."""
AFTER_TAG: Final = "stillstate/after-record"
ACTION_TAG: Final = "stillstate/action"
TERM_TAG: Final = "stillstate/term"
ATTEMPT_TAG: Final = "stillstate/attempt"
PROGRESS_TAG: Final = "stillstate/progress"
STREAK_TAG: Final = "stillstate/streak"
TARGET_TAG: Final = "stillstate/target"
"""Of a migration that a sensor asked for: what it is to bring."""
RESUMES_TAG: Final = "stillstate/resumes"
"""Of a run that goes on with a migration that was cut: which."""
EXIT_TAG: Final = "stillstate/exit-code"
"""Put on a recovery run that failed: the exit code of the driver that it started."""

KIND_TAG: Final = "stillstate/error-kind"
"""Of a recovery run: the kind of the error that ended the driver."""
DAMAGE_TAG: Final = "stillstate/damage"
"""Put on a recovery run that found the newest snapshot damaged and left the choice to a person: what it found."""
LOST_TAG: Final = "stillstate/lost"
"""Put on a recovery run that brought a driver back: what had become of the one before."""
RESTORED_TAG: Final = "stillstate/restored-from"
"""The same: the snapshot that it went on from."""
DOWN_TAG: Final = "stillstate/down"
"""The same: from the last heartbeat to the first checkpoint."""


def recovery_run_key(job: str, term: int, attempt: int) -> str:
    """One failure, one attempt, one run: Dagster never starts a second run for a key."""
    return f"{job}:{term}:{attempt}"


def give_up_run_key(job: str, term: int) -> str:
    """One failure is given up once."""
    return f"{job}:{term}:gave-up"


def give_up_run_tags(job: str, term: int) -> dict[str, str]:
    """So that it is no attempt in a later tick's eyes."""
    return {JOB_TAG: job, ACTION_TAG: GIVE_UP, TERM_TAG: str(term)}


def recovery_run_tags(job: str, term: int, attempt: int, streak: int, progress: int, kind: str = "") -> dict[str, str]:
    """What a later tick needs to know about this run."""
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
    """One difference of one run of the driver, one migration."""
    return f"{job}:{term}:migrate:{target}"


def migration_run_tags(job: str, term: int, target: str) -> dict[str, str]:
    """What a later tick needs to know about this run."""
    return {JOB_TAG: job, ACTION_TAG: "migrate", TERM_TAG: str(term), TARGET_TAG: target}


def prune_tag(mount: Mount) -> str:
    """In the place of a stream's name, of runs that prune Dagster's storage: they end and go as those of streams."""
    return mount.name("stillstate_prune")


def resume_run_key(job: str, uid: str, attempt: int) -> str:
    """One attempt to go on with a migration."""
    return f"{job}:{uid}:resume:{attempt}"


def resume_run_tags(job: str, uid: str, attempt: int) -> dict[str, str]:
    """The same."""
    return {JOB_TAG: job, ACTION_TAG: "migrate", RESUMES_TAG: uid, ATTEMPT_TAG: str(attempt)}
