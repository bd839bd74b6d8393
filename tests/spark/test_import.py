"""A native query that stops in the middle and goes on here: the output of both together is that of Spark's query over everything."""

from __future__ import annotations

import json
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from state_runtime.base.errors import InvalidConfiguration, InvalidData
from state_runtime.importing.native import import_checkpoint
from state_runtime.reading.reader import SnapshotReader
from state_runtime.snapshot.locate import open_place

from . import native
from .homes import Home

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    # Its ValueState.update makes a generator of a Row in a row, and raises; so Spark's own half of these tests cannot run.
    pytest.mark.skipif(pyspark.__version__.startswith("4.1."), reason="Spark 4.1 stores no struct inside of a value"),
]


@pytest.mark.parametrize("flavour", ["rows"])
def test_a_query_goes_on_here_where_it_stopped(spark: SparkSession, tmp_path: Path, home: Home, flavour: str) -> None:
    """Every kind of state, timers, TTL, watermark, late rows and the position of the source: one lost, and some row differs."""
    for first, count in ((0, 4), (4, 3)):
        # Stopped and started once too: at its end a query lets timers fire that more input would have met.
        native.write_rounds(tmp_path / "in", first, count)
        native.run_native(spark, tmp_path / "in", tmp_path / "whole-ck", tmp_path / "whole", flavour)
    expected = native.rows_of(spark, tmp_path / "whole")

    half = tmp_path / "half"
    native.write_rounds(half, 0, 4)
    checkpoint, seen = tmp_path / "ck", []
    native.run_native(spark, half, checkpoint, tmp_path / "first", flavour)
    before = sorted(str(p) for p in checkpoint.rglob("*"))
    job = native.job(tmp_path, half, flavour, home=home)
    result = import_checkpoint(
        spark,
        str(checkpoint),
        job,
        home.place("native"),
        target_options=home.options,
        on_progress=lambda *told: seen.append(told),
    )
    assert sorted(str(p) for p in checkpoint.rglob("*")) == before, "the checkpoint is only read"
    assert result.operators == {0: "everything"}
    assert result.states == 4
    assert result.query_id == json.loads((checkpoint / "metadata").read_text())["id"]
    assert [told[1:] for told in seen] == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert result.manifest.snapshot_format == "canonical"
    assert [o.mode for o in result.manifest.origins] == ["IMPORT"]
    assert result.rows > 0

    native.write_rounds(half, 4, 3)
    native.job(tmp_path, half, flavour, home=home).run(spark, trigger={"availableNow": True})
    assert native.rows_of(spark, tmp_path / "first", tmp_path / "out") == expected


def test_what_does_not_fit_is_refused_and_nothing_is_published(spark: SparkSession, tmp_path: Path) -> None:
    """Other classes, a running query, a batch that was not committed, and the same target twice."""
    native.write_rounds(tmp_path / "in", 0, 2)
    checkpoint, target = tmp_path / "ck", str(tmp_path / "store" / "native")
    native.run_native(spark, tmp_path / "in", checkpoint, tmp_path / "out-native", "rows")
    other = native.job(tmp_path / "other", tmp_path / "in", "pandas")
    with pytest.raises(InvalidConfiguration, match=r"time mode processing.*time mode event"):
        import_checkpoint(spark, str(checkpoint), other, target)
    job = native.job(tmp_path, tmp_path / "in", "rows")
    newest = max(int(p.name) for p in (checkpoint / "commits").iterdir() if p.name.isdigit())
    commit = (checkpoint / "commits" / str(newest)).read_bytes()
    (checkpoint / "commits" / str(newest)).unlink()
    with pytest.raises(InvalidData, match="was planned and is not committed"):
        import_checkpoint(spark, str(checkpoint), job, target)
    assert not (tmp_path / "store" / "native" / "snapshots").exists()
    (checkpoint / "commits" / str(newest)).write_bytes(commit)
    made = import_checkpoint(spark, str(checkpoint), job, target, operators={0: "everything"})
    opened = open_place(target)
    assert opened.manifest == made.manifest
    count = SnapshotReader(opened.root, opened.manifest).fingerprint("everything", "count")
    assert count.rows == sum(t.rows for t in made.manifest.layers[0].tables if t.state == "count") > 0
    with pytest.raises(InvalidConfiguration, match="has snapshots already"):
        import_checkpoint(spark, str(checkpoint), job, target)
