"""Spark's own suites of transformWithState, bodies and assertions unmodified, through the stand-in."""

from __future__ import annotations

import functools
import re
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkConf
from pyspark.sql import SparkSession
from pyspark.testing.sqlutils import SQLTestUtils

from tests.spark_suite.stand_in import Replacement
from tests.spark_suite.suites import suite_module

pytestmark = [pytest.mark.spark, pytest.mark.spark_suite]

SUITES = {
    "rows": ("test_transform_with_state", "TransformWithStateInPySparkTestsMixin"),
    "pandas": ("test_pandas_transform_with_state", "TransformWithStateInPandasTestsMixin"),
    "rows_states": ("test_transform_with_state_state_variable", "TransformWithStateInPySparkStateVariableTestsMixin"),
    "pandas_states": (
        "test_pandas_transform_with_state_state_variable",
        "TransformWithStateInPandasStateVariableTestsMixin",
    ),
}

_SPARKS_ERROR = "it expects Spark's StreamingQueryException; ours is a typed error of our own"
_STATE_SOURCE = "it reads Spark's checkpoint with the statestore and state-metadata sources; ours is read by reading.*"
NOT_EXPRESSIBLE: dict[str, str] = {
    "test_not_nullable_fails": f"{_SPARKS_ERROR} (a state column that cannot be null, stored as Avro)",
    "test_schema_evolution_fails": f"{_SPARKS_ERROR} (a column of a state that would become narrower)",
    "test_transform_with_state_query_restarts": "it asks for metrics of Spark's state store (numValueStateVars)",
    "pandas.test_transform_with_state_int_to_decimal_coercion": "without coercion it expects an error: nothing is lost",
    "pandas.test_transform_with_state_with_bytes_limit": "arrow.maxBytesPerBatch has no effect here, and a warning",
    "test_transform_with_list_state_metadata": _STATE_SOURCE,
    "test_transform_with_value_state_metadata": _STATE_SOURCE,
    "test_transform_with_state_restart_with_multiple_rows_init_state": _STATE_SOURCE,
    "rows_states.test_transform_with_state_with_timers_single_partition": _STATE_SOURCE,
    "pandas_states.test_transform_with_state_with_timers_single_partition": _STATE_SOURCE,
}
"""Tests that cannot pass, and why; a name without a suite is meant in each. One that passes is a failure: strike it."""


def _mixin(suite: str) -> Any:
    module, name = SUITES[suite]
    return getattr(suite_module(module), name)


def _cases() -> Iterator[Any]:
    for suite in SUITES:
        for name in unittest.TestLoader().getTestCaseNames(_mixin(suite)):
            why = NOT_EXPRESSIBLE.get(f"{suite}.{name}", NOT_EXPRESSIBLE.get(name))
            marks = [pytest.mark.xfail(reason=why, strict=True)] if why else []
            yield pytest.param(suite, name, marks=marks, id=f"{suite}.{name}")


@pytest.mark.parametrize(("suite", "name"), _cases())
def test_spark_s_own_assertions_hold_for_our_jobs(spark: SparkSession, tmp_path: Path, suite: str, name: str) -> None:
    """The law of this package. What a test returns other than None says that it gave up on its way."""
    session = spark.newSession()
    mixin = _mixin(suite)
    for key, value in set(mixin.conf().getAll()) - set(SparkConf().getAll()):
        session.conf.set(key, value)
    case = type(suite, (mixin, SQLTestUtils, unittest.TestCase), {"spark": session})(name)
    body: Callable[[], Any] = getattr(case, name)
    given_up: list[Any] = []

    @functools.wraps(body)
    def watched() -> None:
        answer = body()
        if answer is not None:
            given_up.append(answer)

    setattr(case, name, watched)
    result = unittest.TestResult()
    with Replacement(session, tmp_path).installed():
        case.run(result)
    for _, trace in [*result.errors, *result.failures]:
        pytest.fail(trace, pytrace=False)
    for _, why in result.skipped:
        pytest.skip(f"Spark skips it: {why}")
    assert not given_up, "the test met another exception than it expects, and returned"


def test_the_documentation_lists_what_cannot_be_expressed() -> None:
    """docs/parity.md and the list say the same."""
    page = (Path(__file__).parents[2] / "docs" / "parity.md").read_text()
    section = page.partition("## Spark's own suites")[2].partition("## ")[0]
    assert set(re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE)) == set(NOT_EXPRESSIBLE)
    names = {name for suite in SUITES for name in unittest.TestLoader().getTestCaseNames(_mixin(suite))}
    assert {name.rpartition(".")[2] for name in NOT_EXPRESSIBLE} <= names
