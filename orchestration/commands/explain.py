"""`stillstate explain`: the pipeline of a job, before it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from stillstate.orchestration.commands.base import (
    ConfigOption,
    JsonOption,
    OptionalJob,
    catalog_of,
    console,
    guarded,
    job_or_only,
    print_json,
)
from stillstate.orchestration.config.spec import load_spec

__all__ = ["register"]

SvgOption = Annotated[bool, typer.Option("--svg", help="Print the graph as a picture in SVG; send it to a file.")]


@guarded
def explain(
    job: OptionalJob = None, config: ConfigOption = None, as_json: JsonOption = False, as_svg: SvgOption = False
) -> None:
    """Show the steps of a job's pipeline: what reads what.

    The job's code is imported and its pipeline built, as a start would do it; no row is read. Spark is started only for
    a job with a plain query, query() or sql(): its plan says what keeps state, and by which names. Each operator is
    held against the newest snapshot: "kept" has state there, "new" starts without; of a source with a name the same is
    said of its position.
    """
    from state_runtime.base.errors import JobNotFound
    from state_runtime.pipeline.graph import SourceNode
    from state_runtime.pipeline.side_outputs import with_side_outputs
    from stillstate.orchestration.running.run import build_job, plan_with_spark
    from stillstate.orchestration.show.pipeline import explained, pipeline_json, pipeline_table, pipeline_text

    spec = load_spec(config)
    found = job_or_only(spec, job)
    plan = build_job(found, spec.file.parent).plan()
    if plan.has_queries:
        plan = plan_with_spark(found, plan)
    graph = with_side_outputs(plan.graph)
    try:
        newest = catalog_of(found).latest()
    except JobNotFound:
        newest = None
    stored = [operator.uid for operator in newest.operators] if newest is not None else []
    snapshot_id = newest.snapshot_id if newest is not None else None
    positions = newest.source.names if newest is not None and newest.source is not None else ()
    steps = explained(graph, stored, positions)
    dropped = sorted(set(stored) - {step.name for step in steps if step.state and step.kind != "source"})
    read = {name for node in graph.nodes if isinstance(node, SourceNode) for name in (node.name, node.was)}
    away = {positions[n] for n in newest.source.away} if newest is not None and newest.source is not None else set()
    sources = sorted(set(positions) - read - away)
    if as_svg:
        from state_runtime.pipeline.steps import steps_of
        from stillstate.assets.cards import cards_of
        from stillstate.assets.picture import svg_of

        print(svg_of(cards_of(steps_of(graph), newest), f"pipeline of {found.name}"))
        return
    if as_json:
        print_json(pipeline_json(found.name, steps, snapshot_id, dropped, sources))
        return
    console().print(pipeline_table(found.name, steps, snapshot_id))
    if text := pipeline_text(dropped, sources, snapshot_id):
        print(text)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: stillstate explain flights")(explain)
