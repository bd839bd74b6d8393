"""Where each range of a shard's state is restored from: as much as possible from local copies, range by range."""

from __future__ import annotations

from dataclasses import replace

from model import empty_manifest

from state_runtime.restore.plan import LocalCopy, RangePlan, plan_restore
from state_runtime.snapshot.manifest import LayerEntry, Manifest, OperatorEntry, StateEntry, TableEntry
from state_runtime.state.key_groups import hash_range_of_shard

OPERATOR = OperatorEntry("sums", "aggregate", "k string", (StateEntry("sum", "value", "v long"),))
RANGES = [hash_range_of_shard(shard, 4) for shard in range(4)]
LOW, HIGH = RANGES[0][0], RANGES[3][1]


def table(operator: str, hash_range: tuple[int, int], newest: int) -> TableEntry:
    return TableEntry(f"tables/{operator}-{hash_range[0]}", 1, "d", 1, operator, "sum", *hash_range, newest)


def manifest_with(*tables: TableEntry) -> Manifest:
    return replace(empty_manifest(parallelism=1), snapshot_id=9, layers=(LayerEntry(1, 5, tables),))


def test_a_copy_serves_in_the_ranges_that_were_not_folded_since() -> None:
    """Ranges of the base are folded one by one: where its table is younger than the copy, the log no longer continues it.
    Tables of other operators cut nothing."""
    copy = LocalCopy(1, 0, "v", 6)
    younger, older = (LOW, RANGES[1][1]), (RANGES[2][0], HIGH)
    manifest = manifest_with(table("sums", younger, 7), table("sums", older, 3), table("other", RANGES[0], 8))
    plan = plan_restore(manifest, OPERATOR, ["sum"], LOW, HIGH, [copy])
    assert plan == {"sum": (RangePlan(*younger, None), RangePlan(*older, copy))}


def test_copies_of_another_parallelism_serve_each_in_its_own_range() -> None:
    """After a rescale the parts of several copies, and what none of them has, make up the shard."""
    first, third = LocalCopy(4, 0, "a", 8), LocalCopy(4, 2, "b", 6)
    plan = plan_restore(manifest_with(), OPERATOR, ["sum"], LOW, HIGH, [third, first])
    assert plan == {
        "sum": (
            RangePlan(*RANGES[0], first),
            RangePlan(*RANGES[1], None),
            RangePlan(*RANGES[2], third),
            RangePlan(*RANGES[3], None),
        )
    }
