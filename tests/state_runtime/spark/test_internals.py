"""What is missing of Spark is refused once and for all; what merely went wrong is not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pyspark
import pytest
from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark.errors import PySparkTypeError

from state_runtime.spark.internals import INTERNALS, Internal, given, private_of
from tests.refusal import everything_refused, nothing_known

USE = Internal.JOB_COUNT
NO_METHOD = "An error occurred while calling o1.new. Trace:\npy4j.Py4JException: Method new([]) does not exist"


@pytest.fixture(autouse=True)
def untried() -> Iterator[None]:
    with nothing_known():
        yield


class OfJava(Py4JJavaError):
    """An exception that Java threw in a call."""

    def __init__(self) -> None:
        self.java_exception = None

    def __str__(self) -> str:
        return "AnalysisException"


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("_jdf"),
        TypeError("'JavaPackage' object is not callable"),
        ImportError("gone"),
        Py4JError(NO_METHOD),
    ],
)
def test_what_is_not_there_is_asked_for_once(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """A look at every epoch for what is not there would cost as much as what it saves."""
    asked: list[int] = []

    def inner() -> str:
        asked.append(1)
        raise error

    with caplog.at_level(logging.WARNING):
        assert [given(USE, inner, lambda: "public") for _ in range(3)] == ["public"] * 3
    assert len(asked) == 1
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"{USE.value}: Spark {pyspark.__version__} is made in another way inside")
    assert str(error).splitlines()[0] in told
    assert given(Internal.PLANS, lambda: "inner", lambda: "public") == "inner"


@pytest.mark.parametrize(
    "error",
    [
        OfJava(),
        Py4JNetworkError("closed"),
        Py4JError("An error occurred while calling o1.count"),
        Py4JError("Target Object ID does not exist for this gateway :o7"),
        PySparkTypeError("a value that pyspark refuses"),
    ],
)
def test_an_exception_of_javas_and_an_ended_java_are_no_refusal(error: Exception) -> None:
    """A session that lost its Java, and a plan that Spark could not make, would turn a way off that is there."""

    def inner() -> str:
        raise error

    with pytest.raises(type(error)):
        given(USE, inner, lambda: "public")
    assert not INTERNALS.is_refused(USE)
    INTERNALS.refuse(USE, Py4JNetworkError("closed"))
    assert not INTERNALS.is_refused(USE)


def test_the_refusal_of_the_tests_reaches_what_pyspark_hides() -> None:
    """A refusal that lets something through would prove nothing."""
    assert private_of("pyspark.util", "PythonEvalType")
    with everything_refused(), pytest.raises(AttributeError, match="is refused"):
        private_of("pyspark.util", "PythonEvalType")
    assert given(USE, lambda: private_of("no.such.module", "x"), lambda: SimpleNamespace(a=1)).a == 1
    assert INTERNALS.is_refused(USE)
