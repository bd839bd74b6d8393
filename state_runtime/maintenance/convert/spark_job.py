"""Conversion as a Spark batch job: tasks share the folding and comparing, and access the stores through Stillstate's
own port."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.ids import SYSTEM_IDS, Ids
from state_runtime.maintenance.convert.compare import Compared, RangeOfState, compared, differences, ranges_of_states
from state_runtime.maintenance.convert.snapshot import HERE_BYTES_MAX, CompareStates, ConversionResult, Phase, convert
from state_runtime.materialize.run import FoldUnits, Reached
from state_runtime.materialize.spark_job import Location, SparkFold
from state_runtime.reading.reader import SnapshotReader
from state_runtime.snapshot.locate import OpenedSnapshot, open_place
from state_runtime.snapshot.manifest import Manifest, SnapshotFormat
from state_runtime.spark.tasks import SparkSession, run_in_tasks
from state_runtime.store import Store, open_store

__all__ = ["convert_place", "in_tasks"]


def convert_place(
    place: str,
    target_url: str,
    to: SnapshotFormat,
    *,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    session: Callable[[], SparkSession] | None = None,
    on_progress: Callable[[Phase, int, int], None] | None = None,
    holder: str = "stillstate convert",
    clock: Clock = SYSTEM_CLOCK,
    ids: Ids = SYSTEM_IDS,
) -> ConversionResult:
    """Convert the snapshot at a place; `convert` documents the guarantees and errors.

    Args:
        place: `<store>/<job>`, `<store>/<job>@<id>`, or the folder of a savepoint.
        target_url: an empty folder.
        session: starts (or gets) a session; only called for a snapshot of more than `HERE_BYTES_MAX`. With None this
            process does all the work.
    """
    source, target = open_place(place, storage_options, clock), open_store(target_url, target_options)
    call = partial(convert, source, target, to, clock=clock, ids=ids, on_progress=on_progress, holder=holder)
    if session is None or source.manifest.total_bytes <= HERE_BYTES_MAX:
        return call()
    fold, compare = in_tasks(
        session(),
        source.place.root_url,
        target_url,
        storage_options=storage_options,
        target_options=target_options,
    )
    return call(fold=fold, compare=compare)


def in_tasks(
    spark: SparkSession,
    root_url: str,
    target_url: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
) -> tuple[FoldUnits, CompareStates]:
    """Return the `fold` and `compare` that let `convert` work in a Spark session.

    Args:
        root_url: URL of the source's root.
    """
    root, into = Location(root_url, dict(storage_options or {})), Location(target_url, dict(target_options or {}))
    return SparkFold(spark, root, into, "convert"), _SparkCompare(spark, root, into)


@dataclass(frozen=True)
class _SparkCompare:
    """Compares in Spark tasks; a `CompareStates`."""

    spark: SparkSession
    root: Location
    into: Location

    def __call__(self, source: OpenedSnapshot, target: Store, draft: Manifest, reached: Reached) -> list[str]:
        begin = partial(_begin_comparing, self.root, self.into, source.manifest, draft)
        group = f"stillstate-compare-{draft.commit_id}"
        title = f"compare {source.info.name} snapshot {source.manifest.snapshot_id}"
        return differences(run_in_tasks(self.spark, ranges_of_states(source.manifest), begin, reached, group, title))


def _begin_comparing(
    root: Location, into: Location, manifest: Manifest, draft: Manifest
) -> Callable[[RangeOfState], Compared]:
    """Runs in a Spark task."""
    before, after = SnapshotReader(root.open(), manifest), SnapshotReader(into.open(), draft)
    return lambda piece: compared(piece, before, after)
