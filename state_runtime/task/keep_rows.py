"""The rows that a task leaves at an epoch's deadline: made durable, part by part, and copied on the host."""

from __future__ import annotations

from state_runtime.base.ids import Ids
from state_runtime.changelog.parts_writer import PartsWriter, WrittenParts
from state_runtime.changelog.rows import ROWS_PART_BYTES
from state_runtime.changelog.upload import Uploader
from state_runtime.snapshot.paths import named_for
from state_runtime.task.host_rows import HostRows
from state_runtime.task.shard_access import ShardAccess, TaskJob
from state_runtime.task.sorted_input import RowPass, batch_of

__all__ = ["begin_keeping"]


def begin_keeping(
    job: TaskJob, operator: str, access: ShardAccess, host: HostRows, rows: RowPass, uploader: Uploader, ids: Ids
) -> WrittenParts:
    """Take the remaining rows of this epoch from the pass, encode them, and begin their upload if they are too large to
    be sent with the acknowledgement.

    Raises:
        StoreUnavailable: no room for an upload within its deadline.
    """
    writer = PartsWriter(
        lambda: access.root,
        uploader,
        term=job.term,
        name=named_for(job.snapshot_id, f"rows-{operator}"),
        settings=job.settings,
        ids=ids,
        on_part=host.keep,
    )
    rows_max = max(1, ROWS_PART_BYTES * rows.rows_left // max(1, rows.bytes_left))
    try:
        while (taken := rows.take(rows_max)) is not None:
            for piece in taken.pieces():
                batch = batch_of(piece)
                ends = (int(piece.hashes[0]), int(piece.hashes[-1]))
                writer.add("rows", operator, "", batch, ends)
        return writer.finish()
    except BaseException:
        writer.abandon()
        raise
