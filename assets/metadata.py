"""A snapshot as Dagster metadata; pure.

Dagster plots integer and float entries only, and a plot follows its name: names are stable, carry their units, and
are always present, so that a plot has no holes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import dagster as dg

from state_runtime.base.progress import Progress
from state_runtime.materialize.records import Record
from state_runtime.snapshot.document import FORMAT_VERSION
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.term_files import RunStatus
from stillstate.assets.metadata_sets import IntervalNumbers, Number, RunNumbers, numbers_metadata, source_metadata
from stillstate.assets.tables import checkpoints_table, operators_table, phases_table, pipeline_picture
from stillstate.orchestration.materialization.health import record_numbers
from stillstate.orchestration.probes.points import Point
from stillstate.orchestration.text import duration_text, time_text

__all__ = [
    "DATA_VERSION_TAG",
    "ROOT_TAG",
    "SHAPE_TAG",
    "TERM_TAG",
    "checkpoint_materialization",
    "materialization_metadata",
    "run_materialization",
    "shape_of",
    "tables_materialization",
]

DATA_VERSION_TAG: Final = "dagster/data_version"
TERM_TAG: Final = "stillstate/term"
ROOT_TAG: Final = "stillstate/root"
SHAPE_TAG: Final = "stillstate/shape"


def shape_of(manifest: Manifest) -> str:
    """Return the facts whose change is shown at once: format, parallelism, and whether the job was drained."""
    bottom = "files" if manifest.shards is not None else "tables"
    end = "drained" if manifest.drained else "open"
    # Rows in flight come and go with every burst; a change of their format is not shown.
    version = manifest.format_version if manifest.open_batch is None else FORMAT_VERSION
    return f"{version}-{manifest.parallelism}-{bottom}-{end}"


def checkpoint_materialization(
    key: dg.AssetKey,
    uid: str,
    head: Manifest,
    newest: Sequence[Point],
    status: RunStatus | None = None,
    *,
    after: int,
    why: str,
) -> dg.AssetMaterialization:
    """Return a job's newest snapshot and the events since the last published one, as a run-less materialization; its
    data version is the snapshot's id.

    Args:
        key: of the job's checkpoints.
        uid: of the job root.
        newest: the newest snapshots, ascending; the last is `head`.
        status: the newest heartbeat, if it is known.
        after: the last that was published; 0 if none was.
        why: it is published now.
    """
    since = [point for point in newest if point.snapshot_id > after]
    fences = sum(point.kind == "fencing" for point in since)
    read = [point for point in since if point.kind == "checkpoint"] or [newest[-1]]
    count = max(len(read), head.snapshot_id - after - fences) if after else len(read)
    last = newest[-1].progress or Progress(snapshot_id=head.snapshot_id)
    tables = {
        "checkpoints": checkpoints_table(newest),
        "operators": operators_table(head),
        "phases": phases_table(last),
    }
    # Dagster shows them in this order.
    first = {"pipeline": pipeline_picture(status, head)} if status is not None and status.steps else {}
    of_sources = source_metadata(status.sources, status.at_ms) if status is not None else {}
    return dg.AssetMaterialization(
        key,
        description=_description(head, read, count, why),
        metadata={**first, **numbers_metadata(IntervalNumbers.of(read, count)), **of_sources, **tables},
        tags={**_tags(uid, head.term), DATA_VERSION_TAG: str(head.snapshot_id), SHAPE_TAG: shape_of(head)},
    )


def _description(head: Manifest, read: Sequence[Point], count: int, why: str) -> str:
    over_s = (head.created_at_ms - read[0].at_ms) / 1000
    held = f"{count} checkpoints" if count > 1 else "one checkpoint"
    what = f"snapshot {head.snapshot_id} of {time_text(head.created_at_ms)} ({why}); {held} since the last event"
    if count > len(read):
        return f"{what}; numbers from the newest {len(read)} of them, which took {duration_text(over_s)}"
    return what


def run_materialization(
    key: dg.AssetKey, uid: str, point: Point, status: RunStatus | None = None
) -> dg.AssetMaterialization:
    """Return a run of the driver, seen by the snapshot by which it took the job: the stream continues from there under
    a new term, which is the data version.

    Args:
        status: the newest heartbeat; if it is this run's, it has the cause of the start and the host.
    """
    from_what = f"snapshot {point.restored_from}" if point.restored_from else "nothing: it is the first"
    said: dict[str, str] = {}
    if status is not None and status.term == point.term:
        said |= {"cause": status.cause or "a person, or a schedule", "process": f"{status.pid} on {status.host}"}
        said |= {"backend": status.backend} if status.backend else {}
    return dg.AssetMaterialization(
        key,
        description=f"term {point.term} took over at {time_text(point.at_ms)}, and goes on from {from_what}",
        metadata={**said, **numbers_metadata(RunNumbers.of(point))},
        tags={**_tags(uid, point.term), DATA_VERSION_TAG: str(point.term)},
    )


def materialization_metadata(numbers: Mapping[str, int | float]) -> dict[str, Number]:
    """Return the numbers of a materialization (`MaterializationNumbers`), as integers and floats that Dagster plots."""
    return {
        name: dg.FloatMetadataValue(value) if isinstance(value, float) else dg.IntMetadataValue(value)
        for name, value in numbers.items()
    }


def tables_materialization(key: dg.AssetKey, record: Record, log_bytes_left: int | None) -> dg.AssetMaterialization:
    """Return a fold that no Dagster run made (the driver did, or the command line), as a run-less materialization."""
    return dg.AssetMaterialization(
        key,
        description=f"{record.mode} materialization {record.record_id} of snapshot {record.snapshot_id}",
        metadata={"mode": record.mode, **materialization_metadata(record_numbers(record, log_bytes_left))},
        tags={DATA_VERSION_TAG: str(record.record_id)},
    )


def _tags(uid: str, term: int) -> dict[str, str]:
    return {ROOT_TAG: uid, TERM_TAG: str(term)}
