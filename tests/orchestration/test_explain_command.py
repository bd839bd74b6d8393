"""`stillstate explain`: the pipeline as it would run, held against what the newest snapshot has."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from job_roots import JobRoot
from pyspark import SparkContext
from test_picture import texts
from typer.testing import CliRunner, Result

from state_runtime.snapshot.manifest import SourcePosition, TimeEntry
from stillstate.orchestration.cli import app

CODE = """
from state_runtime import aggregates, foreach_epoch

def read_flights(spark):
    raise AssertionError("no row is read")

def large(df):
    raise AssertionError("no transform is called")

def build(context):
    job = context.job()
    flights = job.read(read_flights)
    legs = flights.key_by("tailnum").deduplicate(uid="plane-day")
    big = flights.transform(large)
    both = legs.union(big).write(foreach_epoch(print), name="both")
    both.aggregate(uid="all", n=aggregates.count())
    return job
"""
LINE_OF_READ = 1 + CODE.splitlines().index("    flights = job.read(read_flights)")


def explain(write_config: Callable[..., Path], code: str, *arguments: str) -> Result:
    config = write_config("flights")
    config.write_text(config.read_text().replace("nowhere.job:build", "explained_job:build"))
    (config.parent / "explained_job.py").write_text(code)
    sys.modules.pop("explained_job", None)
    return CliRunner().invoke(app, ["explain", "flights", "-c", str(config), *arguments])


def test_it_says_what_reads_what_and_what_a_start_would_find(
    write_config: Callable[..., Path], flights: JobRoot
) -> None:
    """Branches, unions, sinks, key columns; which operators have state in the newest snapshot. Without Spark and Java."""
    flights.start()
    before = SparkContext._active_spark_context
    done = explain(write_config, CODE, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [(s["number"], s["kind"], s["name"], s["reads"], s["state"]) for s in told["steps"]] == [
        (1, "source", "read_flights", [], ""),
        (2, "deduplicate", "plane-day", [1], "kept"),
        (3, "transform", "large", [1], ""),
        (4, "union", "", [2, 3], ""),
        (5, "aggregate", "all", [4], "new"),
    ]
    assert [s["writes"] for s in told["steps"]] == [[], [], [], ["both"], []]
    assert [s["keys"] for s in told["steps"]] == [[], [["tailnum"]], [], [], [[]]]
    assert (told["snapshot"], told["dropped"]) == (1, [])
    assert told["steps"][0]["line"].endswith(f"explained_job.py, line {LINE_OF_READ}")
    assert SparkContext._active_spark_context is before


def test_state_that_a_start_would_refuse_to_drop_is_named(write_config: Callable[..., Path], flights: JobRoot) -> None:
    flights.start()
    done = explain(write_config, CODE.replace('uid="plane-day"', 'uid="other"'))
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert "Snapshot 1 also has state of 'plane-day', which the pipeline does not have" in said
    assert "--allow-dropped-state" in said


def test_a_pipeline_that_cannot_run_is_refused_as_a_start_refuses_it(write_config: Callable[..., Path]) -> None:
    """With the line; also of a job that has no root yet."""
    twice = CODE.replace('uid="all"', 'uid="plane-day"')
    done = explain(write_config, twice)
    assert done.exit_code == 2
    assert "two operators have the uid 'plane-day'" in done.stderr
    assert "explained_job.py, line" in done.stderr
    fine = explain(write_config, CODE)
    assert fine.exit_code == 0
    assert "new" in fine.stdout
    raised = explain(write_config, "def build(context):\n    raise ValueError('a typing error')\n")
    assert raised.exit_code == 7
    assert "ValueError: a typing error" in raised.stderr


def test_the_examples_pipeline_is_explained_from_a_shell() -> None:
    config = Path(__file__).resolve().parents[2] / "examples" / "flights" / "stillstate.yaml"
    command = [sys.executable, "-m", "stillstate.orchestration.cli", "explain", "flights", "-c", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "plane-day" in done.stdout
    assert "carrier, origin" in done.stdout


def test_sources_are_held_against_their_positions_and_described_by_name(
    write_config: Callable[..., Path], flights: JobRoot
) -> None:
    """A start would refuse to go on without one; the snapshot's page tells where each is, and the operators' watermarks."""
    flights.start()
    position = SourcePosition(1, "{}", 'v1\n{}\n{"logOffset":7}\n-', "", "{}", names=("flights", "weather"))
    flights.checkpoint(source=position, time=TimeEntry(5, 1_000, clocks={"plane-day": 61_000}))
    code = CODE.replace("job.read(read_flights)", 'job.read(read_flights, name="flights")')
    code = code.replace("legs.union(big)", 'legs.union(big, job.read(read_flights, name="planes"))')
    done = explain(write_config, code)
    assert done.exit_code == 0, done.output
    assert "Snapshot 2 also has the position of source 'weather', which the pipeline" in " ".join(done.stdout.split())
    told = json.loads(explain(write_config, code, "--json").stdout)
    sources = {step["name"]: step["state"] for step in told["steps"] if step["kind"] == "source"}
    assert (sources, told["dropped_sources"]) == ({"flights": "kept", "planes": "new"}, ["weather"])
    described = CliRunner().invoke(app, ["describe", "2", "-c", str(write_config("flights"))])
    assert described.exit_code == 0, described.output
    assert 'flights: {"logOffset":7}' in described.output
    assert "weather: -" in described.output
    assert "plane-day: 1970-01-01 00:01:01" in described.output


def test_the_picture_has_the_steps_and_what_the_newest_snapshot_knows_of_them(
    write_config: Callable[..., Path], flights: JobRoot
) -> None:
    """In a file a browser shows it; a job without a snapshot has one too."""
    fresh = explain(write_config, CODE, "--svg")
    assert fresh.exit_code == 0, fresh.output
    assert not [text for text in texts(fresh.stdout) if "tables" in text]
    flights.start()
    flights.checkpoint(time=TimeEntry(5, 1_000, clocks={"plane-day": 61_000}))
    told = texts(explain(write_config, CODE, "--svg").stdout)
    assert {"read_flights", "plane-day", "by tailnum", "large", "union", "both", "all"} <= set(told)
    assert "watermark 1970-01-01 00:01:01Z, 0 s behind" in told
    assert "tables 40 rows, 4.9 KiB" in told


QUERY = """
from pyspark.sql import functions as F
from state_runtime import foreach_epoch

