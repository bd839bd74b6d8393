"""The rows of a run's steps, added up epoch by epoch, for its heartbeat; pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from state_runtime.base.progress import NO_ROWS_ASIDE, Progress, RowsAside
from state_runtime.base.steps import Step
from state_runtime.pipeline.compile import CompiledPipeline
from state_runtime.pipeline.graph import OperatorNode, SourceNode
from state_runtime.pipeline.steps import steps_of
from state_runtime.snapshot.manifest import Manifest
from state_runtime.task.acknowledgement import Acknowledgement

__all__ = ["NAMES_BYTES_MAX", "StepRows"]

NAMES_BYTES_MAX: Final = 20_000
"""Of the names of all steps and keys together, as the document writes them: a heartbeat has at most 256 KiB, or nobody
can read it, and is rewritten every few seconds. Of a pipeline with more nothing is told."""
_STEPS_MAX: Final = 300


@dataclass(frozen=True)
class StepRows:
    """The steps with their rows since the run began; each epoch makes a new value.

    Attributes:
        steps: empty if there are too many to be told.
        stages: per step the stage whose input are its rows.
        inputs: per source the number of its input, where a batch has the rows of several.
        bounded: the names of the sources with a bound of event times, by their places.
    """

    steps: tuple[Step, ...] = ()
    stages: Mapping[int, int] = field(default_factory=dict)
    inputs: Mapping[int, int] = field(default_factory=dict)
    bounded: Mapping[int, str] = field(default_factory=dict)

    @staticmethod
    def begun(pipeline: CompiledPipeline, last: Manifest) -> StepRows:
        """Return the steps of a run that begins with a snapshot, without rows."""
        steps = steps_of(pipeline.graph)
        names = [name for step in steps for name in (step.name, *(key for port in step.keys for key in port))]
        if len(steps) > _STEPS_MAX or sum(len(json.dumps(name)) for name in names) > NAMES_BYTES_MAX:
            return StepRows()
        stages, inputs = _counting(pipeline)
        counted = {*stages, *inputs, *(place for place, step in enumerate(steps) if step.kind == "sink")}
        uids = {node.uid: place for place, node in enumerate(pipeline.graph.nodes) if isinstance(node, OperatorNode)}
        begun = [replace(step, rows=0) if place in counted else step for place, step in enumerate(steps)]
        for uid, place in uids.items():
            begun[place] = replace(begun[place], late_rows=0, state_rows=_state_rows(last, uid))
        sources = {place: node.name for place, node in enumerate(pipeline.graph.nodes) if isinstance(node, SourceNode)}
        bounded = {place: name for place, name in sources.items() if name in pipeline.bounded_sources}
        for place in (*bounded, *pipeline.expectations):
            begun[place] = replace(begun[place], aside_rows=0)
        return StepRows(tuple(begun), stages, inputs, bounded)

    def after(
        self,
        acknowledged: Iterable[Acknowledgement],
        source_rows: Sequence[int] = (),
        aside: RowsAside = NO_ROWS_ASIDE,
    ) -> StepRows:
        """Return the steps after an epoch.

        Args:
            source_rows: per input, where a batch has the rows of several.
            aside: rows that are too far ahead, or failed a condition.
        """
        came, late, added, written = Counter[int](), Counter[int](), Counter[int](), Counter[str]()
        for a in acknowledged:
            came[a.stage] += a.input_rows
            late[a.stage] += a.late_rows
            added[a.stage] += a.rows_added
            for staged in a.staged:
                written[staged.sink] += sum(file.rows for file in staged.files)

        def counted(place: int, step: Step) -> Step:
            if step.aside_rows is not None:
                source = self.bounded.get(place)
                more = aside.bad.get(place, 0) if source is None else aside.future.get(source, 0)
                step = replace(step, aside_rows=step.aside_rows + more)
            if step.rows is None:
                return step
            if step.kind == "sink":
                return replace(step, rows=step.rows + written[step.name])
            if place in self.inputs:
                return replace(step, rows=step.rows + (source_rows[self.inputs[place]] if source_rows else 0))
            stage = self.stages[place]
            step = replace(step, rows=step.rows + came[stage])
            if step.late_rows is None:
                return step
            state_rows = step.state_rows + added[stage] if step.state_rows is not None else None
            return replace(step, late_rows=step.late_rows + late[stage], state_rows=state_rows)

        return replace(self, steps=tuple(counted(place, step) for place, step in enumerate(self.steps)))


def _counting(pipeline: CompiledPipeline) -> tuple[dict[int, int], dict[int, int]]:
    """Return per step the stage that gets its rows, and per source its input: an only source is counted where a stage
    reads it directly."""
    nodes, at = pipeline.graph.nodes, {stage.node: number for number, stage in enumerate(pipeline.stages)}
    stages = {place: at[place] for place, node in enumerate(nodes) if isinstance(node, OperatorNode)}
    sources = [place for place, node in enumerate(nodes) if isinstance(node, SourceNode)]
    if pipeline.united is not None:
        return stages, {place: pipeline.united.nodes[place] for place in sources}
    for place in sources if len(sources) == 1 else ():
        readers = (r for r in pipeline.graph.readers(place) if isinstance(nodes[r], OperatorNode))
        counting = at.get(place, next((at[r] for r in readers), None))
        if counting is not None:
            stages[place] = counting
    return stages, {}


def _state_rows(last: Manifest, uid: str) -> int | None:
    """Return how many rows of state an operator begins with; None: a snapshot has those of all operators together."""
    uids = [operator.uid for operator in last.operators]
    if uid not in uids or not (last.state_segments or last.layers or last.shards is not None):
        return 0
    return (last.progress or Progress()).state_rows if len(uids) == 1 else None
