"""Plans of deletions, kept from their making to their execution.

    <launcher.log_dir>/plans/
        <job>.<retention|gc>.json           the newest that a person made: `apply JOB` executes the plan of `plan JOB`
        <job>.<retention|gc>.<digest>.json  one that a Dagster run made, for the steps after it

A plan is kept when it is made, and removed when it was executed; plans by digest also when they are too old to be
executed. A lost plan does no harm: `plan` makes another.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from state_runtime.base.clock import Clock
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.maintenance.plans import PLAN_AGE_MAX_MS, Kind
from stillstate.orchestration.config.spec import JobSpec, load_spec
from stillstate.orchestration.upkeep.deletions import Deletions, PlanT

__all__ = ["FoundPlan", "find_plan", "forget_plan", "keep_plan", "keep_plan_of_run", "plan_of_run"]

_DIGEST_CHARS: Final = 16
"""Characters of the digest in a file's name; the whole digest is compared when the plan was read."""


@dataclass(frozen=True)
class FoundPlan:
    """The file of a plan that is to be executed.

    Attributes:
        job: whose newest plan it is; empty: a file that was named.
    """

    file: Path
    job: str = ""

    def check_job(self, job: str) -> None:
        """Refuse a plan of another job in the file of this job: a person put it there.

        Raises:
            InvalidConfiguration: nothing was deleted.
        """
        if self.job and self.job != job:
            raise InvalidConfiguration(
                f"{self.file} is a plan of job {job!r}, not of {self.job!r}; nothing was deleted. Make a new plan"
            )

    def executed(self) -> None:
        """Remove the plan, because it is executed only once; keep a file that the user named."""
        if self.job:
            self.file.unlink(missing_ok=True)


def keep_plan(job: JobSpec, kind: Kind, write: Callable[[Path], None], out: Path | None) -> str:
    """Write a new plan to the place where `apply` finds it, and to the requested file; return the text to show.

    Raises:
        InvalidConfiguration: the requested file cannot be written.
    """
    if out is not None:
        write(out)
    kept = _file(job, kind)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write(kept)
    except (OSError, InvalidConfiguration) as error:
        if out is None:
            return f"nothing was deleted, and `apply` needs `plan --out FILE`: the plan could not be kept ({error})"
        # Otherwise an older plan would be taken for the newest one.
        return f"nothing was deleted; written to {out}; `stillstate {kind} apply {out}` executes it"
    written = f"written to {out}; " if out is not None else ""
    return f"nothing was deleted; {written}`stillstate {kind} apply {out or job.name}` executes this plan"


def find_plan(text: str, config: Path | None, kind: Kind) -> FoundPlan:
    """Find the plan that an argument of `apply` means: a job's newest one, or a file.

    Raises:
        InvalidConfiguration: the job has no plan, or neither a job nor a file has that name.
    """
    file = Path(text)
    # A file can be named without a configuration that knows its job's name; `./NAME` is always a file.
    if file.name != text or file.exists():
        return FoundPlan(file)
    job = load_spec(config).job(text)
    kept = _file(job, kind)
    if not kept.exists():
        raise InvalidConfiguration(
            f"no plan was made for job {text!r}, or it was executed; `stillstate {kind} plan {text}` makes one and "
            "shows it. Nothing was deleted"
        )
    return FoundPlan(kept, text)


def _file(job: JobSpec, kind: Kind, digest: str = "") -> Path:
    middle = f".{digest[:_DIGEST_CHARS]}" if digest else ""
    return Path(job.launcher.log_dir) / "plans" / f"{job.name}.{kind}{middle}.json"


# --- by digest: between the steps of a run ---------------------------------------------------------------------------


def keep_plan_of_run(job: JobSpec, deletions: Deletions[PlanT], plan: PlanT, clock: Clock) -> Path:
    """Keep a plan under its digest; remove those of the job that are too old to be executed.

    Raises:
        InvalidConfiguration: it cannot be kept, so it could not be executed either.
    """
    file = _file(job, deletions.kind, plan.digest)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _forget_old(job, deletions.kind, file.parent, clock.now_ms())
        # A unique name first: a step of another run may be reading the same plan.
        fresh = file.with_name(f"{file.name}.{os.getpid()}.tmp")
        plan.write(fresh)
        fresh.replace(file)
    except OSError as error:
        raise InvalidConfiguration(
            f"the plan of job {job.name!r} cannot be kept in {file.parent}: {error.strerror}; make the folder of "
            "`launcher.log_dir` writable. Nothing was deleted"
        ) from error
    return file


def plan_of_run(job: JobSpec, deletions: Deletions[PlanT], digest: str) -> PlanT:
    """Return the plan with exactly that digest.

    Raises:
        InvalidConfiguration: it is not kept on this host (any more), or is another one. CorruptManifest,
            UnsupportedFormat: it is damaged.
    """
    file = _file(job, deletions.kind, digest)
    if not file.exists():
        raise InvalidConfiguration(
            f"the plan {digest[:_DIGEST_CHARS]} of job {job.name!r} is not in {file.parent}: it was executed, it was "
            "made on another host, or it is too old. Nothing was deleted; make a new plan"
        )
    plan = deletions.document.read(file)
    if plan.digest != digest or plan.made.job != job.name:
        raise InvalidConfiguration(
            f"{file} is not the plan {digest[:_DIGEST_CHARS]} of job {job.name!r} that was looked at; nothing was "
            "deleted. Make a new plan"
        )
    return plan


def forget_plan(job: JobSpec, kind: Kind, digest: str) -> None:
    """Remove an executed plan, so that it is not executed a second time."""
    _file(job, kind, digest).unlink(missing_ok=True)


def _forget_old(job: JobSpec, kind: Kind, folder: Path, now_ms: int) -> None:
    for file in folder.glob(f"{job.name}.{kind}.*.json"):
        with contextlib.suppress(FileNotFoundError):  # another run was faster
            if now_ms - file.stat().st_mtime * 1000 > PLAN_AGE_MAX_MS:
                file.unlink()
