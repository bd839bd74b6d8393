"""What a user is told who writes a pipeline as in Spark, or not quite as it has to be; and what is understood all the same."""

from __future__ import annotations

import ast
import builtins
import copy
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import DataFrame, functions
from pyspark.sql import types as T
from pyspark.sql.classic.column import Column
from pyspark.sql.streaming.readwriter import DataStreamReader
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from test_processors_handle import Calls

import state_runtime
from state_runtime import KeyedBatch, StreamingJob, VectorizedProcessor, aggregates, foreach_epoch, windows
from state_runtime.base.errors import InvalidConfiguration, InvalidPipeline, UserCodeError
from state_runtime.base.usercode import step_at
from state_runtime.driver.trigger import sparks_trigger
from state_runtime.job import KeyedStream, Stream
from state_runtime.pipeline.compile import _check_for_arrow
from state_runtime.pipeline.graph import Graph, SourceNode
from state_runtime.pipeline.key_names import way_to_key
from state_runtime.pipeline.operators import ProcessorStep, _declared_states, _key_field, parse_schema
from state_runtime.pipeline.sources import open_sources

OUT = "key string, n long"
SCHEMA = T.StructType([T.StructField("key", T.StringType()), T.StructField("s", T.StructType([T.StructField("id", T.LongType())]))])  # fmt: skip


@pytest.fixture
def stream(tmp_path: Path) -> Any:
    return StreamingJob("job", store=str(tmp_path)).read(lambda spark: spark)


def column(text: str) -> Any:
    """A column as Spark prints it, without a session."""
    return Column(SimpleNamespace(toString=lambda: text))  # type: ignore[arg-type]


def step_of(stream: Any) -> ProcessorStep:
    step: ProcessorStep = stream._pipeline.graph.nodes[-1].step
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
        _check_for_arrow(T.StructType([*SCHEMA.fields, T.StructField("a.b", T.LongType())]))
    _check_for_arrow(SCHEMA)


@pytest.mark.parametrize("within", ["{}", "ARRAY<{}>", "MAP<STRING, {}>", "STRUCT<x: {}>"])
def test_a_struct_with_two_fields_of_a_name_is_refused_by_that_name(within: str) -> None:
    """Spark has such structs (arrays_zip of one column with itself), and hands none to Python: the job would fail in its
    first epoch."""

    def struct(*names: str) -> T.StructType:
        return T.StructType([T.StructField(name, T.LongType()) for name in names])

    def schema(inner: T.DataType) -> T.StructType:
        wrapped = {
            "{}": inner,
            "ARRAY<{}>": T.ArrayType(inner),
            "MAP<STRING, {}>": T.MapType(T.StringType(), inner),
            "STRUCT<x: {}>": T.StructType([T.StructField("x", inner)]),
        }[within]
        return T.StructType([*SCHEMA.fields, T.StructField("both", wrapped)])

    with pytest.raises(InvalidPipeline, match=r"column 'both' holds a struct with two fields 'a'"):
        _check_for_arrow(schema(struct("a", "b", "a")))
    _check_for_arrow(schema(struct("a", "b")))


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
        method = getattr(KeyedStream(stream._pipeline, stream._rows, ("key",)), name)
        step = step_of(method(*given, uid=f"u{number}", **named))
        found = (step.processor, step.output_schema, step.output_mode, step.time_mode, step.event_time_column, step.initial_state)  # fmt: skip
        assert found == expected


