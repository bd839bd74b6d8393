"""Which Spark a job runs on is said before anything is done with it; Spark Connect is refused by name."""

from __future__ import annotations

import configparser
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark
import pytest

from state_runtime import StreamingJob, aggregates
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.spark.session import build_session, session_conf
from state_runtime.spark.versions import NEWEST, OLDEST, check_session, refuse_connect, refuse_old_version, requirement

ROOT = Path(__file__).resolve().parent.parent.parent.parent
NOWHERE = "sc://127.0.0.1:1"


def session_of(version: str) -> Any:
    return SimpleNamespace(version=version)


@pytest.fixture
def of_connect() -> Any:
    """A session of Spark Connect itself; no server is asked until a row is."""
    from pyspark.sql.connect.session import SparkSession  # its packages are in the extra `dev`

    return SparkSession(NOWHERE)


def test_setup_cfg_names_the_range_that_the_code_has() -> None:
    """pip and a run must not disagree about what is supported."""
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg")
    (pinned,) = [line for line in options["options.extras_require"]["spark"].split() if line.startswith("pyspark")]
    assert pinned == requirement() == f"pyspark>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"


@pytest.mark.parametrize("version", ["3.5.7", "4.0.1", "4.0.0.dev2"])
def test_a_version_that_is_too_old_is_refused_in_one_sentence(version: str) -> None:
    with pytest.raises(InvalidConfiguration) as told:
        refuse_old_version(version)
    message = str(told.value)
    assert message.startswith(f"Spark {version} is installed, and jobs run on Spark 4.1 to 4.3: pip install")
    assert requirement() in message
    assert "\n" not in message


@pytest.mark.parametrize("version", ["4.1.0", "4.2.1", "4.3.0.dev1", "4.3.9"])
def test_a_version_of_the_range_is_taken_without_a_word(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pyspark, "__version__", version)
    with caplog.at_level(logging.WARNING):
        check_session(session_of(version))
    assert caplog.messages == []


def test_a_newer_version_than_any_that_was_tested_warns_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it lacks is found by trying; a refusal would keep jobs off each new release."""
    monkeypatch.setattr(pyspark, "__version__", "5.0.0")
    with caplog.at_level(logging.WARNING):
        check_session(session_of("5.0.0"))
    (told,) = caplog.messages
    assert told.startswith("Spark 5.0.0 is newer than 4.3, the newest one that Stillstate is tested with")
    assert requirement() in told


def test_a_package_of_another_version_than_its_java_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where `spark-submit` is of one Spark, and the driver's Python has another."""
    monkeypatch.setattr(pyspark, "__version__", "4.3.0")
    with caplog.at_level(logging.WARNING):
        check_session(session_of("4.1.4"))
    (told,) = caplog.messages
    assert "pyspark 4.3.0" in told
    assert "runs Spark 4.1.4" in told


def test_a_job_is_refused_on_an_old_version_before_it_writes_anything(tmp_path: Path) -> None:
    job = StreamingJob("old", store=str(tmp_path / "store"))
    job.read(lambda spark: spark.readStream.format("rate").load()).key_by("value").aggregate(
        uid="n", n=aggregates.count()
    )
    with pytest.raises(InvalidConfiguration, match=r"Spark 4\.0\.2 is installed"):
        job.run(session_of("4.0.2"))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("master", "conf", "variables", "named"),
    [
        ("sc://host:15002", {}, {}, "master sc://host:15002"),
        ("local[1]", {"spark.remote": "local"}, {}, "the setting spark.remote"),
        ("local[1]", {"spark.api.mode": "connect"}, {}, "spark.api.mode"),
        ("local[1]", {}, {"SPARK_REMOTE": NOWHERE}, "the variable SPARK_REMOTE"),
        ("local[1]", {}, {"SPARK_API_MODE": "connect"}, "SPARK_API_MODE"),
    ],
)
def test_settings_that_ask_for_connect_are_refused_before_java_starts(
    master: str, conf: dict[str, str], variables: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("state_runtime.spark.session.require_java", lambda: pytest.fail("Java was looked for"))
    with pytest.raises(InvalidConfiguration) as told:
        build_session("job", master, conf)
    assert named in str(told.value)
    assert "Spark Connect" in str(told.value)
    assert "build_session(" in str(told.value)


def test_classic_settings_ask_for_no_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_API_MODE", "classic")
    assert session_conf("job", conf={"spark.api.mode": "classic"})["spark.api.mode"] == "classic"


def test_a_session_of_connect_is_refused_by_a_run(of_connect: Any, tmp_path: Path) -> None:
    job = StreamingJob("far", store=str(tmp_path / "store"))
    job.read(lambda spark: spark.readStream.format("rate").load()).key_by("value").aggregate(
        uid="n", n=aggregates.count()
    )
    with pytest.raises(InvalidConfiguration, match="the session is one of Spark Connect, which shows a job neither"):
        job.run(of_connect)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_frame_of_connect_is_refused_where_it_is_given(of_connect: Any, tmp_path: Path) -> None:
    """Where the line of the user's is; a function that makes one is looked at when its frame is there."""
    frame = of_connect.readStream.format("rate").load()
    job = StreamingJob("far", store=str(tmp_path / "store"))
    for what, give in (
        ("query()", lambda: job.query(frame)),
        ("read()", lambda: job.read(frame)),
        ("sql(): ticks", lambda: job.sql("SELECT value FROM ticks", ticks=frame)),
    ):
        with pytest.raises(InvalidConfiguration, match="one of Spark Connect") as told:
            give()
        assert str(told.value).startswith(what)


@pytest.mark.spark
def test_a_function_that_makes_a_frame_of_connect_is_refused_by_the_run(
    of_connect: Any, spark: Any, tmp_path: Path
) -> None:
    job = StreamingJob("far", store=str(tmp_path / "store"))
    job.query(lambda _: of_connect.readStream.format("rate").load())
    with pytest.raises(InvalidConfiguration, match=r"job 'far': the DataFrame of query\(\) is one of Spark Connect"):
        job.run(spark, trigger={"availableNow": True})


def test_what_is_not_of_connect_is_not_taken_for_it() -> None:
    for other in (session_of("4.3.0"), None, print, StreamingJob):
        refuse_connect(other, "it")
