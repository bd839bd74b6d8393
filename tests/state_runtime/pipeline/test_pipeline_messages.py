"""What a user is told who writes a pipeline as in Spark, or not quite as it has to be; and what is understood all the same."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import types as T
from pyspark.sql.classic.column import Column
from test_processors_handle import Calls

from state_runtime import StreamingJob, aggregates
from state_runtime.base.errors import InvalidPipeline, UserCodeError
from state_runtime.job import KeyedStream
from state_runtime.pipeline.compile import _check_dots
from state_runtime.pipeline.operators import ProcessorStep, _declared_states, _key_field, parse_schema
from state_runtime.pipeline.sources import way_to_key

OUT = "key string, n long"
SCHEMA = T.StructType([T.StructField("key", T.StringType()), T.StructField("s", T.StructType([T.StructField("id", T.LongType())]))])  # fmt: skip


@pytest.fixture
def stream(tmp_path: Path) -> Any:
    return StreamingJob("job", store=str(tmp_path)).read(lambda spark: spark)


def column(text: str) -> Any:
    """A column as Spark prints it, without a session."""
    return Column(SimpleNamespace(toString=lambda: text))  # type: ignore[arg-type]


def step_of(stream: Any) -> ProcessorStep:
    step: ProcessorStep = stream._steps[-1]
    return step


# --- keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [("a", "b"), (["a", "b"],), (("a", "b"),), (column("a"), "b"), ([column("a"), column("b")],)], ids=str
)
def test_keys_are_names_lists_of_names_and_plain_references(stream: Any, given: Any) -> None:
    """What `groupBy` takes of them in Spark."""
    assert stream.key_by(*given)._keys == ("a", "b")


@pytest.mark.parametrize("text", ["(a + b)", "a AS b", "upper(a)", "s.id", "`a.b`"])
def test_an_expression_as_key_is_refused_with_the_way_out(stream: Any, text: str) -> None:
    """A key is stored under the name of its column."""
    with pytest.raises(InvalidPipeline, match=rf"{re.escape(text)}.*\.withColumn"):
        stream.key_by(column(text))


@pytest.mark.parametrize("given", [(), ([],), (5,), (None,), ("a", "a"), (["a", column("a")],)], ids=str)
def test_what_names_no_columns_or_one_twice_is_refused(stream: Any, given: Any) -> None:
    """Before a job is built, and never as a TypeError."""
    with pytest.raises(InvalidPipeline, match=r"key_by\("):
        stream.key_by(*given)


def test_a_missing_key_says_which_column_was_probably_meant() -> None:
    """Spark does not tell case apart unless it is told to, and takes fields of structs for keys."""
    with pytest.raises(InvalidPipeline, match=r"no key column 'kEY'; the input has key, s\. Write key_by\('key'\)"):
        _key_field(SCHEMA, "kEY", "u")
    with pytest.raises(InvalidPipeline, match=r"withColumn\('s_id', col\('s\.id'\)\)\)\.key_by\('s_id'\)"):
        _key_field(SCHEMA, "s.id", "u")
    assert way_to_key("other", SCHEMA) == ""
    assert way_to_key("other.id", SCHEMA) == ""


def test_a_dot_in_a_columns_name_is_refused_by_that_name() -> None:
    """Spark would complain about columns of ours that nobody has heard of."""
    with pytest.raises(InvalidPipeline, match=r"column 'a\.b' has a dot.*withColumnRenamed\('a\.b', 'a_b'\)"):
        _check_dots(T.StructType([*SCHEMA.fields, T.StructField("a.b", T.LongType())]))
    _check_dots(SCHEMA)


# --- Spark's words -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["transform_with_state", "transform_with_state_in_pandas"])
def test_sparks_names_of_arguments_and_their_order_are_understood(stream: Any, name: str) -> None:
    """So that only the `uid` has to be added to a call that was written for Spark."""
    processor = Calls()
    expected = (processor, OUT, "append", "event", "at", None)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((processor, OUT, "append", "eventTime", None, "at"), {}),
        (
            (),
            {
                "statefulProcessor": processor, "outputStructType": OUT, "outputMode": "Append",
                "timeMode": "EventTime", "initialState": None, "eventTimeColumnName": "at",
            },
        ),
        ((processor,), {"output_schema": OUT, "output_mode": "append", "timeMode": "eventTime", "event_time_column": "at"}),
    ]  # fmt: skip
    for number, (given, named) in enumerate(calls):
        method = getattr(KeyedStream(stream._chain, stream._chain.steps, ("key",)), name)
        step = step_of(method(*given, uid=f"u{number}", **named))
        found = (step.processor, step.output_schema, step.output_mode, step.time_mode, step.event_time_column, step.initial_state)  # fmt: skip
        assert found == expected


@pytest.mark.parametrize(
    ("given", "named", "said"),
    [
        ((Calls(), OUT), {}, r'needs uid="…"'),
        ((Calls(), OUT), {"uid": "u", "outputStructType": OUT}, "output_schema twice; in Spark it is named outputStructType"),
        ((Calls(), OUT), {"uid": "u", "outputmode": "x"}, r"outputmode is none of its arguments; .*output_mode \(outputMode\)"),
        ((Calls(), OUT, "a", "b", None, "c", "d"), {"uid": "u"}, "got 7 arguments"),
        ((Calls(),), {"uid": "u"}, "needs output_schema; in Spark it is named outputStructType"),
        ((), {"uid": "u", "outputStructType": OUT}, "needs processor; in Spark it is named statefulProcessor"),
        ((Calls, OUT), {"uid": "u"}, r"got the class Calls; give an instance of it: Calls\(\)"),
    ],
)  # fmt: skip
def test_other_arguments_are_refused_by_name(stream: Any, given: Any, named: Any, said: str) -> None:
    """With our word and Spark's for what is missing."""
    with pytest.raises(InvalidPipeline, match=said):
        stream.key_by("key").transform_with_state(*given, **named)


