"""The moments of an epoch, as its files show them from outside: where the check may kill a driver.

An epoch of the flights job leaves traces in this order::

    Spark plans the batch        offsets/<batch> in Spark's scratch checkpoint, on the driver's disk
    tasks stage their output     _stillstate/staging/... of the sink, named by the coming snapshot's id
    the checkpoint is durable    snapshots/<id>/manifest.json, which names the batch
    the output is published      the staged files move to their final names

Reading is all this module does, and it is quick: it runs while the driver's processes are frozen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from examples.flights.stack import JOB
from state_runtime.snapshot.catalog import Catalog


class EpochFiles:
    """The traces of the newest epoch.

    Args:
        work: The work folder of the demo.
        catalog: The job's snapshots.
        term: The run that is watched.
    """

    def __init__(self, work: Path, catalog: Catalog, term: int) -> None:
        self._catalog = catalog
        self._snapshots = work / "store" / JOB / "snapshots"
        self._staging = work / "output" / "legs" / "_stillstate" / "staging"
        self._local = work / "local"
        self._term = term
        self._scratch: Path | None = None

    def committed(self) -> int:
        """The newest snapshot with a manifest; 0 if there is none."""
        if not self._snapshots.is_dir():
            return 0
        names = sorted((path.name for path in self._snapshots.iterdir() if path.name.isdigit()), reverse=True)
        return next((int(name) for name in names if (self._snapshots / name / "manifest.json").exists()), 0)

    def staged(self, snapshot_id: int) -> bool:
        """Whether output for this snapshot is staged and not yet published."""
        folder = f"*/{self._term:020d}"
        return any(True for _ in self._staging.glob(f"{folder}/{snapshot_id:020d}-*"))

    def batch_is_open(self) -> bool:
        """Whether Spark has planned a batch that no checkpoint holds yet."""
        if self._scratch is None:
            offsets = list(self._local.glob("**/offsets"))
            if not offsets:
                return False
            self._scratch = max(offsets, key=lambda path: path.stat().st_mtime_ns)
        planned = max((int(path.name) for path in self._scratch.iterdir() if path.name.isdigit()), default=-1)
        newest = self._catalog.latest()
        return planned > (newest.source.batch_id if newest is not None and newest.source is not None else -1)


@dataclass(frozen=True)
class Moment:
    """A part of an epoch. ``name`` completes "the driver was killed while …"."""

    name: str
    holds: Callable[[EpochFiles], bool]


def _tasks_at_work(files: EpochFiles) -> bool:
    return files.batch_is_open() and not files.staged(files.committed() + 1)


def _output_staged(files: EpochFiles) -> bool:
    return files.staged(files.committed() + 1)


def _not_yet_published(files: EpochFiles) -> bool:
    return files.staged(files.committed())


MOMENTS: Final = (
    Moment("its tasks are at work", _tasks_at_work),
    Moment("output is staged and the checkpoint is not yet durable", _output_staged),
    Moment("the checkpoint is durable and its output not yet published", _not_yet_published),
)
"""In the order of an epoch. A restart must drop, repeat and publish the output, respectively."""
