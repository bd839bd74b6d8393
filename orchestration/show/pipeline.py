"""Output of `stillstate explain`: the steps of a job's pipeline, and which of them the newest snapshot has state of; no
I/O."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from state_runtime.pipeline.graph import Graph, Node, OperatorNode, SinkNode, SourceNode, is_given
from state_runtime.pipeline.steps import steps_of
from stillstate.orchestration.show.tables import new_table

__all__ = ["ExplainedStep", "explained", "pipeline_json", "pipeline_table", "pipeline_text"]


@dataclass(frozen=True)
class ExplainedStep:
    """One step of a pipeline.

    Attributes:
        number: by which other steps name it.
        kind: `source`, `transform`, `union`, or what an operator does.
        name: uid of an operator; name of a transform's function or of a source, where it has one.
        reads: numbers of the steps whose rows it gets.
        keys: key columns; of a join those of both inputs.
        writes: names of the sinks that get its rows.
        state: of an operator "kept" if the newest snapshot has state of it, else "new"; the same of the position of a
            source with a name.
        line: of the job's code.
    """

    number: int
    kind: str
    name: str
    reads: tuple[int, ...]
    keys: tuple[tuple[str, ...], ...]
    writes: tuple[str, ...]
    state: str
    line: str


def explained(graph: Graph, stored: Collection[str], positions: Collection[str] = ()) -> list[ExplainedStep]:
    """Return the steps in their order, without sinks.

    Args:
        stored: uids of the operators that the newest snapshot has state of.
        positions: names of the sources that it has the position of.
    """
    steps = steps_of(graph)
    numbers = {index: n for n, index in enumerate((i for i, step in enumerate(steps) if step.kind != "sink"), 1)}
    return [
        ExplainedStep(
            number=numbers[index],
            kind=steps[index].kind,
            name=steps[index].name,
            reads=tuple(numbers[place] for place in steps[index].reads),
            keys=steps[index].keys,
            writes=tuple(sink.name for sink in graph.sinks(index)),
            state=_state(node, stored, positions),
            line=node.at,
        )
        for index, node in enumerate(graph.nodes)
        if not isinstance(node, SinkNode)
    ]


def pipeline_json(
    job: str, steps: list[ExplainedStep], snapshot_id: int | None, dropped: list[str], sources: list[str]
) -> dict[str, Any]:
    """Return the same as a document.

    Args:
        dropped, sources: operators and sources of the snapshot that the pipeline does not have.
    """
    return {
        "job": job,
        "snapshot": snapshot_id,
        "steps": [asdict(step) for step in steps],
        "dropped": dropped,
        "dropped_sources": sources,
    }


def pipeline_table(job: str, steps: list[ExplainedStep], snapshot_id: int | None) -> Table:
    """The steps, one a row."""
    state = f"in snapshot {snapshot_id}" if snapshot_id is not None else "state"
    table = new_table(f"Pipeline of {job}", "#>", "step", "name", "reads", "keys", "writes", state, "line")
    for step in steps:
        keys = " = ".join(", ".join(port) for port in step.keys if port)
        table.add_row(
            str(step.number),
            step.kind,
            Text(step.name),
            ", ".join(map(str, step.reads)),
            Text(keys or ("all rows" if step.keys else "")),
            Text(", ".join(step.writes)),
            step.state,
            Text(_short(step.line)),
        )
    return table


def pipeline_text(dropped: list[str], sources: list[str], snapshot_id: int | None) -> str:
    """What a start would say of operators and sources that the pipeline does not have any more; empty if there are
    none."""
    parts = []
    if dropped:
        parts.append(f"state of {', '.join(map(repr, dropped))}")
    if sources:
        parts.append(f"the position of source {', '.join(map(repr, sources))}")
    if not parts:
        return ""
    return (
        f"Snapshot {snapshot_id} also has {' and '.join(parts)}, which the pipeline does not have: a start is refused "
        "unless it is allowed to go on without (--allow-dropped-state)."
    )


def _state(node: Node, stored: Collection[str], positions: Collection[str]) -> str:
    if isinstance(node, OperatorNode):
        return "kept" if node.uid in stored else "new"
    if isinstance(node, SourceNode) and is_given(node.name):
        return "kept" if {node.name, node.was} & set(positions) else "new"
    return ""


def _short(line: str) -> str:
    """`job.py, line 12` of a whole path."""
    file, comma, rest = line.partition(", line ")
    return f"{Path(file).name}:{rest}" if comma else line
