"""Draining ends, whatever timers do."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from model import CountingIds, FakeClock

from state_runtime.base.settings import CheckpointSettings, JobSettings
from state_runtime.driver import epochs
from tests.faults.engine import InProcess, Run, without_spark


def test_timers_that_always_set_timers_are_drained_for_so_many_epochs_as_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The last checkpoint is made all the same, and a warning says which setting it was."""
    monkeypatch.setattr(epochs, "fires_at", lambda *_: True)
    spark, session = InProcess(), SimpleNamespace()
    frame: Any = SimpleNamespace(keys=["a", "b"], sparkSession=session)
    settings = JobSettings(
        parallelism=2, local_dir=str(tmp_path / "local"), checkpoint=CheckpointSettings(drain_epochs_max=3)
    )
    with without_spark(spark):
        run = Run(
            str(tmp_path / "store"),
            {},
            str(tmp_path / "out"),
            settings,
            operators=1,
            clock=FakeClock(),
            ids=CountingIds(),
            spark=spark,
        )
        run.driver.run_batch(frame, 0)
        before = run.committer.last.epoch
        with caplog.at_level(logging.WARNING):
            run.driver.drain(frame)
        run.driver.stop()
        run.driver.close(0.0)
    assert run.committer.last.epoch == before + 3
    assert run.committer.last.drained
    assert "after 3 epochs (drain_epochs_max)" in caplog.text
