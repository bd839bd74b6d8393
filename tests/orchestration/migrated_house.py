"""The code location over a job whose drivers the test plays, and which Dagster migrates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
from dagster_world import World
from migrated_job import Migrated

from stillstate.orchestration.config.spec import load_spec

__all__ = ["House"]


class House:
    """The code location, and the job."""

    def __init__(self, here: World, made: Migrated) -> None:
        self.here, self.made = here, made
        here.launchers["job"] = made.drivers  # type: ignore[assignment]
        here.polls.append(made.drivers.poll)
        self.follow()

    @staticmethod
    def of(here: World, folder: Path) -> House:
        """Over the files of a test."""
        made = Migrated(folder / "stillstate.yaml", folder / "state").running()
        made.job.clock.at_ms = here.clock.at_ms
        # The drivers' time is Dagster's too: whoever waits moves both.
        poll = made.drivers.poll

        def both(seconds: float) -> None:
            poll(seconds)
            here.clock.at_ms = made.job.clock.at_ms

        made.drivers.poll = both  # type: ignore[method-assign]
        made.drivers._beat(made.drivers.runs[-1])
        return House(here, made)

    def follow(self) -> None:
        """Dagster's clock is the job's."""
        self.here.clock.at_ms = self.made.job.clock.at_ms

    def write(self, old: str, new: str) -> None:
        """Somebody edits the file; drivers read it when they start."""
        text = self.made.config.read_text()
        assert old in text
        self.made.config.write_text(text.replace(old, new))
        self.made.spec = self.made.drivers.spec = load_spec(self.made.config).job("job")

    def beat(self) -> None:
        """The newest driver says now what it does."""
        self.made.drivers._beat(self.made.drivers.runs[-1])

    def run(self, tags: dict[str, str] | None = None, **config: Any) -> dg.ExecuteInProcessResult:
        self.follow()
        return self.here.defs.resolve_job_def("migrate_job").execute_in_process(
            run_config={"ops": {"migrate_job_driver": {"config": config}}},
            instance=self.here.instance,
            tags=tags,
            raise_on_error=False,
        )
