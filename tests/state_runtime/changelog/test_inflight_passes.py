"""What is named of rows in flight: what a reader counts on is looked at, and a rescale loses no range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
import pytest
from maintenance_root import FakeWorld, Job
from model import CountingIds

from state_runtime.base.errors import CorruptSegment
from state_runtime.base.settings import UploadSettings
from state_runtime.changelog.inflight import InflightPass, RowsLeft, RowsPart, check_passes, cut_by_shards
from state_runtime.changelog.parts import PartEntry
from state_runtime.changelog.reader import read_passes
from state_runtime.changelog.rows import fit_rows
from state_runtime.changelog.upload import Uploader
from state_runtime.changelog.writer import begin_segment
from state_runtime.snapshot.manifest import InflightNumbers, Manifest, OpenBatch, RowsLayout
from state_runtime.state.key_groups import hash_range_of_shard, shard_of_hash
from state_runtime.store import Store


def rows_part(low: int, high: int) -> RowsPart:
    return RowsPart("changelog/1.seg", PartEntry("rows", "op", "", "", 0, 9, "0" * 64, 5, 40, low, high))


WHOLE = InflightPass(
    operator="op",
    epoch=7,
    read_at_ms=1000,
    layout=RowsLayout(""),
    parts=(rows_part(0, 50), rows_part(60, 99)),
    left=(RowsLeft(10, 19, 5, 40), RowsLeft(30, 99, 9, 72)),
)


def of_parts(**changes: object) -> tuple[RowsPart, ...]:
    return tuple(replace(p, part=replace(p.part, **changes)) for p in WHOLE.parts)  # type: ignore[arg-type]


DAMAGED: dict[str, Callable[[], InflightPass]] = {
    "no range is left": lambda: replace(WHOLE, left=()),
    "ranges out of order": lambda: replace(WHOLE, left=WHOLE.left[::-1]),
    "ranges that meet": lambda: replace(WHOLE, left=(WHOLE.left[0], RowsLeft(19, 99, 9, 72))),
    "a range that ends before it begins": lambda: replace(WHOLE, left=(RowsLeft(19, 10, 5, 40),)),
    "parts out of order": lambda: replace(WHOLE, parts=WHOLE.parts[::-1]),
    "parts of state": lambda: replace(WHOLE, parts=of_parts(kind="state")),
    "parts of another operator": lambda: replace(WHOLE, parts=of_parts(operator="other")),
    "fewer rows than none": lambda: replace(WHOLE, left=(RowsLeft(10, 19, -1, 40),)),
    "fewer bytes than none": lambda: replace(WHOLE, left=(RowsLeft(10, 19, 5, -1),)),
    "more bytes than fit": lambda: replace(WHOLE, left=(RowsLeft(10, 19, 5, 1 << 63),)),
    "an epoch below the first": lambda: replace(WHOLE, epoch=-1),
    "read before all time": lambda: replace(WHOLE, read_at_ms=-1),
}


def test_passes_as_they_are_written_are_taken() -> None:
    check_passes([WHOLE, replace(WHOLE, epoch=8), replace(WHOLE, operator="b", parts=of_parts(operator="b"))], "here")


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_pass_that_no_reader_can_count_on_is_damage(damage: str) -> None:
    """A shard goes through ranges in order and moves their lower ends: out of order it would skip rows, without a word."""
    with pytest.raises(CorruptSegment, match=r"here: .*'op'.* out of bounds"):
        check_passes([DAMAGED[damage]()], "here")


def test_a_pass_that_is_named_twice_is_damage() -> None:
    with pytest.raises(CorruptSegment, match="names in-flight rows of one operator and epoch twice"):
        check_passes([WHOLE, WHOLE], "here")


@pytest.mark.parametrize("parallelism", [1, 2, 3, 8])
def test_a_rescale_cuts_ranges_and_shares_their_rows(parallelism: int) -> None:
    """Each piece lies in one shard, together they are the range, and what they are said to hold adds up: it is what an
    epoch is planned and a snapshot is bounded by."""
    low, high = hash_range_of_shard(0, 1)
    left = RowsLeft(low + 5, high - 5, 1_200_000, 48_000_000)
    cut = cut_by_shards(replace(WHOLE, left=(left,), parts=(rows_part(low, high),)), parallelism).left
    assert (cut[0].hash_low, cut[-1].hash_high) == (left.hash_low, left.hash_high)
    assert all(b.hash_low == a.hash_high + 1 for a, b in pairwise(cut))
    shards = [{shard_of_hash(h, parallelism) for h in (r.hash_low, r.hash_high)} for r in cut]
    assert shards == [{shard} for shard in range(parallelism)]
    for piece in cut:
        assert piece.rows == pytest.approx(left.rows / parallelism, rel=0.01)
        assert piece.bytes == pytest.approx(left.bytes / parallelism, rel=0.01)


def listed(passed: InflightPass, operator: str) -> tuple[Store, Manifest]:
    """A snapshot whose listing has a pass, and says that it has rows of an operator."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(1)
    last = job.committer.last
    begun = begin_segment(
        job.root, [], job_uid=job.committer.info.uid, term=job.committer.term.term, snapshot_id=last.snapshot_id + 1,
        ids=CountingIds(8), uploader=Uploader(UploadSettings(), world.clock), passes=(passed,),
    )  # fmt: skip
    assert begun is not None
    listing = begun.result()
    waiting = InflightNumbers(operator, 1, 1, 1, 5, layouts=(passed.layout,))
    return job.root, replace(last, open_batch=OpenBatch(0, (), "", listing.path, (listing,), (waiting,)))


def test_a_listing_of_other_rows_than_its_snapshot_names_is_damage() -> None:
    """Of another operator, or in segments that the snapshot does not hold: collection may have taken those already."""
    fits = replace(WHOLE, parts=(), left=(RowsLeft(0, 9, 1, 1),))
    assert [p.operator for p in read_passes(*listed(fits, "op"))] == ["op"]
    elsewhere = replace(WHOLE, parts=(rows_part(0, 50),), left=(RowsLeft(0, 9, 1, 1),))
    for passed, operator in ((fits, "other"), (elsewhere, "op")):
        with pytest.raises(CorruptSegment, match="lists other rows in flight than snapshot"):
            read_passes(*listed(passed, operator))


def test_waiting_rows_keep_their_values_in_the_columns_of_now() -> None:
    """After a change of the code a column may be new, gone, elsewhere or wider: what was read is not lost with it."""
    rows = pa.RecordBatch.from_pydict(
        {"a": pa.array([1, None], pa.int32()), "b": pa.array(["x", "y"]), "gone": pa.array([1.0, 2.0])}
    )
    wanted = pa.schema([("b", pa.string()), ("new", pa.float64()), ("a", pa.int64())])
    fitted = fit_rows(rows, wanted)
    assert fitted.schema.equals(wanted)
    assert fitted.to_pylist() == [{"b": "x", "new": None, "a": 1}, {"b": "y", "new": None, "a": None}]
