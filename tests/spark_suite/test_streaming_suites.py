"""Spark's Scala suites of stateful streaming: their inputs, through `job.query`, and the rows that they assert."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from state_runtime.base.errors import InvalidPipeline

from .all_suites import SUITES
from .page import PAGE, section_of, written
from .stream_test import Case, OnOurJobs, OnSpark, play

pytestmark = pytest.mark.spark

CONF = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
}


def _params(*, on_spark: bool) -> Iterator[Any]:
    for suite in SUITES:
        for case in suite.cases:
            marks = [] if case.quick and not on_spark else [pytest.mark.spark_suite]
            yield pytest.param(case, marks=marks, id=f"{suite.name}-{case.name}")


@contextmanager
def _settings(spark: SparkSession, case: Case) -> Iterator[None]:
    no_data = {"spark.sql.streaming.noDataMicroBatches.enabled": str(case.no_data_batches).lower()}
    wanted = {**CONF, **no_data, **case.conf}
    before = {name: spark.conf.get(name, None) for name in wanted}
    for name, value in wanted.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            spark.conf.unset(name) if old is None else spark.conf.set(name, old)


def check(case: Case, engine: Any, spark: SparkSession, root: Path) -> None:
    """Play a case; where Spark's test asserts an error, its words have to be in the error."""
    with _settings(spark, case):
        if not case.says:
            play(case, engine, spark, root)
            return
        with pytest.raises(Exception) as refused:
            play(case, engine, spark, root)
        wanted = case.says_here if case.says_here and isinstance(engine, OnOurJobs) else case.says
        assert [words for words in wanted if words.lower() not in str(refused.value).lower()] == []


@pytest.mark.parametrize("case", [*_params(on_spark=False)])
def test_our_jobs_give_what_spark_s_suite_asserts(spark: SparkSession, tmp_path: Path, case: Case) -> None:
    """The law of this module: of the same input, batch by batch, the same rows and the same watermark; or the query is
    refused by name."""
    expected = pytest.raises(InvalidPipeline, match=re.escape(case.refused)) if case.refused else nullcontext()
    with expected:
        check(case, OnOurJobs(spark, tmp_path, case), spark, tmp_path)


@pytest.mark.parametrize("case", [*_params(on_spark=True)])
def test_spark_gives_what_its_suite_asserts(spark: SparkSession, tmp_path: Path, case: Case) -> None:
    """An expectation that Spark's own streaming does not meet was copied wrongly."""
    check(case, OnSpark(spark, tmp_path, case), spark, tmp_path)


def test_the_page_says_which_tests_are_run_and_why_others_are_not() -> None:
    """docs/parity.md and the cases say the same, in numbers and names."""
    assert section_of(PAGE.read_text()) == written(), "python -m tests.spark_suite.page writes it"


def test_no_test_is_run_and_listed_as_not_run() -> None:
    for suite in SUITES:
        assert {case.test for case in suite.cases}.isdisjoint(suite.not_run), suite.name
        assert len({case.name for case in suite.cases}) == len(suite.cases), suite.name
