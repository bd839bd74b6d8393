"""A look at all jobs for every scrape, with the deadlines of Dagster's sensors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.snapshot.catalog import Catalog
from stillstate.orchestration.config.spec import JobSpec, Spec
from stillstate.orchestration.launchers import Launcher, build_launcher
from stillstate.orchestration.metrics.families import families
from stillstate.orchestration.probes.newest_savepoint import SavepointsSeen, savepoints_seen
from stillstate.orchestration.probes.pool import SHARED_POOL, NoLook, ProbePool
from stillstate.orchestration.probes.vitals import vitals_of
from stillstate.orchestration.probes.watch import Reading, watch, watch_looks

__all__ = ["JobsCollector"]

_LOG = logging.getLogger(__name__)


class JobsCollector(Collector):
    """Probes the jobs when Prometheus scrapes; nothing runs in between.

    The file is read again for each scrape, so jobs can be added and removed without a restart. While it cannot be read,
    the last known jobs are probed, and a metric reports it. Parallel scrapes are served one after the other.
    """

    def __init__(
        self,
        load: Callable[[], Spec],
        only: Sequence[str] = (),
        *,
        launcher: Callable[[Spec, JobSpec], Launcher] = build_launcher,
        lookout: ProbePool = SHARED_POOL,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Load the configuration.

        Args:
            load: reads the configuration.
            only: jobs; empty: all.

        Raises:
            InvalidConfiguration: of `load`; JobNotFound: a job of `only` is not in it.
        """
        self._load = load
        self._only = tuple(only)
        self._launcher = launcher
        self._lookout = lookout
        self._clock = clock
        self._spec = load()
        self._turn = threading.Lock()
        for name in only:
            self._spec.job(name)

    def registry(self) -> CollectorRegistry:
        """Return a registry with these metrics alone, without those of the Python process."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry

    def describe(self) -> Iterable[Metric]:
        """Return nothing: otherwise registering would probe the jobs."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Probe the jobs."""
        with self._turn:
            is_file_read = self._reload()
            spec = self._spec
            names = [name for name in self._only or spec.jobs if name in spec.jobs]
            looks = watch_looks(spec, names, self._launcher, lookout=self._lookout, clock=self._clock)
            started = [name for name, look in looks.found.items() if not isinstance(look, NoLook) and look.uid]
            counts = Reading(spec, started, "savepoints", _savepoints, budget_s=looks.left_s)
            found = watch(counts, lookout=self._lookout, clock=self._clock).found
            vitals = {name: vitals_of(looks.found[name]) for name in names}
            savepoints = {name: seen for name, seen in found.items() if not isinstance(seen, NoLook)}
            return families(vitals, savepoints, self._clock.now_ms(), is_file_read)

    def _reload(self) -> bool:
        try:
            self._spec = self._load()
        except InvalidConfiguration as error:
            _LOG.warning("the jobs of the last time are looked at: %s", error)
            return False
        return True


def _savepoints(job: JobSpec, catalog: Catalog) -> SavepointsSeen:
    return savepoints_seen(catalog)
