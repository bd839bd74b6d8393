"""`set_source_<job>`: plan → apply of that same plan. A job that does not run goes on elsewhere in one of its sources,
with its state kept, and stays stopped. Without `apply` a run shows the plan and changes nothing.

A run imports the job's code, which says which brokers and which secrets; its environment needs the variables that hold
those.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from stillstate.assets.mount import Mount
from stillstate.assets.tables import markdown
from stillstate.orchestration.config.effective_settings import refuse_while_migrating
from stillstate.orchestration.jobs.driver import DriverWork, observe_stream, stillstate_of, typed_failures
from stillstate.orchestration.jobs.upkeep import actor_of
from stillstate.orchestration.show.seeks import moved_most, seek_text, seek_values

if TYPE_CHECKING:
    from state_runtime.sources.kafka_offsets import Positions
    from state_runtime.sources.kafka_seek import Seek

__all__ = ["SET_SOURCE", "SetSourceConfig"]


_COLUMNS: Final = ("topic", "partition", "was", "will_be", "skipped", "again")


class SetSourceConfig(dg.Config):
    """Which source goes on where: the options of `stillstate source set`.

    Attributes:
        source: its name, read(…, name=), or its topics, separated by commas.
        to: earliest, latest, a time (2026-11-28T12:00:00Z: each partition's first record from then on), or the next
            offsets as JSON, {"orders": {"0": 17}}; partitions that it does not name stay where they are.
        apply: do it; otherwise the plan is shown, and nothing is changed.
    """

    source: str
    to: str
    apply: bool = False


def set_source_of_stream(
    context: dg.OpExecutionContext, config: SetSourceConfig, mount: Mount, name: str
) -> dg.Output[dict[str, Any]]:
    """Let a source of a stream go on elsewhere.

    Atomic: the newest snapshot is the one of before, or one with the new position; so it is after a crash, too.
    """
    # They import pyspark: the code location loads without it.
    from state_runtime.driver.set_source import execute_set_source, plan_set_source
    from state_runtime.sources.kafka_seek import parse_to
    from stillstate.orchestration.running.kafka_sources import kafka_source

    stillstate = stillstate_of(context, mount)
    with typed_failures():
        where, spec = parse_to(config.to), stillstate.spec()
        job = spec.job(name)
        catalog = stillstate.catalog(job)
        refuse_while_migrating(name, catalog.root)

        def find(old: Positions) -> Seek:
            return kafka_source(job, spec.file.parent, old).seek(old, where)

        plan = plan_set_source(catalog, config.source, find)
        value = {key: item for key, item in seek_values(name, plan).items() if key != "partitions"}
        rows = [["-" if cell is None else cell for cell in astuple(move)] for move in moved_most(plan)]
        metadata = {**value, "partitions": markdown(_COLUMNS, rows)}
        told = {"plan": seek_text(name, plan), **metadata}
        observe_stream(context, mount, name, "the plan of a new position of a source", told)
        done: dict[str, Any] = {"outcome": "planned"}
        if config.apply:
            made = execute_set_source(catalog, plan, actor_of(stillstate))
            done = {"outcome": "set", "made": made.snapshot_id, "next": mount.launch_text("start", name)}
            said = f"snapshot {made.snapshot_id} is the newest; the next start goes on from it"
            observe_stream(context, mount, name, said, {**metadata, **done})
    return dg.Output({**value, **done}, metadata={**metadata, **done})


SET_SOURCE: Final = DriverWork(
    action="set_source",
    text="Let a source of topics of {} go on elsewhere, with the state kept: the plan by partition, and with `apply` "
    "that same plan. It must not run, and stays stopped. What is read again counts again.",
    act=set_source_of_stream,
    config=SetSourceConfig,
)
