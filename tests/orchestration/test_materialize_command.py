"""Folding from the command line and from Dagster with a real Spark, on a job that a real driver ran."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
from fold_roots import begin, finish
from job_roots import FakeClock, JobRoot, checkpoint_of
from rich.console import Console
from typer.testing import CliRunner

from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.materialize.trigger import MaterializationResult
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest
from state_runtime.store import open_store
from stillstate.orchestration.cli import app
from stillstate.orchestration.config.entry_point import load_entry_point
from stillstate.orchestration.config.spec import load_spec, to_context, to_trigger
from stillstate.orchestration.definitions import build_definitions
from stillstate.orchestration.materialization.health import materialization_numbers
from stillstate.orchestration.show.materializations import (
    MaterializationBar,
    MaterializationLines,
    materialization_view,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JOB = """
from state_runtime import ParquetSink
from state_runtime import aggregates

def build(context):
    job = context.job()
    (job.read(lambda spark: spark.readStream.schema("k string, v long").json(context.options["inbox"]))
        .key_by("k").aggregate(uid="by-k", n=aggregates.count())
        .write(ParquetSink(context.options["out"]), name="out"))
    return job
"""

CONFIG = """
version: 1
jobs:
  tiny:
    entry_point: tiny_job:build
    store: store
    local_dir: local
    parallelism: 2
    options: {inbox: in, out: out}
    path_options: [inbox, out]
    spark: {master: "local[1]", conf: {spark.ui.enabled: false, spark.driver.memory: 1g}}
    materialization: {by: dagster}
"""


@pytest.fixture
def config(tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job and its file. Whoever builds a session gets that of all tests, and cannot stop it."""

    class Kept:
        def __getattr__(self, name: str) -> Any:
            return getattr(spark, name)

        def stop(self) -> None:
            """It is not theirs."""

    monkeypatch.setattr("state_runtime.spark.session.build_session", lambda *_: Kept())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tiny_job", raising=False)
    (tmp_path / "tiny_job.py").write_text(JOB)
    (tmp_path / "stillstate.yaml").write_text(CONFIG)
    (tmp_path / "in").mkdir()
    return tmp_path / "stillstate.yaml"


def run(config: Path, spark: SparkSession, name: str, *keys: str) -> Manifest:
    """Give the job rows, let it process them, and return its newest snapshot."""
    (config.parent / "in" / name).write_text("".join(f'{{"k": "{key}", "v": 1}}\n' for key in keys))
    spec = load_spec(config).job("tiny")
    job = load_entry_point(spec.entry_point, config.parent)(to_context(spec))
    job.run(spark, trigger=to_trigger(spec, until_idle=True))
    latest = Catalog(open_store(spec.store), "tiny").latest()
    assert latest is not None
    return latest


