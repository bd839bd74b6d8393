"""The Dagster resources: the configuration file with the objects opened from it, and a materialization's session."""

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import dagster as dg
from pydantic import Field

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_store
from stillstate.orchestration.config.job_location import location_of
from stillstate.orchestration.config.spec import JobSpec, Spec, load_spec
from stillstate.orchestration.launchers import Launcher, build_launcher
from stillstate.orchestration.materialization.session import spark_of
from stillstate.orchestration.probes.look import Look
from stillstate.orchestration.probes.pool import SHARED_POOL, ProbePool
from stillstate.orchestration.probes.watch import Reading, Seen, watch, watch_looks
from stillstate.orchestration.recovery.observe import Observation, observe
from stillstate.orchestration.workers import working

__all__ = ["Reading", "Seen", "SparkSessionResource", "StillstateResource"]

T = TypeVar("T")


class StillstateResource(dg.ConfigurableResource):  # type: ignore[type-arg]  # Dagster's own docs leave it bare
    """Jobs, stores and launchers of one `stillstate.yaml`.

    Only the file's name is Dagster configuration, so that the UI cannot show a secret; the file is read when it is
    needed. Tests replace `launcher`, `clock`, `poll` and `lookout` in a subclass.
    """

    config_file: str

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator["StillstateResource"]:
        """Note the worker of every run that uses this resource (orchestration/workers.py); a sensor's tick is not a
        run."""
        if context.instance is None or context.run is None:
            yield self
            return
        with working(context.instance, context.run.run_id, self.clock()):
            yield self

    def spec(self) -> Spec:
        """Load the configuration as it is now on disk; see `load_spec` for the errors that it raises."""
        return _loaded(self.config_file)

    def clock(self) -> Clock:
        """Return the clock."""
        return SYSTEM_CLOCK

    def poll(self) -> Callable[[float], object] | None:
        """Return the function that waits between two looks of a run at a store; None: wait on the wall clock."""
        return None

    def lookout(self) -> ProbePool:
        """Return the probe pool of the sensors."""
        return SHARED_POOL

    def launcher(self, spec: Spec, job: JobSpec) -> Launcher:
        """Return the launcher that starts and stops the job's driver."""
        return build_launcher(spec, job)

    def catalog(self, job: JobSpec) -> Catalog:
        """Return the job's snapshots, for a run: it waits for a slow store."""
        job = location_of(job)
        return Catalog(open_store(job.store, job.storage_options), job.name, self.clock())

    def observe(self, spec: Spec, job: JobSpec) -> Observation:
        """Observe the newest run and its health as of now, for a run; a sensor calls `look`."""
        return observe(job, self.catalog(job), self.launcher(spec, job), self.clock())

    def look(self, spec: Spec, jobs: Sequence[str], start: str | None = None) -> Seen[Look]:
        """Probe all jobs in parallel: each within its own time limit, all within the tick's.

        Args:
            start: the job to begin with.
        """
        return watch_looks(spec, jobs, self.launcher, lookout=self.lookout(), clock=self.clock(), start=start)

    def read(self, reading: Reading[T]) -> Seen[T]:
        """Read something of each job's store as `look` does; a sensor may access a store only through these two."""
        return watch(reading, lookout=self.lookout(), clock=self.clock())


class SparkSessionResource(dg.ConfigurableResource):  # type: ignore[type-arg]  # as above
    """dagster-pyspark's `LazyPySparkResource` for the session in which a job's changelog is materialized.

    One resource for all jobs: Dagster writes every resource into every job, so one for each job would cost their
    square. dagster-pyspark is imported when a run needs it, because it imports pyspark, which the code location does
    not need.
    """

    spark_config: Mapping[str, Any] = Field(
        default={},
        description="As of LazyPySparkResource: Spark settings of the session, over those that stillstate.yaml gives "
        "the job (spark, or materialization.spark). Dagster's pages show them: keep secrets in the environment.",
    )

    def of_job(self, job: JobSpec) -> Any:
        """Return the `LazyPySparkResource` of a job's session.

        Raises:
            InvalidConfiguration: dagster-pyspark is not installed here.
        """
        try:
            library = importlib.import_module("dagster_pyspark")
        except ImportError as error:
            raise InvalidConfiguration(
                f"materializing {job.name} needs Spark in the environment of the Dagster run: "
                f"pip install 'stillstate[spark]' ({error})"
            ) from error
        from state_runtime.spark.session import session_conf

        spark = spark_of(job)
        conf = session_conf(f"{job.name}-materialize", spark.master, spark.conf)
        return library.LazyPySparkResource(spark_config={**conf, **self.spark_config})


_LOADED: dict[str, tuple[tuple[int, int, int, int], Spec]] = {}
"""By file. Two hundred jobs take half a second to check, and three sensors read the file every few seconds."""


def _loaded(file: str) -> Spec:
    try:
        found = os.stat(file)
    except OSError:
        return load_spec(file)  # this raises the error of the file
    # The file's variables come from the environment.
    version = (found.st_ino, found.st_mtime_ns, found.st_size, hash(frozenset(os.environ.items())))
    known = _LOADED.get(file)
    if known is None or known[0] != version:
        known = _LOADED[file] = version, load_spec(file)
    return known[1]
