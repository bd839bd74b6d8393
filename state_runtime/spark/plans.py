"""Questions about the plan of a frame, answered in Python values.

The plan itself is asked. If its internals differ, the output of `DataFrame.explain` is parsed: the same nodes line by
line, without their content.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession

from state_runtime.spark.internals import Internal, given
from state_runtime.spark.jvm import analyzed, classes, items, java_context, java_session, kind_of, paths_to

__all__ = [
    "PlanNode",
    "StreamSource",
    "contains",
    "expressions_in",
    "fits_pattern",
    "has_python",
    "job_watch",
    "kinds_above",
    "plan_of",
    "plan_printed",
    "scheme_of",
    "stream_sources",
]

_ANALYZED: Final = "== Analyzed Logical Plan =="
_LINE = re.compile(r"(?P<indent>(?:[: ] {2})*)(?P<branch>[:+]- )?(?P<streams>~?)'?(?P<kind>[A-Za-z]\w*)(?P<text>.*)")
_STREAM: Final = "StreamingRelation"
_V2_NAME = re.compile(r"StreamingRelationV2 \S+, ([^,]+),")
_RANDOM = re.compile(r"\b(rand|randn|random|uniform|uuid|shuffle|randstr|randstring)\(")


@dataclass(frozen=True)
class PlanNode:
    """A node of a plan.

    Attributes:
        kind: its class, as `Filter`.
        is_streaming: whether its rows are a stream's.
        text: as Spark prints it, without its children; "" unless it was printed.
    """

    kind: str
    is_streaming: bool
    children: tuple[PlanNode, ...] = ()
    text: str = ""

    def nodes(self) -> Iterator[PlanNode]:
        """Yield this node, and all nodes below it."""
        yield self
        for child in self.children:
            yield from child.nodes()


@dataclass(frozen=True)
class StreamSource:
    """A source of a streaming frame.

    Attributes:
        name: of its format, if Spark's plan has it; else "".
        options: as the user wrote them, with keys in lower case; empty if they are not known.
    """

    name: str
    options: Mapping[str, str]


def plan_of(frame: DataFrame) -> PlanNode:
    """Return a frame's plan with all names resolved."""
    return given(Internal.PLANS, lambda: _node(analyzed(frame)), lambda: plan_printed(frame))


def _node(plan: Any) -> PlanNode:
    return PlanNode(kind_of(plan), bool(plan.isStreaming()), tuple(map(_node, items(plan.children()))))


def plan_printed(frame: DataFrame) -> PlanNode:
    """Return the same plan, as `explain` prints it; plans of subqueries are left out."""
    printed = io.StringIO()
    # Python has one standard output: text that another thread prints in these milliseconds is lost.
    with redirect_stdout(printed):
        frame.explain(extended=True)
    _, _, behind = printed.getvalue().partition(_ANALYZED)
    lines = behind.partition("\n==")[0].strip("\n").splitlines()[1:]  # the first one names the columns
    found = [(depth, match) for line in lines if (depth := _depth(match := _LINE.match(line))) is not None and match]
    if not found:
        raise ValueError("DataFrame.explain prints no analyzed plan")
    node, _ = _printed(found, 0)
    return node


def _depth(match: re.Match[str] | None) -> int | None:
    if match is None:
        return None
    return len(match["indent"]) // 3 + (match["branch"] is not None)


def _printed(lines: Sequence[tuple[int, re.Match[str]]], at: int) -> tuple[PlanNode, int]:
    """Return the node of a line, and the first line after those of its children."""
    depth, line = lines[at]
    children: list[PlanNode] = []
    at += 1
    while at < len(lines) and lines[at][0] > depth:
        child, behind = _printed(lines, at)
        if lines[at][0] == depth + 1:  # two steps to the right is a subquery of the node
            children.append(child)
        at = behind
    is_streaming = bool(line["streams"]) or line["kind"].startswith(_STREAM)
    return PlanNode(line["kind"], is_streaming, tuple(children), line["kind"] + line["text"]), at


def kinds_above(before: DataFrame, made: DataFrame) -> frozenset[str]:
    """Return the classes of the plan nodes between a frame and a frame that was made of it."""

    def inner() -> frozenset[str]:
        start = analyzed(before)
        paths = paths_to(lambda node: bool(start.equals(node)), analyzed(made))
        return frozenset(kind_of(node) for path in paths for node in path)

    def public() -> frozenset[str]:
        start = plan_printed(before)
        return frozenset(_kinds_above(start, plan_printed(made), ()))

    return given(Internal.PLANS, inner, public)


