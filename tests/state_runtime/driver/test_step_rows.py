"""The rows of each step of a run: every row is counted where it was seen, and an unknown number is none."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from state_runtime.base.progress import Progress, RowsAside
from state_runtime.driver.step_rows import NAMES_BYTES_MAX, StepRows
from state_runtime.pipeline.graph import Edge, Graph, OperatorNode, Port, SegmentNode, SinkNode, SourceNode
from state_runtime.pipeline.staged import StagedFiles
from state_runtime.snapshot.manifest import LayerEntry, Manifest, OperatorEntry, StagedFile
from state_runtime.snapshot.term_files import RunStatus
from state_runtime.task.acknowledgement import Acknowledgement

EMPTY = Manifest(1, "j" * 32, 1, 1, "c", "fencing", 0, 2, operators=(OperatorEntry("a", "k", "", ()),))
STORED = replace(EMPTY, layers=(LayerEntry(1, 1, ()),), progress=Progress(state_rows=70))


def operator(uid: str, *reads: int) -> OperatorNode:
    return OperatorNode(SimpleNamespace(uid=uid, kind="aggregate"), tuple(Port(Edge(n), ("k",)) for n in reads))


def pipeline(*nodes: Any, inputs: dict[int, int] | None = None) -> Any:
    """Compiled by hand: a stage for each operator, and one for the sinks of any other node."""
    graph = Graph(nodes)
    at = [n for n, node in enumerate(nodes) if isinstance(node, OperatorNode)]
    at += sorted({node.input.node for node in nodes if isinstance(node, SinkNode)} - set(at))
    stages = [SimpleNamespace(node=n) for n in sorted(at)]
    return SimpleNamespace(
        graph=graph,
        stages=stages,
        united=None if inputs is None else SimpleNamespace(nodes=inputs),
        bounded_sources=[node.name for node in nodes if getattr(node, "max_ahead_ms", None) is not None],
        expectations=[
            n for n, node in enumerate(nodes) if isinstance(node, SegmentNode) and node.code.kind == "expect_or_drop"
        ],
    )


def task(stage: int, rows: int, late: int = 0, added: int = 0, **written: int) -> Acknowledgement:
    staged = tuple(StagedFiles(sink, (StagedFile("a", "b", 1, count),)) for sink, count in written.items())
    return Acknowledgement(
        epoch="e", stage=stage, shard=0, input_rows=rows, late_rows=late, rows_added=added, staged=staged
    )


def rows_of(counted: StepRows) -> list[tuple[int | None, int | None, int | None]]:
    return [(s.rows, s.late_rows, s.state_rows) for s in counted.steps]


SOURCE = SourceNode("", None)


def test_epochs_add_up_step_by_step() -> None:
    """Tasks of a stage, and epochs one after the other; a transform's rows are counted by nobody."""
    segment = SegmentNode((Edge(1),), SimpleNamespace(kind="transform", name="large"))
    steps = StepRows.begun(
        pipeline(SOURCE, operator("a", 0), segment, operator("b", 2), SinkNode("out", None, Edge(3))), EMPTY
    )
    assert rows_of(steps) == [(0, None, None), (0, 0, 0), (None, None, None), (0, 0, 0), (0, None, None)]
    steps = steps.after([task(0, 10, late=1, added=4), task(0, 5, added=-1), task(1, 7, out=6)])
    steps = steps.after([task(0, 1, late=2, added=1), task(1, 1, out=1)])
    assert rows_of(steps) == [(16, None, None), (16, 3, 4), (None, None, None), (8, 0, 0), (7, None, None)]
    assert [(s.kind, s.name, s.reads) for s in steps.steps] == [
        ("source", "", ()),
        ("aggregate", "a", (0,)),
        ("transform", "large", (1,)),
        ("aggregate", "b", (2,)),
        ("sink", "out", (3,)),
    ]


def test_a_source_that_two_operators_read_is_counted_once() -> None:
    """Both get the same rows."""
    steps = StepRows.begun(pipeline(SOURCE, operator("a", 0), operator("b", 0)), EMPTY)
    assert rows_of(steps.after([task(0, 10), task(1, 10)]))[0] == (10, None, None)


