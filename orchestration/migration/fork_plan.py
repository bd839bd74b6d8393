"""The plan of a fork: a job begins beside another one, with that one's state, while that one continues; pure.

it begins with       when
the named one        a snapshot or a savepoint of the other job was named
a new savepoint      nothing was named, and the other job runs: it is made as late as possible, and the job runs on
the newest snapshot  nothing was named, and the other job does not run
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from state_runtime.base.errors import InvalidConfiguration, SnapshotInUse
from state_runtime.base.settings import VerifyLevel
from state_runtime.snapshot.migration import Migration
from stillstate.orchestration.migration.plan import ACCEPTED, TIMEOUT_MAX_S, VERIFIED
from stillstate.orchestration.text import bytes_text

__all__ = ["ForkFound", "ForkPlan", "ForkRequest", "plan_fork", "refuse_itself"]


@dataclass(frozen=True, kw_only=True)
class ForkRequest:
    """The request for a fork.

    Attributes:
        of: name of the job whose state the new one begins with.
        at: its snapshot (the id) or savepoint (the name); empty: see the module.
        timeout_s: time limit for the new job's first checkpoint; 0: its `recovery.first_checkpoint_s`.
        verify: how much of the copy is read before the new job starts.
        accept_session_settings: although settings of Spark's session that change results are others than in that place.
    """

    of: str
    at: str = ""
    timeout_s: float = 0.0
    verify: VerifyLevel = "full"
    accept_session_settings: bool = False

    def is_of(self, migration: Migration) -> bool:
        """Whether a migration that is under way may be the requested one."""
        place = migration.fork_at
        return migration.fork_of == self.of and (not self.at or place.endswith((f"@{self.at}", f"/{self.at}")))


@dataclass(frozen=True, kw_only=True)
class ForkFound:
    """Both jobs as they are.

    Attributes:
        source_root, root: URLs of the roots of the other job and of the new one.
        place: the snapshot that the new one begins with (snapshot/locate.py); empty: a savepoint that is to be made.
        snapshot_id, snapshot_bytes: of that; of the newest snapshot if a savepoint is to be made.
        has_begun: the new job has a root with snapshots, or with the promise of some.
        begins_with: `start_from` of the new job in the file; empty: not set.
        shared_outputs: options of the new job that name a folder which the other one writes to.
    """

    source_root: str
    root: str
    place: str
    snapshot_id: int
    snapshot_bytes: int
    has_begun: bool = False
    begins_with: str = ""
    shared_outputs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ForkPlan:
    """The plan of a fork.

    Attributes:
        job, of: the new job and the other one.
        place: see `ForkFound`.
        accept_session_settings: see `ForkRequest`.
    """

    job: str
    of: str
    place: str
    source_root: str
    root: str
    snapshot_id: int
    snapshot_bytes: int
    timeout_s: float
    verify: VerifyLevel = "full"
    accept_session_settings: bool = False

    @property
    def begins_with(self) -> str:
        """Return the beginning of the new job in words."""
        return self.place or f"a savepoint of {self.of} that is made now (its newest snapshot is {self.snapshot_id})"

    def rows(self) -> list[tuple[str, str, str]]:
        """Return rows of a property, its value for the other job, and its value for the new one."""
        return [
            ("root", self.source_root, self.root),
            ("state", "goes on as it is", f"begins with {self.begins_with}"),
            ("output", "goes on as it is", "begins with the first epoch after that"),
        ]

    def steps(self) -> list[str]:
        """Return the steps, in order, in words."""
        saved = [] if self.place else [f"make a savepoint of {self.of}, which goes on running"]
        accepted = ACCEPTED if self.accept_session_settings else ""
        removed = "remove the copy" if self.place else "remove the copy and the savepoint"
        return [
            *saved,
            f"copy what it needs ({bytes_text(self.snapshot_bytes)}) to {self.root}",
            VERIFIED[self.verify].format("copy"),
            f"start a driver of {self.job}, with the settings that the file has for it{accepted}",
            f"wait for its first checkpoint, at most {self.timeout_s:g} s",
            f"keep it; or, if it does not come up: stop it, and {removed}. {self.of} goes on either way",
        ]

    def notes(self) -> list[str]:
        """Return notes for a comparison of the two jobs."""
        return [
            f"rows that {self.of} has put out before are in its output alone: {self.job} writes what comes of the "
            "input after that place",
            f"from there on both read the whole input, each from its own position: what {self.of} reads must "
            "allow for a second reader",
        ]

    def markdown(self) -> str:
        """Return the plan for Dagster's metadata."""
        lines = [f"| | {self.of} | {self.job} |", "|---|---|---|", *(f"| {a} | {b} | {c} |" for a, b, c in self.rows())]
        lines += ["", *(f"{number}. {step}" for number, step in enumerate(self.steps(), 1))]
        return "\n".join([*lines, *(f"\nNote: {note}" for note in self.notes())])

    def to_json_dict(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "fork_of": self.of,
            "begins_with": self.begins_with,
            "root": self.root,
            "snapshot_id": self.snapshot_id,
            "snapshot_bytes": self.snapshot_bytes,
            "steps": self.steps(),
            "notes": self.notes(),
        }


