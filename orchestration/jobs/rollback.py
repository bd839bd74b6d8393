"""`rollback_<job>`: plan → check → apply of that same plan. A job that does not run goes back, in place, to an older
snapshot or savepoint of the job, and stays stopped. `recover_<job>` with `from_snapshot` goes back and starts it."""

from typing import Any, Final

import dagster as dg

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.settings import VerifyLevel
from state_runtime.driver.rollback import execute_rollback, plan_rollback
from stillstate.assets.mount import Mount
from stillstate.orchestration.config.effective_settings import refuse_while_migrating
from stillstate.orchestration.jobs.driver import DriverWork, observe_stream, stillstate_of, typed_failures, value_output
from stillstate.orchestration.jobs.upkeep import LogsSteps, actor_of
from stillstate.orchestration.upkeep.rollbacks import own_place, refuse_damaged, rollback_text, rollback_values

__all__ = ["ROLLBACK", "RollbackConfig"]


class RollbackConfig(dg.Config):
    """Where to go back to: the options of `stillstate rollback`.

    Attributes:
        to: @ID of a snapshot, or the name of a savepoint, as `stillstate snapshots` lists them.
        reset: begin empty instead: no state, the input again from its start.
        takeover: take the job from a driver that still runs; it is fenced and ends.
        verify: how much of the content is read before.
        plan_only: show the plan and the check, and change nothing.
    """

    to: str = ""
    reset: bool = False
    takeover: bool = False
    verify: VerifyLevel = "full"
    plan_only: bool = False


def rollback_stream(
    context: dg.OpExecutionContext, config: RollbackConfig, mount: Mount, name: str
) -> dg.Output[dict[str, Any]]:
    """Take a stream back."""
    stillstate = stillstate_of(context, mount)
    with typed_failures():
        if bool(config.to) == config.reset:
            raise InvalidConfiguration("give `to` (a snapshot's @ID or a savepoint's name) or `reset`: one of the two")
        job = stillstate.spec().job(name)
        catalog, actor = stillstate.catalog(job), actor_of(stillstate)
        refuse_while_migrating(name, catalog.root)
        place = own_place(catalog, config.to) if config.to else ""
        plan = plan_rollback(catalog, place, takeover=config.takeover, storage_options=job.storage_options)
        value = {**rollback_values(name, plan), "place": plan.place or "empty"}
        observe_stream(context, mount, name, "the plan of a rollback", {"plan": rollback_text(name, plan), **value})
        refuse_damaged(catalog, plan, actor, config.verify, LogsSteps(context.log, f"{name}: check", "bytes"))
        if config.plan_only:
            return value_output({**value, "outcome": "planned", "check": "what it needs is there and right"})
        made = execute_rollback(catalog, plan, actor)
    done = {**value, "outcome": "gone back", "made": made.snapshot_id, "next": mount.launch_text("start", name)}
    said = f"snapshot {made.snapshot_id} is the newest; the next start goes on from it"
    observe_stream(context, mount, name, said, done)
    return value_output(done)


ROLLBACK: Final = DriverWork(
    action="rollback",
    text="Make an older snapshot or a savepoint of {} its newest snapshot again: plan, check of the content, apply. It "
    "must not run, and stays stopped; nothing is overwritten. `plan_only` shows what would be done.",
    act=rollback_stream,
    config=RollbackConfig,
)
