"""The settings that a job runs with against those of the file: the verdict of the check `matches_configuration`, and
whether a migration begins, or continues, by itself; pure.

the job            what is compared
runs               the settings that its newest run reports
does not run       the settings of a start: the file's, except those that its last migration has fixed
starts             nothing yet; the verdict is unchanged

A migration begins by itself only if the file asks for it (`migration.automatic`), for a job that is healthy, and once
for each difference of a term. A migration that was taken back is not tried again until the job's part of the file
changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from state_runtime.snapshot.migration import Migration, RunSettings
from stillstate.orchestration.config.driver_settings import driver_settings
from stillstate.orchestration.config.effective_settings import settings_of, with_settings
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.migration.plan import Difference, differences, said_by
from stillstate.orchestration.recovery.health import Verdict, recovery_wait_s
from stillstate.orchestration.recovery.observe import Observation
from stillstate.orchestration.run_phases import ENDED, UNDER_WAY, RunPhase
from stillstate.orchestration.text import counted_text

__all__ = [
    "Desired",
    "PastMigration",
    "Unmatched",
    "is_left_by_its_run",
    "judge_desired",
    "needs_record",
    "target_text",
]

NAMED_MAX: Final = 5
"""Largest number of settings in a headline."""
CLOCKS_APART_S: Final = 60.0
"""Difference of the clocks of a run's host and of Dagster's storage."""
_REASON_CHARS_SHOWN: Final = 200
_RUNS: Final[frozenset[Verdict]] = frozenset({"healthy", "stalled"})
_COMING: Final[frozenset[Verdict]] = frozenset({"starting", "restarting"})

By = Literal["migration", "migration or restart", "restart"]
Next = Literal["nothing", "begin", "resume", "leave"]


@dataclass(frozen=True)
class Unmatched:
    """One setting that differs from the file, and how to change it."""

    setting: str
    runs_with: str
    file_says: str
    by: By


@dataclass(frozen=True, kw_only=True)
class PastMigration:
    """A run of Dagster's that migrated the job, or tried.

    Attributes:
        term, target: of the sensor's request (`target_text`); 0 and empty: a person launched it.
        resumes: the migration that the sensor let it continue; empty: none.
        created_s, ended_s: wall clock.
    """

    run_id: str
    phase: RunPhase
    term: int = 0
    target: str = ""
    resumes: str = ""
    created_s: float = 0.0
    ended_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Desired:
    """One judgement.

    Attributes:
        headline: the text that a person reads first; without numbers that grow.
        term: of the newest run.
        target: the result of a migration to the file's settings.
        unmatched: the settings that differ from the file.
        next: the next action: `begin` a migration, `resume` an interrupted one, `leave` the difference.
        why: in a line, for people; empty if there is no more to say.
        run_id: of Dagster's run that the line is about.
        attempt: of resuming.
    """

    headline: str
    term: int
    target: RunSettings
    unmatched: tuple[Unmatched, ...] = ()
    is_under_way: bool = False
    next: Next = "nothing"
    why: str = ""
    run_id: str = ""
    attempt: int = 0

    @property
    def passed(self) -> bool:
        return not self.unmatched and not self.is_under_way

    def how(self, job: str, launch: str) -> list[str]:
        """Return how to apply the file's settings.

        Args:
            launch: the Dagster job that migrates, in words.
        """
        if self.is_under_way:
            return []
        found = []
        if any(one.by != "restart" for one in self.unmatched):
            found.append(f"`stillstate migrate {job}`, or launch {launch}")
        if any(one.by == "restart" for one in self.unmatched):
            found.append(f"`stillstate migrate {job} --restart`, or any other restart, for what a restart takes")
        return found

    @property
    def shown(self) -> str:
        """Return a text that changes when a person should read the judgement again."""
        rows = ";".join(f"{one.setting}={one.runs_with}>{one.file_says}" for one in self.unmatched)
        return f"{self.term} {self.headline} {rows} {self.next} {self.why} {self.run_id}"


@dataclass(frozen=True)
class _Next:
    next: Next
    why: str = ""
    run_id: str = ""
    attempt: int = 0


@dataclass(frozen=True)
class _Compared:
    """The settings to compare: those that a migration changes, and the others that a run has reported."""

    settings: RunSettings
    others: Mapping[str, str] = field(default_factory=dict)


def needs_record(seen: Observation) -> bool:
    """Whether the record of the last migration has to be read. Also if the job runs with the file's settings: its
    migration may have lost its process when the new driver ran already. Also for a job that never ran, while it is
    forked."""
    return seen.migration is not None or (seen.status is not None and seen.health.verdict not in _COMING)


def is_left_by_its_run(record: Migration, past: Sequence[PastMigration]) -> bool:
    """Whether a run of Dagster's has recorded the newest step of a migration, and has failed.

    Args:
        past: Dagster's runs that migrated the job, newest first.
    """
    last = _last(past)
    return last is not None and last.phase == "failed" and _is_of(record, last)


def target_text(target: RunSettings) -> str:
    """Return the name of a target in a run's key and tags."""
    return f"{target.parallelism}-{target.backend}"