@pytest.mark.parametrize(
    ("given", "named", "said"),
    [
        ((Calls(), OUT), {}, r'needs uid="…"'),
        ((Calls(), OUT), {"uid": "u", "outputStructType": OUT}, "output_schema twice; in Spark it is named outputStructType"),
        ((Calls(), OUT), {"uid": "u", "outputmode": "x"}, r"outputmode is not one of its arguments; .*output_mode \(outputMode\)"),
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


@pytest.mark.parametrize("given", ["completed", "", aggregates.count()], ids=str)
def test_aggregates_have_three_output_modes(stream: Any, given: Any) -> None:
    """In any spelling, as in Spark; an aggregate cannot have the argument's name."""
    step: Any = step_of(stream.key_by("key").aggregate(uid="u", output_mode="Append", n=aggregates.count()))
    assert step.output_mode == "append"
    for keyed in (stream, stream.key_by("key")):
        with pytest.raises(InvalidPipeline, match=r"operator 'a': output_mode .* must be update, append or complete"):
            keyed.aggregate(uid="a", output_mode=given, n=aggregates.count())


def declared(processor: Any) -> Any:
    return _declared_states(ProcessorStep(uid="u", processor=processor, output_schema=OUT, pandas=False))


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


# --- where it stands, and what it names ------------------------------------------------------------------------------


def at(line: int) -> str:
    return rf"\({re.escape(__file__)}, line {line}\)"


def here() -> int:
    """The caller's line."""
    return sys._getframe(1).f_lineno


def test_a_pipeline_that_cannot_be_built_names_the_line_of_the_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever is wrong with a step or with the source: what is said is said with the line that wrote it."""
    job, steps = StreamingJob("job", store=str(tmp_path)), here()
    keyed = job.read(lambda spark: spark).transform(lambda df: df).key_by("k")
    keyed.deduplicate(
        uid="once"
    ).write(foreach_epoch(print))  # fmt: skip
    plan = job.plan()
    assert [re.fullmatch(at(line), f"({place})") is not None for line, place in zip(
        (steps + 1, steps + 1, steps + 2, steps + 4), (node.at for node in plan.graph.nodes), strict=True
    )] == [True] * 4  # fmt: skip
    monkeypatch.setattr("state_runtime.pipeline.sources._frame", raises)
    with pytest.raises(InvalidPipeline, match=f"it does not fit {at(steps + 1)}"):
        plan.opened_sources(None)  # type: ignore[arg-type]


def raises(*_: Any) -> Any:
    raise InvalidPipeline("it does not fit")


def test_an_error_while_a_job_is_built_names_the_line_once() -> None:
    """Also through another place that adds it; other errors are left alone."""
    with pytest.raises(InvalidPipeline) as told, step_at(), step_at("jobs.py, line 1"), step_at("jobs.py, line 1"):
        raises()
    assert str(told.value).startswith("it does not fit (jobs.py, line 1) (")
    assert str(told.value).count("jobs.py") == 1
    with pytest.raises(UserCodeError, match=r"^broken\Z"), step_at("jobs.py, line 1"):
        raise UserCodeError("broken")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda s: s.transform_with_state(1), r"a Stream has no .*: say by which key: \.key_by\(…\)\.transform_with_state"),
        (lambda s: s.transformWithStateInPandas(1), r"\.key_by\(…\)\.transform_with_state_in_pandas"),
        (lambda s: s.deduplicate(uid="u"), r"\.key_by\(…\)\.deduplicate"),
        (lambda s: s.withWatermark("t", "1 s"), r"withWatermark\(…\) on the stream that read\(\) returns"),
        (lambda s: s.groupBy("k"), r"key_by\(…\) says"),
        (lambda s: s.select("k"), r"\.transform\(lambda df: df\.select\(…\)\)"),
        (lambda s: s.agregate(uid="u"), r"its methods are aggregate, expect_or_drop, key_by, output, transform, union, union_by_name, window, write"),
        (lambda s: s.key_by("k").write(None), r"a KeyedStream has no write.* must follow key_by\(…\)"),
        (lambda s: s.key_by("k").transformWithState(1), r"here it is transform_with_state\(…\)"),
    ],
)  # fmt: skip
def test_a_method_that_a_stream_does_not_have_says_which_one_is_meant(stream: Any, call: Any, said: str) -> None:
    """No bare AttributeError; `hasattr` and copies work as with any object."""
    with pytest.raises(InvalidPipeline, match=said):
        call(stream)
    assert not hasattr(stream, "transform_with_state")
    assert copy.copy(stream)._rows == stream._rows


SPARKS_TIME_MODES = {"ProcessingTime", "EventTime"}  # of Scala's TimeMode, in whose words Spark says it too
NAMED = re.compile(r"(?<![\w\\])\.?([A-Za-z_]\w+)\((?:…|\))")


def methods_named_in_errors() -> dict[str, str]:
    """By the name of each method that a function which raises `InvalidPipeline` has in a text: where."""
    found = {}
    for file in sorted((Path(__file__).parents[3] / "state_runtime").rglob("*.py")):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and "InvalidPipeline" in ast.dump(function):
                body = function.body[1:] if ast.get_docstring(function) else function.body
                for node in [n for part in body for n in ast.walk(part)]:
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        found.update(dict.fromkeys(NAMED.findall(node.value), f"{file.name}:{node.lineno}"))
    return found


def test_every_method_that_an_error_of_a_pipeline_names_exists() -> None:
    """A user types what the message says."""
    homes = [StreamingJob, Stream, KeyedStream, DataFrame, Column, DataStreamReader, StatefulProcessor, Calls]
    homes += [VectorizedProcessor, KeyedBatch, functions, state_runtime, aggregates, windows, builtins]
    known = {name for home in homes for name in dir(home)} | {*state_runtime.__all__, *SPARKS_TIME_MODES}
    named = methods_named_in_errors()
    assert {"key_by", "transform", "interval_join"} <= named.keys()
    assert {name: where for name, where in named.items() if name not in known and not name.isupper()} == {}  # SQL's


def test_a_connector_that_is_missing_is_one_sentence_with_the_line_to_add(tmp_path: Path) -> None:
    def read(_: Any) -> Any:
        raise ValueError("Failed to find data source: kafka. Please deploy the application as per …")

    with pytest.raises(InvalidPipeline) as told:
        open_sources(None, "orders", Graph((SourceNode("", read),)))  # type: ignore[arg-type]
    assert re.fullmatch(
        r"job 'orders': Spark has no connector for Kafka; .* spark: \{conf: \{spark\.jars\.packages: "
        r"org\.apache\.spark:spark-sql-kafka-0-10_2\.13:\d+\.\d+\.\d+\}\} \(the version of Spark, .*\), or read "
        r"with stillstate\.sources\.kafka, which needs none",
        str(told.value),
    )


@pytest.mark.parametrize(
    ("given", "sparks"),
    [
        (None, None),
        ({}, None),
        ({"processing_time_s": 1}, {"processingTime": "1000 milliseconds"}),
        ({"processing_time_s": 0.5}, {"processingTime": "500 milliseconds"}),
        ({"available_now": True}, {"availableNow": True}),
        ({"processingTime": "1 second"}, {"processingTime": "1 second"}),
        ({"availableNow": True}, {"availableNow": True}),
    ],
)
def test_a_trigger_is_written_as_in_the_file_or_as_in_spark(given: Any, sparks: Any) -> None:
    assert sparks_trigger(given) == sparks


@pytest.mark.parametrize(
    "given",
    ["1 second", {"every": 1}, {"processing_time_s": 0}, {"processing_time_s": "1"}, {"available_now": False}, {"continuous": "1 second"}, {"availableNow": True, "processingTime": "1 second"}],
)  # fmt: skip
def test_another_trigger_is_refused_before_anything_begins(given: Any) -> None:
    with pytest.raises(InvalidConfiguration, match=r'must be \{"processing_time_s": 1\}'):
        sparks_trigger(given)
