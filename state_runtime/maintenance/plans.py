"""Plans of deletions as documents: made, shown, and executed once, perhaps by somebody else and later.

A plan says what it was made from. Whoever executes it looks again, and refuses it if it is of another job, too old, or if what it
would delete is needed by now. So an old plan never deletes more than a new one would.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from state_runtime.errors import InvalidConfiguration
from state_runtime.limits import PLAN_BYTES_MAX
from state_runtime.maintenance.layout import ObjectKind
from state_runtime.maintenance.retention import Decision, RetentionPolicy
from state_runtime.snapshot.catalog import JobInfo
from state_runtime.snapshot.document import decode_document, encode_document

__all__ = [
    "PLAN_AGE_MAX_MS",
    "Candidate",
    "GcPlan",
    "Made",
    "RetentionPlan",
    "check_fresh",
    "read_gc_plan",
    "read_retention_plan",
    "write_plan",
]

PLAN_AGE_MAX_MS = 7 * 86_400_000
"""What was decided longer ago is decided again."""


@dataclass(frozen=True)
class Made:
    """What a plan was made from.

    Attributes:
        job: as the root calls it.
        place: URL of the root, without credentials; for people.
    """

    job: str
    job_uid: str
    place: str
    at_ms: int
    newest_snapshot_id: int
    boundary_sequence: int
    term: int


@dataclass(frozen=True)
class RetentionPlan:
    """What a retention policy decides."""

    made: Made
    policy: RetentionPolicy
    share_max: float
    decisions: tuple[Decision, ...]

    @property
    def kept(self) -> list[Decision]:
        return [d for d in self.decisions if d.kept]

    @property
    def deleted(self) -> list[Decision]:
        return [d for d in self.decisions if not d.kept]


@dataclass(frozen=True)
class Candidate:
    """An object that garbage collection would delete.

    Attributes:
        modified_ms: by the store's clock.
        reason: one line for people.
    """

    path: str
    kind: ObjectKind
    bytes: int
    modified_ms: int
    reason: str


@dataclass(frozen=True)
class GcPlan:
    """What garbage collection found: the first of its two passes.

    Attributes:
        min_age_s: the floor: nothing younger is a candidate.
        failed_ttl_s: how long savepoints that failed are kept.
        given_up: snapshots whose deletion was begun and not ended.
        savepoints: whose time is up, or whose deletion was begun and not ended: name and why.
        needed_objects, needed_bytes: that stay because something needs them; bytes as far as they are recorded.
        young_objects, young_bytes: that nothing needs (yet), too young to tell.
        foreign: names that are not of Stillstate, and stay; the first of them. foreign_objects: all.
        is_cut: whether there are more candidates than a plan may have.
    """

    made: Made
    min_age_s: float
    failed_ttl_s: float
    candidates: tuple[Candidate, ...] = ()
    given_up: tuple[int, ...] = ()
    savepoints: tuple[tuple[str, str], ...] = ()
    needed_objects: int = 0
    needed_bytes: int = 0
    young_objects: int = 0
    young_bytes: int = 0
    foreign: tuple[str, ...] = ()
    foreign_objects: int = 0
    is_cut: bool = False

    @property
    def bytes(self) -> int:
        return sum(c.bytes for c in self.candidates)

    @property
    def is_empty(self) -> bool:
        return not (self.candidates or self.given_up or self.savepoints)


def check_fresh(made: Made, info: JobInfo, place: str, now_ms: int) -> None:
    """Refuse a plan of another root, or an old one.

    Raises:
        InvalidConfiguration: make a new one.
    """
    if made.job_uid != info.uid or made.place != place:
        raise InvalidConfiguration(
            f"the plan was made for job {made.job!r} in {made.place}, not for {info.name!r} in {place}; nothing was deleted. "
            "Make a new plan"
        )
    if now_ms - made.at_ms > PLAN_AGE_MAX_MS:
        raise InvalidConfiguration(
            f"the plan is {(now_ms - made.at_ms) / 86_400_000:.0f} days old, and one is good for {PLAN_AGE_MAX_MS // 86_400_000}; "
            "nothing was deleted. Make a new plan"
        )


def write_plan(file: Path, plan: RetentionPlan | GcPlan) -> None:
    """Write a plan to a local file.

    Raises:
        InvalidConfiguration: the file cannot be written.
    """
    kind = "gc-plan" if isinstance(plan, GcPlan) else "retention-plan"
    try:
        file.write_bytes(encode_document(kind, plan))
    except OSError as error:
        raise InvalidConfiguration(
            f"the plan cannot be written to {file}: {error.strerror}; choose another file"
        ) from error


def read_gc_plan(file: Path) -> GcPlan:
    """
    Raises:
        InvalidConfiguration: there is no such file. CorruptManifest, UnsupportedFormat: it is no plan of garbage collection.
    """
    return decode_document("gc-plan", GcPlan, _read(file), str(file))


def read_retention_plan(file: Path) -> RetentionPlan:
    """
    Raises:
        InvalidConfiguration: there is no such file. CorruptManifest, UnsupportedFormat: it is no plan of retention.
    """
    return decode_document("retention-plan", RetentionPlan, _read(file), str(file))


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            body = opened.read(PLAN_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidConfiguration(f"the plan {file} cannot be read: {error.strerror}; make one with --out") from error
    if len(body) > PLAN_BYTES_MAX:
        raise InvalidConfiguration(f"the plan {file} has more than {PLAN_BYTES_MAX:,} bytes; it is none of ours")
    return body
