"""How far a batch of a table goes; pure."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest

from state_runtime.sources.delta_commits import TableFile, ordered
from state_runtime.sources.delta_plan import end_of_batch, in_parts
from state_runtime.sources.delta_position import DeltaPosition
from state_runtime.sources.delta_table import partition_value

COUNTS = {3: 1, 4: 5, 5: 1}


def files(at: DeltaPosition) -> Sequence[TableFile]:
    return [TableFile(f"{number}", 1, {}) for number in range(COUNTS[at.next])]


@pytest.mark.parametrize(
    ("start", "files_max", "whole_versions", "end"),
    [
        ((3, 0), 3, False, (4, 2)),
        ((4, 2), 3, False, (5, 0)),
        ((3, 0), 3, True, (4, 0)),
        ((4, 0), 3, True, (5, 0)),
        ((3, 0), None, False, (6, 0)),
        ((6, 0), 3, False, (6, 0)),
    ],
)
def test_a_batch_of_changes_ends_with_a_version_and_takes_at_least_one(
    start: tuple[int, int], files_max: int | None, whole_versions: bool, end: tuple[int, int]
) -> None:
    found = end_of_batch(DeltaPosition("t", *start), 5, files, files_max, whole_versions=whole_versions)
    assert (found.next, found.files) == end


def test_the_first_rows_come_in_parts_also_where_changes_do_not() -> None:
    whole = DeltaPosition("t", 4, is_whole=True)
    assert end_of_batch(whole, 5, files, 3, whole_versions=True) == whole.within(3)


def test_files_have_one_order_however_the_log_lists_them() -> None:
    made = [TableFile(path, 1, {}, modified_ms=at) for path, at in (("b", 1), ("a", 2), ("c", 1))]
    assert [file.path for file in ordered(made)] == [file.path for file in ordered(reversed(made))] == ["b", "c", "a"]


def test_small_files_share_a_task_and_large_ones_do_not() -> None:
    made = [TableFile(str(size), size * 2**20, {}) for size in (1, 2, 20, 1)]
    assert [len(part) for part in in_parts(made)] == [2, 1, 1]


def test_an_empty_text_in_the_log_is_null() -> None:
    """So says the protocol."""
    for kind in (pa.string(), pa.int64(), pa.timestamp("us", "UTC")):
        assert partition_value("", kind).as_py() is None