# --- what a processor does before the job starts ---------------------------------------------------------------------


class Broken(Calls):
    def __init__(self, **broken: Any) -> None:
        super().__init__()
        self.broken = broken

    def init(self, handle: Any) -> None:
        self.broken.get("init", lambda: None)()

    def close(self) -> None:
        self.broken.get("close", lambda: None)()


@pytest.mark.parametrize("given", ["complete", "", aggregates.count()], ids=str)
def test_aggregates_have_two_output_modes(stream: Any, given: Any) -> None:
    """In any spelling, as in Spark; an aggregate cannot have the argument's name."""
    (step,) = stream.key_by("key").aggregate(uid="u", output_mode="Append", n=aggregates.count())._steps
    assert step.output_mode == "append"
    for keyed in (stream, stream.key_by("key")):
        with pytest.raises(InvalidPipeline, match=r"operator 'a': output_mode .* must be update or append"):
            keyed.aggregate(uid="a", output_mode=given, n=aggregates.count())


def declared(processor: Any) -> Any:
    return _declared_states(ProcessorStep(uid="u", keys=("key",), processor=processor, output_schema=OUT, pandas=False))


@pytest.mark.parametrize("method", ["init", "close"])
@pytest.mark.parametrize(
    ("fail", "said"), [(lambda: {}["missing"], "KeyError: 'missing'"), (lambda: sys.exit(2), "SystemExit: 2")]
)
def test_an_error_before_the_start_names_the_method_and_the_line(method: str, fail: Any, said: str) -> None:
    """`close` is called there too."""
    at = rf"\({re.escape(__file__)}, line \d+, in <lambda>\)"
    with pytest.raises(UserCodeError, match=rf"operator 'u': {method}\(\) of Broken raised {said} {at}"):
        declared(Broken(**{method: fail}))


def test_a_processor_that_cannot_be_copied_is_told_apart_from_one_that_fails() -> None:
    """Every task gets a copy of it; nothing of the user's was called yet."""
    with pytest.raises(InvalidPipeline, match=r"Broken cannot be copied .*lock.*in init\(\), not in __init__\(\)"):
        declared(Broken(lock=threading.Lock()))


def test_ddl_that_cannot_be_parsed_is_shown_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's message begins with an empty line."""

    def refuse(text: str) -> Any:
        raise ValueError("\n[PARSE_SYNTAX_ERROR] Syntax error at or near 'lnog'.\n\n== SQL ==\n")

    monkeypatch.setattr(T.StructType, "fromDDL", refuse)
    with pytest.raises(
        InvalidPipeline, match=r"the output cannot be parsed: \[PARSE_SYNTAX_ERROR\] Syntax.*in 'n lnog'"
    ):
        parse_schema("n lnog", "the output")
