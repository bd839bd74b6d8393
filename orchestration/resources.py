"""The one Dagster resource: the configuration file, and what is opened from it."""

from typing import Final

import dagster as dg

from orchestration.config.spec import JobSpec, Spec, load_spec
from orchestration.launchers import Launcher, build_launcher
from orchestration.recovery.observe import Observation, observe
from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_store

__all__ = ["STILLSTATE", "StillstateResource"]

STILLSTATE: Final = "stillstate"


class StillstateResource(dg.ConfigurableResource):  # type: ignore[type-arg]  # Dagster's own docs leave it bare
    """Jobs, stores and launchers of one `stillstate.yaml`.

    Only the file's name is Dagster configuration, so that no secret can show in the UI; the file is read where it
    is needed. Tests replace `launcher` and `clock` in a subclass.
    """

    config_file: str

    def spec(self) -> Spec:
        """The configuration as it is now on disk; see `load_spec` for what it raises."""
        return load_spec(self.config_file)

    def clock(self) -> Clock:
        """What tells the time."""
        return SYSTEM_CLOCK

    def launcher(self, spec: Spec, job: JobSpec) -> Launcher:
        """What starts and stops the job's driver."""
        return build_launcher(spec, job)

    def catalog(self, job: JobSpec) -> Catalog:
        """The job's snapshots."""
        return Catalog(open_store(job.store, job.storage_options), job.name, self.clock())

    def observe(self, spec: Spec, job: JobSpec) -> Observation:
        """The newest run and how it is, as of now."""
        return observe(job, self.catalog(job), self.launcher(spec, job), self.clock())
