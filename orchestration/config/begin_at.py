"""Where a run begins, as the command line or `stillstate.yaml` says it."""

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
    """What was asked for; nothing is the job's newest snapshot, or `start_from` of the file if it has none.

    Attributes:
        place: of another job's snapshot; goes before the file's `start_from`.
        claim: take the place over.
        from_snapshot: an older snapshot of the job's own: its id, or the name of a savepoint.
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
        """The same on the command line of a driver."""
        given = ["--from", self.place] if self.place else []
        given += ["--claim"] if self.claim else []
        return given + (["--from-snapshot", str(self.from_snapshot)] if self.from_snapshot is not None else [])

    def start_from(self, job: JobSpec) -> StartFrom | None:
        """What the runtime is told. The place's storage options are those of `start_from`, where the file has them,
        else the job's."""
        from state_runtime.driver.start_position import StartFrom

        section = job.start_from
        options = section.storage_options if section is not None else None
        if self.place:
            return StartFrom(self.place, "CLAIM" if self.claim else "NO_CLAIM", options)
        return StartFrom(section.place, section.mode, options) if section is not None else None


NEWEST = BeginAt()