def _kinds_above(start: PlanNode, node: PlanNode, above: tuple[str, ...]) -> Iterator[str]:
    if node == start:
        yield from above
        return
    for child in node.children:
        yield from _kinds_above(start, child, (*above, node.kind))


def expressions_in(frame: DataFrame) -> list[tuple[str, bool]]:
    """Return each expression of a frame's plan as Spark prints it, and whether it is deterministic for the same row."""

    def inner() -> list[tuple[str, bool]]:
        found: list[tuple[str, bool]] = []
        nodes = [analyzed(frame)]
        while nodes:
            node = nodes.pop()
            found += [(str(e.toString()), bool(e.deterministic())) for e in items(node.expressions())]
            nodes += items(node.children())
        return found

    def public() -> list[tuple[str, bool]]:
        printed = [text for node in plan_printed(frame).nodes() for text in _parts(node.text.partition(" ")[2])]
        return [(text, _RANDOM.search(text) is None) for text in printed]

    return given(Internal.PLANS, inner, public)


def _parts(text: str) -> list[str]:
    """Return the texts between the outer commas of `[a, f(b, c)]`; any other text as a whole."""
    if not (text.startswith("[") and text.endswith("]")):
        return [text]
    parts, depth = [""], 0
    for character in text[1:-1]:
        depth += (character in "([") - (character in ")]")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def has_python(frame: DataFrame) -> bool:
    """Return whether a frame's plan may hand rows to Python: a UDF, or a function of Arrow batches or pandas frames."""
    return given(Internal.PLANS, lambda: contains(frame, "PYTHON_UDF"), lambda: True)


def contains(frame: DataFrame, pattern: str) -> bool:
    """Return whether Spark finds a pattern in a frame's plan; asked of the JVM, without a public way."""
    patterns = classes(frame.sparkSession).org.apache.spark.sql.catalyst.trees.TreePattern
    return bool(analyzed(frame).containsPattern(getattr(patterns, pattern)()))


def stream_sources(frame: DataFrame) -> list[StreamSource]:
    """Return the sources of a streaming frame, in the order of its plan."""

    def inner() -> list[StreamSource]:
        return [s for leaf in items(analyzed(frame).collectLeaves()) if (s := _source(leaf)) is not None]

    def public() -> list[StreamSource]:
        leaves = [node for node in plan_of(frame).nodes() if node.kind.startswith(_STREAM)]
        return [StreamSource(name[1] if (name := _V2_NAME.match(leaf.text)) else "", {}) for leaf in leaves]

    return given(Internal.SOURCE_OPTIONS, inner, public)


def _source(leaf: Any) -> StreamSource | None:
    kind = kind_of(leaf)
    if kind == _STREAM:
        options = leaf.dataSource().options()
        return StreamSource("", {str(k).lower(): str(options.apply(k)) for k in items(options.keys().toSeq())})
    if not kind.startswith(_STREAM):
        return None
    return StreamSource(str(leaf.sourceName()), {})


def fits_pattern(spark: SparkSession, pattern: str) -> tuple[bool, bool] | None:
    """Return whether any file or folder fits a Hadoop pattern, and whether one has exactly this name; None: unknown."""

    def inner() -> tuple[bool, bool]:
        path = classes(spark).org.apache.hadoop.fs.Path(pattern)
        files = path.getFileSystem(java_session(spark).sessionState().newHadoopConf())
        return bool(files.globStatus(path)), bool(files.exists(path))

    try:
        return given(Internal.PATH_PATTERNS, inner, lambda: None)
    except Py4JJavaError:  # the file system does not answer, or the pattern is malformed
        return None


def scheme_of(spark: SparkSession, path: str) -> str | None:
    """Return the scheme of the file system that Spark takes a path for, which may have none itself; None: unknown."""

    def inner() -> str:
        found = classes(spark).org.apache.hadoop.fs.Path(path)
        files = found.getFileSystem(java_session(spark).sessionState().newHadoopConf())
        return str(files.getUri().getScheme())

    try:
        return given(Internal.PATH_PATTERNS, inner, lambda: None)
    except Py4JJavaError:  # the file system does not answer
        return None


def job_watch(spark: SparkSession) -> Callable[[], bool]:
    """Return a function that says whether Spark has begun a job since; True also if that is not known.

    Spark's `statusTracker` learns of a job some time after it began, so it cannot be used.
    """
    before = _jobs_so_far(spark)
    return lambda: before is None or _jobs_so_far(spark) != before


def _jobs_so_far(spark: SparkSession) -> int | None:
    def inner() -> int:
        return int(java_context(spark.sparkContext).sc().dagScheduler().numTotalJobs())

    return given(Internal.JOB_COUNT, inner, lambda: None)