def plan_fork(job: str, request: ForkRequest, found: ForkFound, timeout_s: float) -> ForkPlan:
    """Plan a fork.

    Args:
        job: the new one.
        timeout_s: if the request has no limit.

    Raises:
        InvalidConfiguration: a number is out of range, or the two jobs would be in each other's way.
        SnapshotInUse: the new job has begun already.
    """
    if not 0 <= request.timeout_s <= TIMEOUT_MAX_S:
        raise InvalidConfiguration(f"a timeout of {request.timeout_s:g} s is outside 0 … {TIMEOUT_MAX_S:g}")
    refuse_itself(job, request.of)
    _refuse_one_root(job, request.of, found)
    if found.has_begun:
        raise SnapshotInUse(
            f"job {job!r} has begun already, in {found.root}: a fork begins a job that has no snapshot. Give the new "
            "job another name or `store` in the file; or, if that one is not needed any more: "
            f"`stillstate delete {job} --root`"
        )
    if found.begins_with:
        raise InvalidConfiguration(
            f"the file says that job {job!r} begins with {found.begins_with} (`start_from`), and a fork says something "
            "else: take `start_from` out of it"
        )
    if found.shared_outputs:
        raise InvalidConfiguration(
            f"job {request.of!r} writes to the folder that {', '.join(found.shared_outputs)} of job {job!r} names, and "
            "rows of both would lie in it: give the new job an output folder of its own"
        )
    return ForkPlan(
        job=job,
        of=request.of,
        place=found.place,
        source_root=found.source_root,
        root=found.root,
        snapshot_id=found.snapshot_id,
        snapshot_bytes=found.snapshot_bytes,
        timeout_s=request.timeout_s or timeout_s,
        verify=request.verify,
        accept_session_settings=request.accept_session_settings,
    )


def refuse_itself(job: str, of: str) -> None:
    """Refuse a fork of a job from itself.

    Raises:
        InvalidConfiguration: they are one job.
    """
    if job == of:
        raise InvalidConfiguration(
            f"job {job!r} cannot be forked to itself: add a job to the file that is to run beside it, and name that"
        )


def _refuse_one_root(job: str, of: str, found: ForkFound) -> None:
    """Refuse roots that overlap.

    Raises:
        InvalidConfiguration: the roots are one, or one is inside the other: a cleanup of one would delete in the other
            too.
    """
    one, other = f"{found.source_root.rstrip('/')}/", f"{found.root.rstrip('/')}/"
    if one.startswith(other) or other.startswith(one):
        raise InvalidConfiguration(
            f"the root of job {job!r} would be {found.root}, and that of {of!r} is {found.source_root}: one lies in "
            "the other. Give the new job another `store`"
        )