def judge_desired(
    job: JobSpec,
    seen: Observation,
    record: Migration | None,
    past: Sequence[PastMigration],
    *,
    now_s: float,
    launch: str,
    is_free: bool = False,
    is_owner_gone: bool = False,
) -> Desired | None:
    """Judge a job; None if there is nothing to report, or not yet.

    Args:
        record: the newest step of its newest migration; only if `needs_record`.
        is_owner_gone: the process that has recorded it has certainly ended.
        past: Dagster's runs that migrated it, newest first.
        launch: the Dagster job that migrates, in words.
        is_free: the file has changed since the migration of `record` was taken back.
    """
    status, verdict = seen.status, seen.health.verdict
    is_under_way = record is not None and record.is_open
    if verdict in _COMING or (status is None and not is_under_way):
        return None
    runs, file = verdict in _RUNS, settings_of(job)
    if runs and status is not None:
        compared = _Compared(said_by(status), dict(status.settings))
    else:
        compared = _Compared(settings_of(with_settings(job, record.settings)) if record is not None else file)
    had = compared.settings
    target = RunSettings(file.parallelism or had.parallelism, file.backend or had.backend)
    unmatched = (*_by_migration(differences(had, file), record), *_by_restart(compared.others, job))
    term = 0 if status is None else status.term
    if record is not None and record.is_open:
        found = _of_open(job, record, past, now_s, launch, is_owner_gone)
    elif any(one.by != "restart" for one in unmatched):
        blocked = None if is_free or record is None or record.step != "rolled-back" else record
        found = _of_difference(job, verdict, target, blocked, past, term, launch)
    else:
        found = _Next("nothing")
    return Desired(
        headline=_headline(unmatched, compared, runs=runs, record=record),
        term=term,
        target=target,
        unmatched=unmatched,
        is_under_way=is_under_way,
        next=found.next,
        why=found.why,
        run_id=found.run_id,
        attempt=found.attempt,
    )