def test_a_source_behind_a_transform_is_not_counted() -> None:
    """What a transform leaves of its rows is not how many there were."""
    segment = SegmentNode((Edge(0),), SimpleNamespace(kind="transform", name="large"))
    steps = StepRows.begun(pipeline(SOURCE, segment, operator("a", 1)), EMPTY).after([task(0, 10)])
    assert [s.rows for s in steps.steps] == [None, None, 10]


def test_each_of_several_sources_has_its_own_rows() -> None:
    """As Spark counted them, in the order of its inputs; an epoch without a batch has none."""
    nodes = (SourceNode("x", None), SourceNode("y", None), operator("a", 0), operator("b", 1))
    steps = StepRows.begun(pipeline(*nodes, inputs={0: 1, 1: 0}), EMPTY)
    steps = steps.after([task(0, 3), task(1, 4)], (4, 3)).after([], ())
    assert [s.rows for s in steps.steps] == [3, 4, 3, 4]


def test_state_that_a_run_begins_with_is_told_only_where_it_is_known() -> None:
    """A snapshot has the rows of all operators together: of one operator they are its own; a new one has none."""
    two = pipeline(SOURCE, operator("a", 0), operator("b", 0))
    both = replace(STORED, operators=(*STORED.operators, OperatorEntry("b", "k", "", ())))
    assert [s.state_rows for s in StepRows.begun(two, STORED).after([task(0, 9, added=2)]).steps] == [None, 72, 0]
    assert [s.state_rows for s in StepRows.begun(two, both).after([task(0, 9, added=2)]).steps] == [None, None, None]
    assert [s.state_rows for s in StepRows.begun(two, EMPTY).after([task(0, 9, added=2)]).steps] == [None, 2, 0]


def test_rows_that_are_too_far_ahead_or_fail_a_condition_are_counted_at_their_source_and_step() -> None:
    """Of a source without a bound, and of a transform, nothing is said."""
    expects = SegmentNode((Edge(0),), SimpleNamespace(kind="expect_or_drop", name="positive"))
    bounded, free = SourceNode("a", None, max_ahead_ms=1), SourceNode("b", None)
    steps = StepRows.begun(pipeline(bounded, free, expects, SinkNode("out", None, Edge(2)), inputs={0: 0, 1: 1}), EMPTY)
    assert [s.aside_rows for s in steps.steps] == [0, None, 0, None]
    steps = steps.after([], (3, 4), RowsAside({"a": 2}, {2: 5})).after([], (1, 1)).after([], (), RowsAside({}, {2: 1}))
    assert [s.aside_rows for s in steps.steps] == [2, None, 6, None]
    assert [s.rows for s in steps.steps] == [4, 5, None, 0]


def test_a_pipeline_too_large_for_a_heartbeat_is_not_told() -> None:
    """The heartbeat itself matters more: without it a run counts as dead."""
    many = pipeline(SOURCE, *(operator(f"o{n}", n) for n in range(400)))
    long = pipeline(SourceNode("x" * NAMES_BYTES_MAX, None), operator("a", 0))
    for each in (many, long):
        told = StepRows.begun(each, EMPTY)
        assert told.after([task(0, 1)]).steps == ()


def test_the_largest_steps_fit_into_a_heartbeat() -> None:
    """In JSON a letter outside ASCII takes six bytes or twelve, and a number twenty."""
    from state_runtime.base.limits import SMALL_JSON_BYTES_MAX
    from state_runtime.snapshot.document import encode_document

    others = [operator(f"op-{n:03}", n) for n in range(299)]
    nodes = [SourceNode("\N{GRINNING FACE}" * ((NAMES_BYTES_MAX - 3_400) // 12), None), *others]
    steps = StepRows.begun(pipeline(*nodes), EMPTY).steps
    assert len(steps) == 300
    more = SourceNode("\N{GRINNING FACE}" * (NAMES_BYTES_MAX // 12), None)
    assert StepRows.begun(pipeline(more, *others), EMPTY).steps == ()
    full = tuple(replace(s, rows=1 << 63, late_rows=1 << 63, state_rows=1 << 63, aside_rows=1 << 63) for s in steps)
    status = RunStatus(
        term=1,
        run_uid="r" * 32,
        state="running",
        at_ms=1,
        started_at_ms=1,
        heartbeat_interval_s=1.0,
        pid=1,
        host="h",
        steps=full,
    )
    assert len(encode_document("heartbeat", status)) < SMALL_JSON_BYTES_MAX * 3 / 4
