"""The plan of a migration, decided from the job's present and wanted settings; pure.

wanted is          where it comes from
one setting        named in the call: it alone changes, even if the file differs in others
all of them        no setting is named: the file
a restart          nothing changes but the code, and the request names the restart
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.limits import MAX_PARALLELISM
from state_runtime.base.settings import VerifyLevel
from state_runtime.maintenance.move.plan import MovePlan
from state_runtime.snapshot.migration import Migration, RunSettings
from state_runtime.snapshot.term_files import RunStatus
from stillstate.orchestration.recovery.health import Verdict
from stillstate.orchestration.text import bytes_text

__all__ = [
    "ACCEPTED",
    "TIMEOUT_MAX_S",
    "VERIFIED",
    "Difference",
    "Found",
    "MigrationPlan",
    "Request",
    "differences",
    "plan_migration",
    "said_by",
    "wanted_settings",
]

CHECKPOINTS_MAX: Final = 100
TIMEOUT_MAX_S: Final = 86_400.0
VERIFIED: Final[dict[VerifyLevel, str]] = {
    "structure": "look whether all files of the {} are there",
    "sample": "read a sample of the {} and compare it with the original",
    "full": "read the whole {} and compare it with the original",
}
ACCEPTED: Final = "; settings of Spark's session that change results may be others than before"
_EDIT: Final = (
    "the job is in {}. Once it was moved it is in {} all the same, until you edit `store` and take "
    "`migration.to_store` out"
)
UNNAMED: Final = RunSettings()
LIVE: Final[frozenset[Verdict]] = frozenset({"healthy", "starting", "restarting"})
_SHOULD_RUN: Final[frozenset[Verdict]] = LIVE | {"dead", "silent", "stalled", "failed"}
_UNSETTLED: Final[frozenset[Verdict]] = frozenset({"starting", "restarting"})


@dataclass(frozen=True, kw_only=True)
class Request:
    """The request for a migration.

    Attributes:
        settings: the named ones; 0 and empty are not named.
        go_back_to: a place that the job is taken back to; empty: it continues from where it stops.
        is_restart: also if no setting changes.
        is_move: to `migration.to_store`.
        checkpoints: number of checkpoints that the new run must make before it is kept.
        timeout_s: time limit for them; 0: `recovery.first_checkpoint_s`.
        verify: how much of the savepoint is read.
        if_term: only if this run of the driver is healthy and the file says the same; 0: in any case.
        accept_session_settings: although settings of Spark's session that change results are others than before.
    """

    settings: RunSettings = UNNAMED
    go_back_to: str = ""
    is_restart: bool = False
    is_move: bool = False
    checkpoints: int = 1
    timeout_s: float = 0.0
    verify: VerifyLevel = "full"
    if_term: int = 0
    accept_session_settings: bool = False

    def is_of(self, migration: Migration) -> bool:
        """Whether a migration that is under way may be the requested one."""
        named, target = self.settings, migration.target
        return (
            named.parallelism in (0, target.parallelism)
            and named.backend in ("", target.backend)
            and self.go_back_to in ("", migration.go_back_to)
            and (bool(migration.to_root) or not self.is_move)
        )

    @property
    def is_empty(self) -> bool:
        """Whether no setting is named: then the file has the wanted ones."""
        return self.settings == UNNAMED and not self.go_back_to and not self.is_restart and not self.is_move


@dataclass(frozen=True, kw_only=True)
class Found:
    """The job as it is.

    Attributes:
        running: the settings that its newest run has, or had.
        verdict, why: of its driver.
        term: its newest run.
        snapshot_id: its newest.
        snapshot_bytes: total size of the objects that it refers to.
    """

    running: RunSettings
    verdict: Verdict
    why: str
    snapshot_id: int
    snapshot_bytes: int
    term: int = 0


@dataclass(frozen=True)
class Difference:
    """One setting that differs from the wanted one."""

    setting: str
    runs_with: str
    wanted: str


@dataclass(frozen=True, kw_only=True)
class MigrationPlan:
    """The plan of a migration.

    Attributes:
        before, target: all settings, before it and after it.
        changes: the differences between the two.
        file_says: settings of the target that differ from the file: they hold until the next migration all the same.
        was_running: whether the job runs, or should.
        go_back_to: the place of the content, in words; empty: the job continues from where it stops.
        outdated: why the request no longer applies; empty: it applies.
        is_automatic: the file asks Dagster to migrate the job to its settings.
        move: the move to another store; None: the job stays where it is.
        accept_session_settings: see `Request`.
    """

    job: str
    before: RunSettings
    target: RunSettings
    changes: tuple[Difference, ...]
    file_says: tuple[Difference, ...]
    was_running: bool
    go_back_to: str
    snapshot_id: int
    snapshot_bytes: int
    checkpoints: int
    timeout_s: float
    verify: VerifyLevel = "full"
    outdated: str = ""
    is_automatic: bool = False
    move: MovePlan | None = None
    accept_session_settings: bool = False

    @property
    def is_nothing(self) -> bool:
        """Whether the job already runs as wanted, or the request is outdated."""
        return bool(self.outdated) or (not self.changes and not self.go_back_to)

    def rows(self) -> list[tuple[str, str, str]]:
        """Return setting, present value and target value for all settings of the plan."""
        changed = {c.setting for c in self.changes}
        pairs = (
            ("parallelism", str(self.before.parallelism or "?"), str(self.target.parallelism or "?")),
            ("backend", self.before.backend or "?", self.target.backend or "?"),
        )
        rows = [(name, now, wanted if name in changed else "stays") for name, now, wanted in pairs]
        if self.move is not None:
            rows.append(("store", self.move.source_url, self.move.target_url))
        rows.append(("state", f"snapshot {self.snapshot_id}", self.go_back_to or "goes on from where it stops"))
        return rows

    def steps(self) -> list[str]:
        """Return the steps, in order, in words."""
        stop = "make a savepoint and stop the driver" if self.was_running else "make a savepoint (the job does not run)"
        back = [f"go back, in place, to {self.go_back_to}"] if self.go_back_to else []
        many = "its first checkpoint" if self.checkpoints == 1 else f"its first {self.checkpoints} checkpoints"
        after = "start it as it was" if self.was_running else "leave it stopped, as it was"
        accepted = ACCEPTED if self.accept_session_settings else ""
        if self.move is not None:
            many_objects = f"{self.move.objects:,} objects ({bytes_text(self.move.bytes)})"
            return [
                stop,
                VERIFIED[self.verify].format("savepoint"),
                f"carry {many_objects} to {self.move.target_url}, and compare; the job cannot be started meanwhile",
                f"start a driver there, with {self.target}{accepted}",
                f"wait for {many}, at most {self.timeout_s:g} s",
                f"give {self.move.source_url} up; or, if it does not come up before it has committed anything: stop "
                f"it, give the new place up, and in the old one {after}",
            ]
        return [
            stop,
            VERIFIED[self.verify].format("savepoint"),
            *back,
            f"start a driver with {self.target}{accepted}",
            f"wait for {many}, at most {self.timeout_s:g} s",
            f"keep it; or, if it does not come up: stop it, go back to the savepoint if it has committed, and {after}",
        ]

    def markdown(self) -> str:
        """Return the plan for Dagster's metadata."""
        lines = ["| | is | becomes |", "|---|---|---|", *(f"| {a} | {b} | {c} |" for a, b, c in self.rows()), ""]
        lines += [f"{number}. {step}" for number, step in enumerate(self.steps(), 1)]
        lines += [f"\nNothing is done: {self.outdated}"] if self.outdated else []
        return "\n".join(lines + [f"\nThe file says: {said}" for said in self.notes()])

    def notes(self) -> list[str]:
        """Return notes on the settings that differ from the file."""
        until = "until the next migration"
        if self.is_automatic:
            until += ", which Dagster begins by itself (`migration.automatic`): change the file too"
        moved = [] if self.move is None else [_EDIT.format(self.move.source_url, self.move.target_url)]
        return moved + [
            f"{d.setting} {d.runs_with}. Runs have {d.wanted} all the same, {until}" for d in self.file_says
        ]

    def to_json_dict(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "changes": [{"setting": c.setting, "runs_with": c.runs_with, "wanted": c.wanted} for c in self.changes],
            "parallelism": self.target.parallelism,
            "backend": self.target.backend,
            "go_back_to": self.go_back_to,
            "move_to": "" if self.move is None else self.move.target_url,
            "snapshot_id": self.snapshot_id,
            "was_running": self.was_running,
            "steps": self.steps(),
            "notes": self.notes(),
        }


