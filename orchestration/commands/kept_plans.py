"""The newest plan of deletions that was made for each job, so that `apply JOB` executes what `plan JOB` showed.

`<launcher.log_dir>/plans/<job>.<retention|gc>.json`: kept when a plan is made, removed when it was executed. Losing
one loses nothing: `plan` makes another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from orchestration.config.spec import JobSpec, load_spec
from state_runtime.base.errors import InvalidConfiguration

__all__ = ["FoundPlan", "find_plan", "keep_plan"]

Kind = Literal["retention", "gc"]


@dataclass(frozen=True)
class FoundPlan:
    """The file of a plan that is to be executed.

    Attributes:
        job: whose newest plan it is; empty: a file that was named.
    """

    file: Path
    job: str = ""

    def check_job(self, job: str) -> None:
        """Refuse a plan of another job under this one's name: a person put it there.

        Raises:
            InvalidConfiguration: nothing was deleted.
        """
        if self.job and self.job != job:
            raise InvalidConfiguration(
                f"{self.file} is a plan of job {job!r}, not of {self.job!r}; nothing was deleted. Make a new plan"
            )

    def executed(self) -> None:
        """A plan is executed once; a file of the user's stays."""
        if self.job:
            self.file.unlink(missing_ok=True)


def keep_plan(job: JobSpec, kind: Kind, write: Callable[[Path], None], out: Path | None) -> str:
    """Write a new plan where `apply` finds it, and to the file that was asked for; what to say about it.

    Raises:
        InvalidConfiguration: the file that was asked for cannot be written.
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
        # Else an older plan would pass for the newest one.
        return f"nothing was deleted; written to {out}; `stillstate {kind} apply {out}` executes it"
    written = f"written to {out}; " if out is not None else ""
    return f"nothing was deleted; {written}`stillstate {kind} apply {out or job.name}` executes this plan"


def find_plan(text: str, config: Path | None, kind: Kind) -> FoundPlan:
    """The plan that an argument of `apply` means: a job's newest one, or a file.

    Raises:
        InvalidConfiguration: the job has none, or there is neither such a job nor such a file.
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


def _file(job: JobSpec, kind: Kind) -> Path:
    return Path(job.launcher.log_dir) / "plans" / f"{job.name}.{kind}.json"
