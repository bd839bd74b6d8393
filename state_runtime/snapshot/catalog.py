"""What exists below a job root: reading only, no Spark, nothing is ever written here."""

from __future__ import annotations

from dataclasses import dataclass

from state_runtime.clock import SYSTEM_CLOCK, Clock
from state_runtime.errors import CorruptManifest, JobNotFound, JobRootMismatch, MissingSnapshot
from state_runtime.limits import MANIFEST_BYTES_MAX, SMALL_JSON_BYTES_MAX
from state_runtime.progress import Progress
from state_runtime.snapshot.document import decode_document
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import (
    JOB_FILE,
    SNAPSHOTS_DIR,
    check_job_name,
    manifest_path,
    snapshot_id_of,
)
from state_runtime.snapshot.terms import RunStatus, read_status
from state_runtime.store import Store

__all__ = ["Catalog", "JobInfo", "read_job_info"]


@dataclass(frozen=True)
class JobInfo:
    """`job.json`: written once by the first run."""

    uid: str
    name: str
    max_parallelism: int
    format_version: int
    created_at_ms: int


def read_job_info(root: Store, name: str) -> JobInfo | None:
    """The job's identity, or None if the root does not exist yet.

    Raises:
        JobRootMismatch: the folder belongs to another job.
        CorruptManifest, UnsupportedFormat: see `decode_document`.
    """
    try:
        info = decode_document("job", JobInfo, root.read(JOB_FILE, SMALL_JSON_BYTES_MAX), JOB_FILE)
    except FileNotFoundError:
        return None
    if info.name != name:
        raise JobRootMismatch(
            f"{root.url} belongs to the job {info.name!r}, not to {name!r}; it was not touched. "
            "Give this job another name or store, or use the name the folder belongs to"
        )
    return info


class Catalog:
    """The snapshots and the run of one job.

    Args:
        store: the store that holds the job root.
        job: the job's name.
        clock: for ages.
    """

    def __init__(self, store: Store, job: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self.job = check_job_name(job)
        self.root = store.child(job)
        self.clock = clock

    def job_info(self) -> JobInfo:
        """Identity of the job.

        Raises:
            JobNotFound: no job root of that name.
        """
        info = read_job_info(self.root, self.job)
        if info is None:
            raise JobNotFound(
                f"there is no job {self.job!r} in {self.root.url} (no job.json). "
                "Check the store and the name; a job root appears with the job's first start"
            )
        return info

    def snapshot_ids(self, after: int = 0) -> list[int]:
        """Ids of the snapshots above `after`, ascending. The newest one may still be on its way (no manifest yet)."""
        found = (snapshot_id_of(name) for name in self.root.list_names(SNAPSHOTS_DIR))
        return sorted(i for i in found if i is not None and i > after)

    def manifest(self, snapshot_id: int) -> Manifest:
        """Read and check one manifest.

        Raises:
            MissingSnapshot: there is none with that id.
            CorruptManifest, UnsupportedFormat: it cannot be trusted or read.
        """
        path = manifest_path(snapshot_id)
        try:
            data = self.root.read(path, MANIFEST_BYTES_MAX)
        except FileNotFoundError:
            newest = ", ".join(map(str, self.snapshot_ids()[-5:])) or "none"
            raise MissingSnapshot(
                f"job {self.job!r} has no snapshot {snapshot_id} in {self.root.url}; the newest are: {newest}"
            ) from None
        manifest = Manifest.decode(data, f"{self.root.url}/{path}")
        if manifest.snapshot_id != snapshot_id:
            raise CorruptManifest(f"{self.root.url}/{path} says that it is snapshot {manifest.snapshot_id}")
        return manifest

    def latest(self) -> Manifest | None:
        """The newest complete snapshot, or None before the first one. A damaged one raises: we never step over it."""
        for snapshot_id in reversed(self.snapshot_ids()):
            try:
                return self.manifest(snapshot_id)
            except MissingSnapshot:
                continue  # a folder without manifest: its writer died, or is just about to finish
        return None

    def progress(self, manifest: Manifest) -> Progress | None:
        """The complete numbers of a checkpoint's epoch, where they are known by now; else those of its manifest.

        They are in the manifest after it, or, for the newest one, in the heartbeat of the run that made it.
        """
        own = manifest.progress
        if own is None:
            return None
        try:
            following = self.manifest(manifest.snapshot_id + 1).previous
        except MissingSnapshot:
            status = self.status()
            following = status.progress if status is not None else None
        return following if following is not None and following.snapshot_id == manifest.snapshot_id else own

    def status(self) -> RunStatus | None:
        """The newest run's heartbeat, None if the job never started."""
        return read_status(self.root)