def differences(running: RunSettings, wanted: RunSettings) -> tuple[Difference, ...]:
    """Return the settings of `wanted` that a job does not run with. A setting that either side leaves open is no
    difference: it is unknown, or any value will do."""
    found = []
    if wanted.parallelism and running.parallelism and wanted.parallelism != running.parallelism:
        found.append(Difference("parallelism", str(running.parallelism), str(wanted.parallelism)))
    if wanted.backend and running.backend and wanted.backend != running.backend:
        found.append(Difference("backend", running.backend, wanted.backend))
    return tuple(found)


def wanted_settings(request: Request, file: RunSettings) -> RunSettings:
    """Return the settings that the job is to run with; see the module."""
    return file if request.is_empty else request.settings


def plan_migration(
    job: str,
    request: Request,
    found: Found,
    file: RunSettings,
    timeout_s: float,
    *,
    is_automatic: bool = False,
    move: MovePlan | None = None,
) -> MigrationPlan:
    """Plan a migration.

    Args:
        file: the settings of `stillstate.yaml`.
        timeout_s: if the request has no limit.
        is_automatic: `migration.automatic`.
        move: the move to another store, if it is requested.

    Raises:
        InvalidConfiguration: a number of the request is out of range, or the driver is about to come up.
    """
    if not 0 <= request.settings.parallelism <= MAX_PARALLELISM:
        raise InvalidConfiguration(f"parallelism {request.settings.parallelism} is outside 1 … {MAX_PARALLELISM}")
    if not 1 <= request.checkpoints <= CHECKPOINTS_MAX:
        raise InvalidConfiguration(f"{request.checkpoints} checkpoints to wait for are outside 1 … {CHECKPOINTS_MAX}")
    if not 0 <= request.timeout_s <= TIMEOUT_MAX_S:
        raise InvalidConfiguration(f"a timeout of {request.timeout_s:g} s is outside 0 … {TIMEOUT_MAX_S:g}")
    if found.verdict in _UNSETTLED and not request.if_term:
        raise InvalidConfiguration(
            f"job {job!r} is {found.verdict} ({found.why}); migrate it once it runs, or stop it first"
        )
    wanted = wanted_settings(request, file)
    before = found.running
    target = RunSettings(wanted.parallelism or before.parallelism, wanted.backend or before.backend)
    changes = differences(before, target)
    if request.is_move and request.go_back_to:
        raise InvalidConfiguration("a job is moved as it is; go back to a snapshot before or after, not on the way")
    if move is not None:
        changes += (Difference("store", move.source_url, move.target_url),)
    if request.is_restart:
        changes += (Difference("code", "as it was started", "as it is now"),)
    return MigrationPlan(
        job=job,
        before=before,
        target=target,
        changes=changes,
        file_says=differences(file, target),
        was_running=found.verdict in _SHOULD_RUN,
        go_back_to=request.go_back_to,
        snapshot_id=found.snapshot_id,
        snapshot_bytes=found.snapshot_bytes,
        checkpoints=request.checkpoints,
        timeout_s=request.timeout_s or timeout_s,
        verify=request.verify,
        outdated=_outdated(request, found, differences(file, target)),
        is_automatic=is_automatic,
        move=move,
        accept_session_settings=request.accept_session_settings,
    )


def _outdated(request: Request, found: Found, file_says: Sequence[Difference]) -> str:
    """Return why a sensor's request no longer applies: the job, or the file, has changed since."""
    if not request.if_term:
        return ""
    if found.term != request.if_term or found.verdict != "healthy":
        return f"it was asked for while term {request.if_term} ran, and now term {found.term} is {found.verdict}"
    return "the file says something else by now" if file_says else ""


def said_by(status: RunStatus) -> RunSettings:
    """Return the settings that a run reports."""
    backend = status.backend
    return RunSettings(status.parallelism, backend if backend in ("arrow", "rocksdb") else "")  # type: ignore[arg-type]
