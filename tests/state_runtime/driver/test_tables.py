"""Operators in complete mode: which shards an epoch runs, that no epoch ends before its batch, and when a table is empty."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from state_runtime import JobSettings, aggregates
from state_runtime.base.settings import CheckpointMode, CheckpointSettings
from state_runtime.driver.batch_progress import BatchProgress
from state_runtime.driver.due import woken
from state_runtime.driver.empty_outputs import with_empty_outputs
from state_runtime.driver.epoch_budget import BudgetPlanner, EpochBudget
from state_runtime.driver.shard_index import ShardIndex
from state_runtime.driver.stage_tasks import StageTasks
from state_runtime.pipeline.compile import CompiledPipeline
from state_runtime.pipeline.graph import Edge, Graph, OperatorNode, Port, SourceNode
from state_runtime.pipeline.operators import AggregateStep, DeduplicateStep
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.pipeline.watermark import ClockInputs
from state_runtime.snapshot.manifest import StagedFile, StagedOutput, TimeEntry

SHARDS = 3
ALL = [0, 1, 2]
NOW_MS = 1_000


def pipeline() -> CompiledPipeline:
    """Rows once each, counted in complete mode; and beside it a stream of windows, which close by themselves."""
    counts = AggregateStep("counts", {"n": aggregates.count()}, "complete")
    nodes = (
        SourceNode("", None),
        OperatorNode(DeduplicateStep("once"), (Port(Edge(0), ("k",)),)),
        OperatorNode(counts, (Port(Edge(1), ("k",)),)),
        OperatorNode(AggregateStep("beside", {"n": aggregates.count()}, "append"), (Port(Edge(0), ("k",)),)),
    )
    of_source = ClockInputs(sources=frozenset({""}))
    inputs = {"once": of_source, "counts": ClockInputs(operators=frozenset({"once"})), "beside": of_source}
    return CompiledPipeline((), graph=Graph(nodes), clock_inputs=inputs)


def visited(
    *,
    batch: BatchProgress | None = None,
    due: dict[str, int | None] | None = None,
    unvisited: dict[str, int] | None = None,
) -> dict[str, list[int]]:
    """The shards that an epoch visits.

    Args:
        due: when something is due, by operator; of shard 1 only.
        unvisited: a shard of an operator that must be visited.
    """
    made = pipeline()
    domains = {"once": "event", "counts": "", "beside": "event"}
    operators: Any = [SimpleNamespace(uid=uid, time_domain=domain) for uid, domain in domains.items()]
    shards = ShardIndex.at_start(SHARDS, {}, {}, domains)
    shards = replace(shards, next_due={uid: (None, (due or {}).get(uid), None) for uid in domains})
    shards = shards.visiting({uid: frozenset({shard}) for uid, shard in (unvisited or {}).items()})
    time = TimeEntry(NOW_MS, NOW_MS)
    return woken(
        operators,
        shards,
        time,
        batch,
        {*domains},
        SHARDS,
        makes_tables=made.makes_tables,
        feeds_tables=made.feeds_tables,
    )


def test_in_complete_mode_every_epoch_with_rows_runs_every_shard() -> None:
    """A shard without rows has keys, too; without it they would be missing in the table."""
    assert visited(batch=BatchProgress(0)) == {"once": [], "counts": ALL, "beside": []}


def test_an_epoch_without_rows_gives_a_table_only_if_rows_may_come_to_it() -> None:
    """A window that closes elsewhere is no reason to give it again; what an operator before it does is, and a shard that has to be
    looked at would otherwise give its part alone."""
    assert visited() == {"once": [], "counts": [], "beside": []}
    assert visited(due={"beside": NOW_MS}) == {"once": [], "counts": [], "beside": [1]}
    assert visited(due={"once": NOW_MS}) == {"once": [1], "counts": ALL, "beside": []}
    assert visited(unvisited={"counts": 2}) == {"once": [], "counts": ALL, "beside": []}


@pytest.mark.parametrize("mode", ["aligned", "unaligned", "aligned-with-timeout"])
def test_in_complete_mode_no_epoch_ends_before_its_batch(mode: CheckpointMode) -> None:
    """A table of some of the rows of a batch would never have been true. Rows that an earlier run left in flight are all done by
    the epoch that goes on with them."""
    settings = JobSettings(checkpoint=CheckpointSettings(mode=mode))
    planner = BudgetPlanner(settings, (), SHARDS, makes_tables=True)
    for reads in (True, False):
        budget = planner.plan(BatchProgress(0), reads=reads, now_ms=NOW_MS, until_checkpoint_s=0.0)
        assert budget.within_s is None
    assert not planner.is_catching_up


@pytest.mark.parametrize(("uid", "was_done"), [("counts", False), ("beside", True)])
def test_a_table_is_given_by_the_shards_that_were_done_before_the_job_was_in_complete_mode(
    tmp_path: Any, uid: str, was_done: bool
) -> None:
    """In update mode a batch stopped while rows of some shards were in flight; the others had begun their due work. They give
    their part of the table all the same."""
    nothing: Any = SimpleNamespace(versions={}, trusted={}, committed={}, pending={})
    context: Any = SimpleNamespace(pipeline=pipeline(), entries=(), sinks={})
    tasks = StageTasks(
        context,
        cast(Any, None),
        cast(Any, SimpleNamespace(shards=nothing, needed_rows=frozenset())),
        cast(Any, None),
        None,
    )
    operator: Any = SimpleNamespace(uid=uid, time_domain="")
    stage: Any = SimpleNamespace(operator=operator, sinks=(), emit=False, written=None, sides=None, partial=None)
    job: Any = SimpleNamespace(of_operator=lambda uid: None)
    budget = EpochBudget(None, {}, frozenset())
    task = tasks._stage_task(job, None, budget, BatchProgress(0, begun_with=uid), False, stage, 0)
    assert task.budget.due_was_done is was_done


def test_a_table_without_rows_is_given_and_a_table_that_was_not_computed_is_not(tmp_path: Any) -> None:
    """An empty frame puts nothing in the place of the last table: right if the table has no rows, else a loss of it. A sink that
    asks for empty epochs gets no others."""
    specs = {
        name: SinkSpec(name, str(tmp_path), {}, f"staging/{name}", empty_epochs=name != "quiet")
        for name in ("table", "quiet", "plain")
    }
    stage = SimpleNamespace(sinks=tuple(specs), sink_schema=pa.schema([("n", pa.int64())]))
    tables = dict.fromkeys(("table", "quiet"), frozenset({"counts"}))
    context: Any = SimpleNamespace(
        sinks=specs,
        pipeline=SimpleNamespace(stages=[stage], tables=tables),
        ids=SimpleNamespace(short=lambda: "0123456789abcdef"),
    )
    nothing = [StagedOutput(name, 7, ()) for name in specs]

    def staged(ran: set[str], outputs: list[StagedOutput] = nothing) -> dict[str, list[int]]:
        made = with_empty_outputs(outputs, context, 1, ran)
        return {each.sink: [file.rows for file in each.files] for each in made}

    assert staged({"counts"}) == {"table": [0], "quiet": [0], "plain": [0]}
    assert staged({"beside"}) == {"table": [], "quiet": [], "plain": [0]}
    rows = [replace(each, files=(StagedFile("a", "a", 1, 5),)) for each in nothing]
    assert staged({"counts"}, rows) == {"table": [5], "quiet": [5], "plain": [5]}