def command(config: Path, *arguments: str) -> Any:
    done = CliRunner().invoke(app, [*arguments, "--json", "--config", str(config)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def counts(config: Path) -> dict[str, int]:
    return {row["k"]: row["n"] for row in command(config, "query", "tiny", "aggregate")["rows"]}


def test_a_fold_by_hand_is_taken_over_by_the_next_run(config: Path, spark: SparkSession) -> None:
    """The state is the same before and after; what a restart replays is gone."""
    before = run(config, spark, "1.json", "a", "b", "a")
    assert before.layers == ()
    assert before.log_bytes > 0

    by_hand = command(config, "materialize", "tiny")
    assert (by_hand["mode"], by_hand["record_id"], by_hand["rows"]) == ("major", 1, 2)
    assert by_hand["log_bytes_folded"] == before.log_bytes
    assert by_hand["log_bytes_left"] == 0
    assert by_hand["written_bytes"] > 0
    again = command(config, "materialize", "tiny")
    assert again["mode"] == "none"
    assert again["reason"] == "materialization 1 waits for the job's next checkpoint"
    text = CliRunner().invoke(app, ["materialize", "tiny", "--config", str(config)]).stdout
    assert "tiny: nothing was folded: materialization 1 waits" in text
    assert Catalog(open_store(str(config.parent / "store")), "tiny").latest() == before, "only drivers write manifests"

    adopted = run(config, spark, "2.json", "b", "c")
    assert len(adopted.layers) == 1
    assert all(segment.snapshot_id > before.snapshot_id for segment in adopted.segments)
    assert counts(config) == {"a": 2, "b": 2, "c": 1}


def test_a_fold_by_dagster_has_its_numbers_as_metadata(config: Path, spark: SparkSession) -> None:
    """Its session comes from dagster-pyspark; here it finds one that runs already, and leaves it running."""
    before = run(config, spark, "1.json", "a", "b", "a")
    job = build_definitions(load_spec(config)).resolve_job_def("materialize_tiny")
    asked = {"ops": {"tiny__materialized_state": {"config": {"mode": "major"}}}}
    with dg.DagsterInstance.ephemeral() as instance:
        done = job.execute_in_process(run_config=asked, instance=instance)
        (event,) = done.get_asset_materialization_events()
        stored = event.step_materialization_data.materialization
        assert stored.asset_key == dg.AssetKey(["tiny", "materialized_state"])
        assert (stored.tags or {})["dagster/data_version"] == "1"
        numbers = {name: value.value for name, value in stored.metadata.items()}
        assert (numbers["mode"], numbers["rows"], numbers["log_bytes_left"]) == ("major", 2, 0)
        assert numbers["log_bytes_folded"] == before.log_bytes
        assert numbers["write_amplification"] == numbers["written_bytes"] / before.log_bytes
        repeated = job.execute_in_process(run_config=asked, instance=instance)
        assert repeated.success
        assert list(repeated.get_asset_materialization_events()) == [], (
            "nothing was folded, so nothing was materialized"
        )
    adopted = run(config, spark, "2.json", "b", "c")
    assert {t.last_snapshot_id for layer in adopted.layers for t in layer.tables} == {before.snapshot_id}
    assert counts(config) == {"a": 2, "b": 2, "c": 1}


# --- without Spark -------------------------------------------------------------------------------------------------


def test_the_bar_shows_how_far_it_is() -> None:
    out = io.StringIO()
    bar = MaterializationBar(Console(file=out, force_terminal=True, width=100), "flights")
    bar.show(0, 8)
    bar.show(3, 8)
    bar.close()
    assert "materialize flights" in out.getvalue()
    assert "3/8" in out.getvalue()


def test_a_log_file_gets_the_first_and_the_last_line_and_few_between(clock: FakeClock) -> None:
    out = io.StringIO()
    lines = MaterializationLines(Console(file=out, width=100), "flights", clock)
    for done in range(9):
        lines.show(done, 8)
        clock.advance_s(0.3)
    lines.close()
    assert out.getvalue().splitlines() == [
        "flights: 0 of 8 ranges",
        "flights: 4 of 8 ranges",
        "flights: 8 of 8 ranges",
    ]


def test_json_keeps_stdout_for_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    view = materialization_view("flights", as_json=True)
    view.show(1, 2)
    view.close()
    seen = capsys.readouterr()
    assert seen.out == ""
    assert json.loads(seen.err) == {"done": 1, "total": 2}


def test_a_bar_is_for_terminals_only() -> None:
    assert isinstance(
        materialization_view("x", console=Console(file=io.StringIO(), force_terminal=True)), MaterializationBar
    )
    assert isinstance(materialization_view("x", console=Console(file=io.StringIO())), MaterializationLines)


def test_write_amplification_is_bytes_written_for_each_byte_folded() -> None:
    result = MaterializationResult("minor", written_bytes=300, log_bytes_folded=200)
    assert materialization_numbers(result, 7)["write_amplification"] == 1.5
    assert materialization_numbers(MaterializationResult("none"), 7)["write_amplification"] == 0.0


def test_a_job_that_never_ran_is_known_before_spark_starts(
    write_config: Callable[..., Path], flights: JobRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    flights.start()
    monkeypatch.setattr("state_runtime.spark.session.build_session", lambda *_: pytest.fail("Spark was started"))
    done = CliRunner().invoke(app, ["materialize", "trains", "-c", str(write_config("flights", "trains"))])
    assert done.exit_code == 2
    assert done.stderr.startswith("JobNotFound: ")


def nothing(root: JobRoot) -> str:
    """A job that has begun and made no checkpoint."""
    root.start()
    return "there is no changelog to fold"


def under_way(root: JobRoot) -> str:
    root.start()
    root.checkpoint()
    return f"materialization {begin(root).record_id} is under way"


def waiting(root: JobRoot) -> str:
    root.start()
    root.checkpoint()
    return f"materialization {finish(root).record_id} waits for the job's next checkpoint"


@pytest.mark.parametrize("mode", ["auto", "minor", "major"])
@pytest.mark.parametrize("leave", [nothing, under_way, waiting])
def test_where_there_is_nothing_to_fold_spark_is_not_started(
    write_config: Callable[..., Path],
    flights: JobRoot,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    leave: Callable[[JobRoot], str],
    mode: str,
) -> None:
    """The store says so within milliseconds; a session takes half a minute on a busy machine to say the same."""
    clock.at_ms = SYSTEM_CLOCK.now_ms()  # the command's clock tells whether a pin lives
    reason = leave(flights)
    latest = flights.catalog.latest()
    assert latest is not None
    monkeypatch.setattr("state_runtime.spark.session.build_session", lambda *_: pytest.fail("Spark was started"))
    monkeypatch.setitem(sys.modules, "dagster_pyspark", None)
    config = write_config()

    done = command(config, "materialize", "flights", "--mode", mode)
    assert done["reason"].startswith(reason)
    assert (done["mode"], done["record_id"], done["log_bytes_left"]) == ("none", None, latest.log_bytes)
    said = CliRunner().invoke(app, ["materialize", "flights", "--mode", mode, "--config", str(config)])
    assert (said.exit_code, said.stdout.startswith(f"flights: nothing was folded: {reason}")) == (0, True)

    job = build_definitions(load_spec(config)).resolve_job_def("materialize_flights")
    asked = {"ops": {"flights__materialized_state": {"config": {"mode": mode}}}}
    with dg.DagsterInstance.ephemeral() as instance:
        run = job.execute_in_process(run_config=asked, instance=instance)
        assert run.success
        assert list(run.get_asset_materialization_events()) == []


def test_what_there_is_to_fold_is_folded_by_spark(
    write_config: Callable[..., Path], flights: JobRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side of the law above: a log, or tables to write anew, ask for a session."""

    class Started(Exception):
        """Spark was asked for."""

    def start(*_: object) -> None:
        raise Started

    flights.start()
    monkeypatch.setattr("state_runtime.spark.session.build_session", start)
    flights.checkpoint()
    config = write_config()
    with pytest.raises(Started):
        command(config, "materialize", "flights")
    assert flights.committer is not None
    flights.committer.commit(replace(checkpoint_of(flights.committer.last), segments=()))  # tables only
    assert command(config, "materialize", "flights")["reason"] == "there is no changelog to fold"
    with pytest.raises(Started):
        command(config, "materialize", "flights", "--mode", "major")
