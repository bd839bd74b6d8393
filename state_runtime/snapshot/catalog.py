"""The content of a job root: only reads, never writes; does not use Spark."""

from __future__ import annotations

from dataclasses import replace

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.errors import (
    CorruptManifest,
    JobNotFound,
    MissingSnapshot,
    SnapshotExpired,
    UnsupportedFormat,
)
from state_runtime.base.limits import MANIFEST_BYTES_MAX, SMALL_JSON_BYTES_MAX
from state_runtime.base.progress import Progress
from state_runtime.snapshot.document import decode_document
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.snapshot.lineage import standing_in
from state_runtime.snapshot.manifest import Manifest, StagedOutput
from state_runtime.snapshot.paths import (
    CHANGELOG_DIR,
    JOB_FILE,
    OUTPUTS_DIR,
    SNAPSHOTS_DIR,
    check_job_name,
    manifest_path,
    named_snapshot_of,
    snapshot_id_of,
)
from state_runtime.snapshot.term_files import RunStatus, newest_term, read_status
from state_runtime.store import Store

__all__ = ["Catalog", "read_job_info"]


def read_job_info(root: Store) -> JobInfo | None:
    """Read the job's identity; None if the root does not exist yet. The name is the one at creation: folders may be
    renamed.

    Raises:
        CorruptManifest, UnsupportedFormat: see `decode_document`.
    """
    try:
        return decode_document("job", JobInfo, root.read(JOB_FILE, SMALL_JSON_BYTES_MAX), JOB_FILE)
    except FileNotFoundError:
        return None


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

    @classmethod
    def of_root(cls, root: Store, clock: Clock = SYSTEM_CLOCK) -> Catalog:
        """Make a catalog of any folder that is laid out like a job root: a savepoint, or a root that was moved.

        Raises:
            JobNotFound: there is no job.json.
        """
        info = read_job_info(root)
        if info is None:
            raise JobNotFound(f"{root.url} is neither a job root nor a savepoint: it has no job.json. Check the place")
        catalog = cls.__new__(cls)
        catalog.job, catalog.root, catalog.clock = info.name, root, clock
        return catalog

    def job_info(self) -> JobInfo:
        """Read the identity of the job.

        Raises:
            JobNotFound: no job root of that name.
        """
        info = read_job_info(self.root)
        if info is None:
            raise JobNotFound(
                f"there is no job {self.job!r} in {self.root.url} (no job.json). "
                "Check the store and the name; a job root appears with the job's first start"
            )
        return info

    def snapshot_ids(self, after: int = 0) -> list[int]:
        """Return the ids of the snapshots above `after`, ascending, without expired ones. The newest one may not be
        complete yet (no manifest)."""
        # The listing first: a snapshot that expires after it is found missing when it is read.
        found = [snapshot_id_of(name) for name in self.root.list_names(SNAPSHOTS_DIR)]
        boundary = read_boundary(self.root)
        return sorted(i for i in found if i is not None and i > after and boundary.keeps(i))

    def manifest(self, snapshot_id: int) -> Manifest:
        """Read and check one manifest.

        Raises:
            MissingSnapshot: there is no snapshot with that id. SnapshotExpired: it has expired.
            CorruptManifest, UnsupportedFormat: it cannot be trusted or read.
        """
        path = manifest_path(snapshot_id)
        try:
            data = self.root.read(path, MANIFEST_BYTES_MAX)
        except FileNotFoundError:
            if not read_boundary(self.root).keeps(snapshot_id):
                raise SnapshotExpired(
                    f"snapshot {snapshot_id} of job {self.job!r} in {self.root.url} has expired; choose a newer one"
                ) from None
            newest = ", ".join(map(str, self.snapshot_ids()[-5:])) or "none"
            raise MissingSnapshot(
                f"job {self.job!r} has no snapshot {snapshot_id} in {self.root.url}; the newest are: {newest}"
            ) from None
        manifest = Manifest.decode(data, f"{self.root.url}/{path}")
        if manifest.snapshot_id != snapshot_id:
            raise CorruptManifest(f"{self.root.url}/{path} says that it is snapshot {manifest.snapshot_id}")
        return manifest

    def latest(self) -> Manifest | None:
        """Read the newest complete snapshot; None before the first one. A damaged one raises and is never skipped."""
        for snapshot_id in reversed(self.snapshot_ids()):
            try:
                return self.manifest(snapshot_id)
            except MissingSnapshot:
                continue  # a folder without manifest: its writer died, or is just about to finish
        return None

    def latest_to_go_back_from(self, *, has_claimed: bool = False) -> Manifest | None:
        """Return the facts of the newest snapshot for `gone_back`, even if its manifest is unreadable; None before the
        first.

        Only for a caller that has named an older snapshot to go back to. The newest id is that of the listing. If its
        manifest is damaged or of a newer format, the newest readable one below it stands in for it (`standing_in`),
        with the output that may not be published yet. A later checkpoint deletes the staged files below the root, so
        output without them is left out if there was one (a sink that is away keeps its files). If that is not
        certain, they may have been lost: the output stays, and the start that is to deliver it says so.

        Args:
            has_claimed: the caller holds the newest term, and has made no snapshot with it yet.

        Raises:
            CorruptManifest, UnsupportedFormat: no manifest can be read.
        """
        newest_id, unreadable = 0, None
        for snapshot_id in reversed(self.snapshot_ids()):
            try:
                found = self.manifest(snapshot_id)
            except MissingSnapshot:
                continue  # as in `latest`
            except (CorruptManifest, UnsupportedFormat) as error:
                newest_id, unreadable = max(newest_id, snapshot_id), unreadable or error
                continue
            if unreadable is None:
                return found
            return standing_in(replace(found, outputs=self._pending(found, newest_id, has_claimed)), newest_id)
        if unreadable is not None:
            raise unreadable
        return None

    def _pending(self, found: Manifest, newest_id: int, has_claimed: bool) -> tuple[StagedOutput, ...]:
        whole = tuple(output for output in found.outputs if self._is_staged(output))
        if len(whole) == len(found.outputs) or self._has_checkpoint_after(found, newest_id, has_claimed):
            return whole
        return found.outputs

    def _is_staged(self, output: StagedOutput) -> bool:
        # One missing file is enough: the process that deleted them may have been killed in between.
        staged = (file.staged for file in output.files if file.staged.startswith(f"{OUTPUTS_DIR}/"))
        return all(self.root.exists(path) for path in staged)

    def _has_checkpoint_after(self, found: Manifest, newest_id: int, has_claimed: bool) -> bool:
        """Return whether one of the unreadable snapshots after `found` is certainly a checkpoint, and so its output
        delivered: a run delivers what it begins from before its first epoch."""
        # A run has a term of its own and makes one fencing snapshot: if there are more snapshots than terms since, one
        # of them is a checkpoint. Without the term of `found` the folder was not copied whole, and tells nothing.
        runs = newest_term(self.root) - has_claimed - found.term
        if 0 <= runs < newest_id - found.snapshot_id:
            return True
        # A start may use up a term and make no snapshot. Only epochs write segments, named for the snapshot to come.
        written_for = (named_snapshot_of(segment.path) for segment in self.root.list_objects(CHANGELOG_DIR))
        return any(snapshot_id is not None and snapshot_id > found.snapshot_id for snapshot_id in written_for)

    def progress(self, manifest: Manifest) -> Progress | None:
        """Return the complete numbers of a checkpoint's epoch if they are known by now; else those of its manifest.

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
        """Read the newest run's heartbeat; None if the job never started."""
        return read_status(self.root)
