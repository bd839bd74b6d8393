"""How wide the rows are that come from Spark."""

from __future__ import annotations

from pyspark.sql import types as T

from state_runtime.driver.epoch import TasksDone, gathered, row_bytes_after
from state_runtime.pipeline.compile import Stage
from state_runtime.task.acknowledgement import Acknowledgement

# A stage without state: a sink above the first operator. Its rows come from Spark as those of an operator do.
SINKS = [Stage(None, ("out",), T.StructType(), emit=True)]


def done(*row_bytes: int) -> TasksDone:
    return gathered([Acknowledgement(epoch="e", stage=0, shard=0, row_bytes=size) for size in row_bytes], SINKS)


def test_the_epochs_that_go_on_with_a_batch_do_not_make_it_forgotten_how_wide_its_rows_are() -> None:
    """A batch of wide rows takes several epochs sooner than others: its pieces would never be bounded again."""
    wide = row_bytes_after(8, done(20, 4_000))
    assert wide == 4_000
    assert row_bytes_after(wide, done(0)) == 4_000
    assert row_bytes_after(wide, done()) == 4_000
    assert row_bytes_after(wide, done(8)) == 8
