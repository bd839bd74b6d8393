"""How wide the rows are that come from Spark."""

from __future__ import annotations

from state_runtime.driver.epoch import row_bytes_after
from state_runtime.task.acknowledgement import Acknowledgement


def acknowledged(row_bytes: int) -> Acknowledgement:
    return Acknowledgement(epoch="e", stage=0, shard=0, row_bytes=row_bytes)


def test_the_epochs_that_go_on_with_a_batch_do_not_make_it_forgotten_how_wide_its_rows_are() -> None:
    """A batch of wide rows takes several epochs sooner than others: its pieces would never be bounded again."""
    wide = row_bytes_after(8, [acknowledged(20), acknowledged(4_000)])
    assert wide == 4_000
    assert row_bytes_after(wide, [acknowledged(0)]) == 4_000
    assert row_bytes_after(wide, []) == 4_000
    assert row_bytes_after(wide, [acknowledged(8)]) == 8
