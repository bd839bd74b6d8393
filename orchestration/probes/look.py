"""One look at a job: all that sensors need to know about it, read once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from state_runtime.base.clock import Clock
from state_runtime.base.errors import CorruptData, MissingSnapshot, SnapshotExpired, StillstateError, UnsupportedFormat
from state_runtime.snapshot.catalog import Catalog, read_job_info
from state_runtime.snapshot.manifest import Manifest
from state_runtime.store import Patience
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.launchers import Launcher
from stillstate.orchestration.recovery.observe import Observation, observe, progress_of
from stillstate.orchestration.text import redacted_location

__all__ = ["Look", "look_at", "patience_of", "store_id"]

_CONNECT_SHARE: Final = 0.4
_READ_SHARE: Final = 0.6


@dataclass(frozen=True, kw_only=True)
class Look:
    """A job at one moment.

    Attributes:
        at_ms: when it was.
        uid: of the job root; empty if the job never started.
        seen: its newest run and the run's health.
        ids: of its snapshots, ascending; the newest may have no manifest yet.
        head: its newest complete snapshot.
        trouble: why that cannot be read, if so.
    """

    at_ms: int
    uid: str
    seen: Observation
    ids: tuple[int, ...] = ()
    head: Manifest | None = None
    trouble: StillstateError | None = None

    def progress(self) -> int:
        """Return the progress; see `progress_of`.

        Raises:
            CorruptData, UnsupportedFormat: the newest snapshot cannot be read.
        """
        if self.trouble is not None:
            raise self.trouble
        return progress_of(self.head)


def look_at(job: JobSpec, catalog: Catalog, launcher: Launcher, clock: Clock) -> Look:
    """Look at a job with about eight requests, independent of the job's size and history.

    Raises:
        StillstateError: the store does not answer, or the root is too damaged to tell the driver's health.
    """
    info = read_job_info(catalog.root)
    seen = observe(job, catalog, launcher, clock)
    if info is None:
        return Look(at_ms=clock.now_ms(), uid="", seen=seen)
    ids = tuple(catalog.snapshot_ids())
    head, trouble = None, None
    try:
        head = _newest(catalog, ids)
    except (CorruptData, UnsupportedFormat) as error:
        trouble = error  # the driver's health is known all the same
    return Look(at_ms=clock.now_ms(), uid=info.uid, seen=seen, ids=ids, head=head, trouble=trouble)


def _newest(catalog: Catalog, ids: tuple[int, ...]) -> Manifest | None:
    """Return the same as `Catalog.latest`, from a listing that was already made."""
    for snapshot_id in reversed(ids):
        try:
            return catalog.manifest(snapshot_id)
        except (MissingSnapshot, SnapshotExpired):
            continue
    return None


def patience_of(timeout_s: float) -> Patience:
    """Return the time-outs of requests within a look: it should end by itself, and name the slow request."""
    return Patience(connect_s=_CONNECT_SHARE * timeout_s, read_s=_READ_SHARE * timeout_s, call_s=timeout_s)


def store_id(job: JobSpec) -> tuple[str, str]:
    """Return the key of a job's breaker: scheme, endpoint and bucket; and the same for people.

    For a local store it is the folder: two folders of one mount have two breakers, since looking up the mount may hang
    too.
    """
    shown = redacted_location(job.store)
    if "://" not in job.store:
        return job.store, shown
    parts = urlsplit(job.store)
    options = job.storage_options
    endpoint = next((str(options[k]) for k in ("endpoint_url", "account_name", "profile") if k in options), "")
    scheme = "s3" if parts.scheme == "s3a" else parts.scheme
    where = parts.path if scheme == "file" else parts.netloc
    return f"{scheme}|{endpoint}|{where}", f"{shown} at {endpoint}" if endpoint else shown