def per_shop(spark):
    rows = spark.readStream.format("rate").load().selectExpr("timestamp AS at", "value % 3 AS shop")
    return rows.withWatermark("at", "5 seconds").groupBy(F.window("at", "10 minutes"), "shop").count()

def build(context):
    job = context.job()
    job.query(per_shop).write(foreach_epoch(print))
    return job
"""


@pytest.mark.spark
def test_a_plain_query_is_told_by_what_spark_plans_of_it(write_config: Callable[..., Path], flights: JobRoot) -> None:
    """In a process of its own, for it starts Spark and ends it."""
    config = write_config("flights")
    config.write_text(config.read_text().replace("nowhere.job:build", "explained_query:build"))
    (config.parent / "explained_query.py").write_text(QUERY)
    command = [sys.executable, "-m", "stillstate.orchestration.cli", "explain", "flights", "-c", str(config), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    steps = json.loads(done.stdout)["steps"]
    assert [(s["kind"], s["name"], s["state"]) for s in steps if s["state"]] == [
        ("source", "rate", "new"),
        ("aggregate", "window-shop", "new"),
    ]
    (keys,) = next(s for s in steps if s["kind"] == "aggregate")["keys"]
    assert keys[0] == "window"
    assert len(keys) == 2, "the column that is made for event time is not told"
