"""Conversion as a Spark job: tasks fold and compare; a job goes on from each result where the first one stood."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import CorruptSegment
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.maintenance.convert import compare as comparing
from state_runtime.maintenance.convert.snapshot import convert
from state_runtime.maintenance.convert.spark_job import in_tasks
from state_runtime.materialize.grid import MaterializationSizes
from state_runtime.reading.reader import SnapshotReader
from state_runtime.snapshot.locate import open_place
from state_runtime.snapshot.manifest import SnapshotFormat
from state_runtime.store import open_store

from .homes import Home
from .jobs import assert_equals_batch, two_step_job, write_input

pytestmark = [pytest.mark.spark, pytest.mark.long]

SMALL = MaterializationSizes(table_bytes=2_000, small_bytes=0, unit_bytes=1)


@pytest.mark.parametrize(
    ("home", "changelog", "to"),
    # The store makes no difference to what a conversion does.
    [
        ("local", "on", "canonical"),
        ("local", "on", "incremental"),
        ("local", "off", "changelog"),
        ("s3", "on", "canonical"),
    ],
    indirect=["home"],
)
def test_a_job_goes_on_from_what_tasks_converted(
    spark: SparkSession,
    tmp_path: Path,
    home: Home,
    monkeypatch: pytest.MonkeyPatch,
    changelog: str,
    to: SnapshotFormat,
) -> None:
    """Run → convert → the old root is gone → another parallelism, changelog and backend → the output equals the batch."""
    monkeypatch.setattr(comparing, "_RANGE_BYTES", 2_000 if home.options else 200)
    write_input(tmp_path / "in", 0, 4)
    place: dict[str, Any] = {"store": home.url, "storage_options": home.options, "heartbeat_interval_s": 5}
    two_step_job(tmp_path, changelog=changelog, materialize=False, **place).run(spark, trigger={"availableNow": True})
    root, target = home.place("steps"), home.place("converted")
    fold, compare = in_tasks(spark, root, target, storage_options=home.options, target_options=home.options)
    told: list[tuple[str, int, int]] = []
    source = open_place(root, home.options)
    result = convert(
        source,
        open_store(target, home.options),
        to,
        clock=SYSTEM_CLOCK,
        ids=SYSTEM_IDS,
        fold=fold,
        compare=compare,
        sizes=SMALL,
        on_progress=lambda *given: told.append(given),
    )
    assert {phase for phase, _, _ in told} >= {"fold", "compare"}
    assert max(total for phase, _, total in told if phase == "compare") > len(source.manifest.operators)
    mine, theirs = (
        SnapshotReader(open_store(target, home.options), result.manifest),
        SnapshotReader(source.root, source.manifest),
    )
    for operator in source.manifest.operators:
        for state in operator.states:
            assert mine.fingerprint(operator.uid, state.name) == theirs.fingerprint(operator.uid, state.name)
    home.remove("steps")
    home.rename("converted", "steps")
    write_input(tmp_path / "in", 4, 3)
    flipped = "off" if changelog == "on" else "on"
    two_step_job(
        tmp_path, parallelism=3, changelog=flipped, backend="rocksdb", local_dir=str(tmp_path / "other-host"), **place
    ).run(spark, trigger={"availableNow": True})
    assert_equals_batch(spark, tmp_path)


def test_damage_that_a_task_meets_is_a_typed_error_and_publishes_nothing(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path / "in", 0, 3)
    two_step_job(tmp_path, materialize=False).run(spark, trigger={"availableNow": True})
    root, target = tmp_path / "store" / "steps", tmp_path / "converted"
    segment = random.Random(1).choice(sorted((root / "changelog").rglob("*.seg")))
    body = bytearray(segment.read_bytes())
    body[20] ^= 0xFF
    segment.write_bytes(body)
    fold, compare = in_tasks(spark, str(root), str(target))
    with pytest.raises(CorruptSegment, match=segment.name):
        convert(
            open_place(str(root)),
            open_store(str(target)),
            "canonical",
            clock=SYSTEM_CLOCK,
            ids=SYSTEM_IDS,
            fold=fold,
            compare=compare,
        )
    assert not list(target.glob("snapshots/*/manifest.json"))
