"""Whole jobs with the changelog off, and from off to on and back, with rescaling and other backends on the way."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from .test_engine import everything, flat, some_batches, states_of
from .timed import TimedJob

pytestmark = [pytest.mark.spark, pytest.mark.long]

Step = tuple[int, str, str, bool]  # parallelism, backend, changelog, whether the host's disk is lost before it

# Flink's SwitchStateBackendITCase and ChangelogCompatibilityITCase, as one chain each.
CHAINS: dict[str, tuple[Step, ...]] = {
    "off-arrow": (
        (2, "arrow", "off", False),
        (2, "arrow", "off", True),
        (4, "arrow", "off", False),
        (3, "arrow", "off", True),
        (3, "arrow", "on", True),
        (1, "arrow", "off", False),
    ),
    "off-rocksdb": (
        (2, "rocksdb", "off", False),
        (2, "rocksdb", "off", True),
        (4, "rocksdb", "off", True),
        (1, "rocksdb", "off", False),
        (1, "arrow", "off", True),
        (3, "rocksdb", "on", False),
    ),
    "on-off-on": (
        (3, "arrow", "on", False),
        (3, "arrow", "off", False),
        (2, "rocksdb", "on", True),
        (2, "rocksdb", "on", True),
        (5, "arrow", "off", True),
        (5, "rocksdb", "off", False),
    ),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_no_change_of_mode_backend_or_parallelism_shows_in_state_or_output(
    spark: SparkSession, tmp_path: Path, chain: str
) -> None:
    """Values, lists, maps and timers are those of one run with the changelog on."""
    batches = some_batches(6)
    whole = TimedJob(spark, tmp_path / "whole", everything)
    expected = flat([epoch for batch in batches for epoch in whole.run(batch)])
    parts = TimedJob(spark, tmp_path / "parts", everything, materialize_max_segments=2)
    emitted: list[Any] = []
    for batch, (parallelism, backend, changelog, lost) in zip(batches, CHAINS[chain], strict=True):
        if lost:
            shutil.rmtree(tmp_path / "parts" / "local")
        parts.settings |= {"parallelism": parallelism, "backend": backend, "changelog": changelog}
        emitted += flat(parts.run(batch))
        manifest = parts.manifest()
        if changelog == "off":
            assert manifest.shards.parallelism == parallelism
            assert not any(layer.tables for layer in manifest.layers)
            assert not manifest.state_segments
    assert sorted(emitted) == sorted(expected)
    assert states_of(tmp_path / "parts") == states_of(tmp_path / "whole")


def test_a_checkpoint_of_several_epochs_has_the_files_of_all_of_them(spark: SparkSession, tmp_path: Path) -> None:
    """Also of shards that only an earlier epoch of the interval touched."""
    batches = [[("a", 0, 1)], [("b", 1, 2)], [("c", 2, 3)], [("a", 3, 4)]]
    whole = TimedJob(spark, tmp_path / "whole", everything)
    expected = flat(whole.run(*batches))
    parts = TimedJob(spark, tmp_path / "parts", everything, changelog="off", checkpoint_batches=2)
    assert flat(parts.run(*batches)) == expected
    assert max(p.epochs for p in parts.progress) == 2
    shutil.rmtree(tmp_path / "parts" / "local")
    assert states_of(tmp_path / "parts") == states_of(tmp_path / "whole")
