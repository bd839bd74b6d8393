"""Where a run begins, as the command line or `stillstate.yaml` specifies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from state_runtime.base.errors import InvalidConfiguration
from stillstate.orchestration.config.spec import JobSpec

if TYPE_CHECKING:
    from state_runtime.driver.start_position import StartFrom

__all__ = ["NEWEST", "BeginAt"]


@dataclass(frozen=True)
class BeginAt:
    """The requested beginning; by default the job's newest snapshot, or `start_from` of the file if the job has no
    snapshot.

    Attributes:
        place: of another job's snapshot; it overrides the file's `start_from`.
        claim: take the place over.
        from_snapshot: an older snapshot of this job: its id, or the name of a savepoint.
    """

    place: str = ""
    claim: bool = False
    from_snapshot: int | str | None = None

    def __post_init__(self) -> None:
        if self.claim and not self.place:
            raise InvalidConfiguration("--claim says what becomes of the place that --from names; give both")
        if self.place and self.from_snapshot is not None:
            raise InvalidConfiguration(
                "--from is for a job without snapshots, --from-snapshot goes back to one of its own; give one of them"
            )

    def arguments(self) -> list[str]:
        """Return the same as arguments of a driver's command line."""
        given = ["--from", self.place] if self.place else []
        given += ["--claim"] if self.claim else []
        return given + (["--from-snapshot", str(self.from_snapshot)] if self.from_snapshot is not None else [])

    def start_from(self, job: JobSpec) -> StartFrom | None:
        """Return the start position for the runtime. The place's storage options are those of `start_from`, if the file
        has them, else the job's."""
        from state_runtime.driver.start_position import StartFrom

        section = job.start_from
        options = section.storage_options if section is not None else None
        if self.place:
            return StartFrom(self.place, "CLAIM" if self.claim else "NO_CLAIM", options)
        return StartFrom(section.place, section.mode, options) if section is not None else None


NEWEST = BeginAt()