def _headline(unmatched: Sequence[Unmatched], compared: _Compared, *, runs: bool, record: Migration | None) -> str:
    if record is not None and record.is_open:
        return f"{record.what} is under way" if record.fork_of else f"the job is being migrated to {record.target}"
    if unmatched:
        more = len(unmatched) - NAMED_MAX
        names = ", ".join(one.setting for one in unmatched[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
        return f"{'the job runs' if runs else 'the job would start'} with other settings than the file has: {names}"
    if not runs:
        return "the job does not run; its next start has the settings of the file"
    if not compared.others:
        # An earlier version has started it; or a script, which has no file to match.
        some = "parallelism and backend" if compared.settings.parallelism else "nothing"
        return f"of its settings the driver says {some}, and in that it is as the file says"
    return "the job runs with the settings of the file"


def _by_migration(found: Sequence[Difference], record: Migration | None) -> list[Unmatched]:
    # A job that was never migrated has no record that overrides the file; an empty record (a fork's) does not either.
    by: By = "migration or restart" if record is None or record.settings == RunSettings() else "migration"
    return [Unmatched(one.setting, one.runs_with, one.wanted, by) for one in found]


def _by_restart(said: Mapping[str, str], job: JobSpec) -> list[Unmatched]:
    """Compare only the settings that a run has reported: an earlier version may know fewer settings than this one."""
    file = driver_settings(job)
    return [
        Unmatched(name, said[name], value, "restart")
        for name, value in file.items()
        if name in said and said[name] != value
    ]


def _of_difference(
    job: JobSpec,
    verdict: Verdict,
    target: RunSettings,
    taken_back: Migration | None,
    past: Sequence[PastMigration],
    term: int,
    launch: str,
) -> _Next:
    """Decide whether a migration removes a difference."""
    if taken_back is not None and not differences(taken_back.target, target):
        again = " It is not tried again by itself until the job's part of the file changes." * job.migration.automatic
        reason = taken_back.reason.split("\n")[0][:_REASON_CHARS_SHOWN]
        return _Next("leave", f"A migration to {target} was taken back: {reason}.{again}")
    if not job.migration.automatic:
        return _Next("leave")
    if verdict != "healthy":
        return _Next("leave", f"The job is {verdict}, and is not migrated by itself as long as it is.")
    for run in past:
        if run.phase in UNDER_WAY:
            return _Next("leave", f"A run of {launch} is under way.", run.run_id)
        if (run.term, run.target) == (term, target_text(target)) and run.phase in ENDED:
            said = f"A run of {launch} was asked for once, and {run.phase}"
            return _Next("leave", f"{said}; it is not asked for again while this run of the driver lasts.", run.run_id)
    return _Next("begin", f"A run of {launch} is asked for (`migration.automatic`).")


def _of_open(
    job: JobSpec, record: Migration, past: Sequence[PastMigration], now_s: float, launch: str, is_owner_gone: bool
) -> _Next:
    """Decide whether a migration is resumed, no matter who began it: only one whose process has certainly ended. Until
    it is resumed the job is down, or it is open which settings it keeps."""
    last = _last(past)
    if last is not None and last.phase in UNDER_WAY:
        return _Next("leave", f"A run of {launch} is under way.", last.run_id)
    if last is not None and last.phase == "canceled" and _is_of(record, last):
        return _Next("leave", f"The run that did it was canceled. To go on with it, launch {launch}.", last.run_id)
    if not (is_owner_gone or is_left_by_its_run(record, past)):
        return _Next("leave")  # its process may live
    run_id = "" if last is None else last.run_id
    if not (job.recovery.enabled or job.migration.automatic):
        return _Next("leave", f"The process that did it has ended. To go on with it, launch {launch}.", run_id)
    attempts = sum(run.resumes == record.uid and run.phase in ENDED for run in past)
    if attempts >= job.recovery.max_attempts:
        why = f"{counted_text(attempts, 'run')} tried in vain to go on with it: a person must look."
        return _Next("leave", why, run_id)
    ended_s = record.at_ms / 1000 if last is None else last.ended_s
    if now_s < ended_s + recovery_wait_s(attempts, job.recovery.backoff_s):
        return _Next("leave", "The process that did it has ended; another one goes on with it soon.", run_id)
    return _Next("resume", "The process that did it has ended; another one goes on with it.", run_id, attempts + 1)


def _is_of(record: Migration, run: PastMigration) -> bool:
    """Whether a run of Dagster's that has ended was at work when a step was recorded."""
    return run.created_s - CLOCKS_APART_S <= record.at_ms / 1000 <= run.ended_s + CLOCKS_APART_S


def _last(past: Sequence[PastMigration]) -> PastMigration | None:
    return next((run for run in past if run.phase != "abandoned"), None)
