"""Probes of many jobs of a file: each within its time limit, all within a budget; for sensors and for metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Generic, TypeVar

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.errors import StillstateError
from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_watched_store
from stillstate.orchestration.config.job_location import location_of
from stillstate.orchestration.config.spec import JobSpec, Spec
from stillstate.orchestration.launchers import Launcher
from stillstate.orchestration.probes.look import Look, look_at, patience_of, store_id
from stillstate.orchestration.probes.order import next_start, turns
from stillstate.orchestration.probes.pool import NoLook, ProbePool, Task

__all__ = ["Reading", "Seen", "watch", "watch_looks"]

T = TypeVar("T")

_LOOKS_SHARE: Final = 0.6
"""Share of a budget: if looks use up all of theirs, the rest is left to publish the results."""


@dataclass(frozen=True)
class Seen(Generic[T]):
    """The result of a tick for each job.

    Attributes:
        found: by job, in the order in which they were looked at: the result, or why there is no result.
        next_start: the job that the next tick begins with; a sensor keeps it in its cursor.
        left_s: the time that the tick has left for other work.
    """

    found: Mapping[str, T | NoLook]
    next_start: str
    left_s: float

    def of(self, job: str) -> T:
        """Return the result of a job.

        Raises:
            StillstateError: why it has no result.
        """
        found = self.found[job]
        if isinstance(found, NoLook):
            raise found.error
        return found


@dataclass(frozen=True)
class Reading(Generic[T]):
    """Something that is read from the stores of some jobs.

    Attributes:
        what: names it; readings of the same name at the same time are read once.
        read: called in a separate thread; the catalog's store does not wait long.
        start: the job to begin with.
        budget_s: for all of them; None: a tick's.
        is_shared: it is the same for all callers.
    """

    spec: Spec
    jobs: Sequence[str]
    what: str
    read: Callable[[JobSpec, Catalog], T]
    start: str | None = field(default=None, kw_only=True)
    budget_s: float | None = field(default=None, kw_only=True)
    is_shared: bool = field(default=False, kw_only=True)


def watch_looks(
    spec: Spec,
    jobs: Sequence[str],
    launcher: Callable[[Spec, JobSpec], Launcher],
    *,
    lookout: ProbePool,
    clock: Clock,
    start: str | None = None,
) -> Seen[Look]:
    """Look once at each job; `left_s` is the time that the budget has left for other work.

    Args:
        start: the job to begin with.
    """

    def read(job: JobSpec, catalog: Catalog) -> Look:
        return look_at(job, catalog, launcher(spec, job), clock)

    total_s = spec.observation.tick_budget_s
    looks = Reading(spec, jobs, "look", read, start=start, budget_s=_LOOKS_SHARE * total_s, is_shared=True)
    seen = watch(looks, lookout=lookout, clock=clock)
    return replace(seen, left_s=seen.left_s + (1 - _LOOKS_SHARE) * total_s)


def watch(reading: Reading[T], *, lookout: ProbePool, clock: Clock) -> Seen[T]:
    """Read it for all jobs in parallel, each within its time limit."""
    spec, limits = reading.spec, reading.spec.observation
    patience = patience_of(limits.timeout_s)
    budget_s = limits.tick_budget_s if reading.budget_s is None else reading.budget_s
    keys = {f"{reading.what} {spec.file} {name}": name for name in turns(reading.jobs, reading.start)}

    def task(key: str, name: str) -> Task[T]:
        job = spec.jobs[name]
        store, shown = store_id(job)

        def open_and_read() -> T:
            home = location_of(job, lambda url, options: open_watched_store(url, options, patience))
            opened = open_watched_store(home.store, home.storage_options, patience)
            return reading.read(job, Catalog(opened, job.name, clock))

        return Task(key=key, store=store, shown=shown, read=open_and_read, is_shared=reading.is_shared)

    began_s = SYSTEM_CLOCK.monotonic_s()
    gone = {name: NoLook("failed", _unknown(spec, name)) for name in keys.values() if name not in spec.jobs}
    tasks = [task(key, name) for key, name in keys.items() if name not in gone]
    outcomes = lookout.look(tasks, timeout_s=limits.timeout_s, budget_s=budget_s)
    found = {name: gone.get(name) or outcomes[key] for key, name in keys.items()}
    unreached = {name for name, seen in found.items() if isinstance(seen, NoLook) and seen.why == "not-reached"}
    left_s = max(0.0, budget_s - (SYSTEM_CLOCK.monotonic_s() - began_s))
    return Seen(found, next_start(list(found), unreached), left_s)


def _unknown(spec: Spec, name: str) -> StillstateError:
    """Return the error for a job that the code location knows, but the file does not (any more)."""
    try:
        spec.job(name)
    except StillstateError as error:
        return error
    raise KeyError(name)
