"""What tasks staged for a sink, read back by the driver: for targets that take rows and not files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from state_runtime.base.errors import MissingFile
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.snapshot.manifest import StagedFile, StagedOutput

__all__ = ["lost_file", "publish_unless_there", "staged_tables"]

_LOG = logging.getLogger(__name__)


def publish_unless_there(publish: Callable[[], None], is_there: Callable[[], bool]) -> None:
    """Publish what was not in the target when it was looked at.

    A staged file that is gone is no loss if the target has the epoch by now: this driver slept behind its look, and the
    next one has published the epoch, and removed what no start needs any more.

    Args:
        is_there: looks at the target anew.

    Raises:
        MissingFile: a staged file is gone, and the target does not have the epoch.
    """
    try:
        publish()
    except MissingFile:
        if not is_there():
            raise
        _LOG.warning("another driver of this job has published the epoch, while this one was asleep or slow")


def staged_tables(spec: SinkSpec, output: StagedOutput, target: str) -> Iterator[pa.Table]:
    """Yield an epoch's rows, file by file: those that are appended need not be in memory together.

    Args:
        target: that the rows are for, for the message.

    Raises:
        MissingFile: a staged file is gone.
    """
    store = spec.store()
    for file in output.files:
        try:
            data = store.read(file.staged, file.bytes)
        except FileNotFoundError as error:
            raise lost_file(spec, output, file, target) from error
        yield pq.read_table(pa.BufferReader(data))


def lost_file(spec: SinkSpec, output: StagedOutput, file: StagedFile, target: str) -> MissingFile:
    """Return the error for a staged file that is gone before its rows are in the target."""
    return MissingFile(
        f"sink {spec.name!r}: the snapshot names {file.staged} in {spec.store().url}, which is gone, and {target} does "
        f"not have epoch {output.epoch}. Restore the file from a copy if it was removed. If it is lost, go back to the "
        "snapshot before (--from-snapshot): the input since then is read again, and its output is written again under "
        "higher epoch numbers"
    )
