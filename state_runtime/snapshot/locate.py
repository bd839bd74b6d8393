"""Where a snapshot is: one notation for all of them, in commands, settings and calls.

    <store>/<job>                          the newest snapshot of a job
    <store>/<job>@<id>                     snapshot <id> of it
    <store>/<job>/savepoints/<name>        a savepoint, or any copy of its folder, wherever it lies

Of a job that is named anyway, `@<id>` (or the number alone) and a savepoint's name are enough: `own_restore_point`.

Every such folder is laid out like a job root, so that the same code reads all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.errors import InvalidConfiguration, MissingSnapshot, SnapshotExpired
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.snapshot.lineage import check_belongs
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import check_job_name
from state_runtime.store import Store, open_store

__all__ = ["OpenedSnapshot", "Place", "open_place", "open_snapshot", "own_restore_point"]


@dataclass(frozen=True)
class Place:
    """A folder laid out like a job root, and the snapshot that is meant; None is the newest."""

    root_url: str
    snapshot_id: int | None

    @staticmethod
    def parse(text: str) -> Place:
        """The notation above.

        Raises:
            InvalidConfiguration: what follows the `@` is not a number.
        """
        root, at, number = text.rstrip("/").rpartition("@")
        # A password in a URL has an `@` too, before a slash; the store refuses such URLs.
        if not at or "/" in number:
            return Place(text.rstrip("/"), None)
        if not (number.isascii() and number.isdigit() and len(number) <= 20):
            raise InvalidConfiguration(
                f"{number[:40]!r} is not a snapshot id; give <store>/<job>@<id>, or <store>/<job> for the newest"
            )
        return Place(root, int(number))

    def __str__(self) -> str:
        return self.root_url if self.snapshot_id is None else f"{self.root_url}@{self.snapshot_id}"


def own_restore_point(text: str) -> int | str:
    """What is meant by `@<id>`, `<id>` or a savepoint's name, of a job that is known: the id, or the name.

    A name that is a number means the snapshot; such a savepoint is named by its folder.

    Raises:
        InvalidConfiguration: it is none of them.
    """
    number = text.removeprefix("@")
    if number.isascii() and number.isdigit() and len(number) <= 20:
        return int(number)
    return check_job_name(text, "savepoint name")


@dataclass(frozen=True)
class OpenedSnapshot:
    """A snapshot that was found and whose manifest was read."""

    catalog: Catalog
    info: JobInfo
    manifest: Manifest

    @property
    def root(self) -> Store:
        return self.catalog.root

    @property
    def place(self) -> Place:
        return Place(self.root.url, self.manifest.snapshot_id)


def open_place(
    place: str | Place, storage_options: Mapping[str, Any] | None = None, clock: Clock = SYSTEM_CLOCK
) -> OpenedSnapshot:
    """Find a snapshot and read its manifest.

    Raises:
        InvalidConfiguration: no such store. JobNotFound, MissingSnapshot, SnapshotExpired: it is not there.
        CorruptManifest, UnsupportedFormat: it cannot be trusted or read.
    """
    where = Place.parse(place) if isinstance(place, str) else place
    return open_snapshot(open_store(where.root_url, storage_options), where.snapshot_id, clock)


def open_snapshot(root: Store, snapshot_id: int | None = None, clock: Clock = SYSTEM_CLOCK) -> OpenedSnapshot:
    """The same of a root that is open; see `open_place`."""
    catalog = Catalog.of_root(root, clock)
    if snapshot_id is not None:
        manifest = catalog.manifest(snapshot_id)
        # After it was read: what lies under a name that was given up is being removed, or a sleeper has created it
        # anew.
        if not read_boundary(root).keeps(snapshot_id):
            raise SnapshotExpired(f"snapshot {snapshot_id} in {root.url} has expired; choose a newer one")
    else:
        newest = catalog.latest()
        if newest is None:
            raise MissingSnapshot(f"job {catalog.job!r} in {root.url} has no snapshot yet")
        manifest = newest
    info = catalog.job_info()
    check_belongs(manifest, info, root.url, own=False)
    return OpenedSnapshot(catalog, info, manifest)
