"""`migrate_<job>`: a planned migration of a streaming job. It shows its plan first, and can be repeated safely: if a
run finds a migration under way whose process is gone, it continues it. A run whose migration was taken back fails with
the reason.

With `fork_of` the job begins beside another one, with that one's state: this is a migration of the job that begins. Its
record, its continuation and its turns among runs belong to that job, so it needs no separate Dagster job.
"""

from typing import Any, Final, Literal

import dagster as dg

from state_runtime.base.clock import Clock
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.settings import VerifyLevel
from state_runtime.snapshot.migration import Migration, RunSettings
from stillstate.assets.mount import Mount
from stillstate.assets.tables import migration_table
from stillstate.orchestration.jobs.driver import DriverWork, observe_stream, stillstate_of, typed_failures, value_output
from stillstate.orchestration.jobs.upkeep import actor_of
from stillstate.orchestration.migration.fork_plan import ForkPlan, ForkRequest
from stillstate.orchestration.migration.messages import error_of
from stillstate.orchestration.migration.migrate import Migrator, fork_or_resume, migrate_or_resume, migrator_of
from stillstate.orchestration.migration.plan import MigrationPlan, Request

__all__ = ["MIGRATE", "MigrateConfig"]


class MigrateConfig(dg.Config):
    """The wanted change; empty: the file's settings, or the migration that is under way.

    Attributes:
        parallelism: 0: unchanged.
        backend: empty: unchanged.
        from_snapshot: go back on the way to this snapshot (its id) or savepoint (its name).
        restart: also if nothing changes: for new code.
        move: to the store that the file has in `migration.to_store`.
        fork_of: begin beside this job, with its state; for a job that has no snapshot yet. Beside it only `fork_at`,
            `timeout_s`, `verify` and `accept_session_settings` count.
        fork_at: with this snapshot (its id) or savepoint (its name) of that job; empty: with a savepoint that is made
            now, or its newest snapshot if it does not run.
        checkpoints: number of checkpoints that the new run must make.
        timeout_s: the time limit for them; 0: `recovery.first_checkpoint_s`.
        verify: how much of the savepoint is read.
        resume: continue the migration that is under way; do nothing if no migration is under way.
        accept_session_settings: start although settings of Spark's session that change results (such as its time zone)
            are others than before; the new ones are recorded. Also of a migration that goes on.
        acknowledge: do nothing; the success of this run ends the trouble of a failed one (`notify`).
        if_term: only if this run of the driver is healthy and the file says the same; 0: in any case. The sensor
            `stillstate_desired_state` sets it.
    """

    parallelism: int = 0
    backend: Literal["", "arrow", "rocksdb"] = ""
    from_snapshot: str = ""
    restart: bool = False
    move: bool = False
    fork_of: str = ""
    fork_at: str = ""
    checkpoints: int = 1
    timeout_s: float = 0.0
    verify: VerifyLevel = "full"
    resume: bool = False
    accept_session_settings: bool = False
    acknowledge: bool = False
    if_term: int = 0

    def fork_request(self) -> ForkRequest | None:
        """Return the requested fork.

        Raises:
            InvalidConfiguration: a fork and another change are requested.
        """
        if not self.fork_of:
            if self.fork_at:
                raise InvalidConfiguration("fork_at says where a fork begins; name the job in fork_of too")
            return None
        accepts = self.accept_session_settings
        plain = Request(timeout_s=self.timeout_s, verify=self.verify, accept_session_settings=accepts)
        if self.request() != plain:
            raise InvalidConfiguration(
                "fork_of begins a job as the file has it: beside it only fork_at, timeout_s, verify and "
                "accept_session_settings can be given"
            )
        return ForkRequest(
            of=self.fork_of,
            at=self.fork_at.removeprefix("@"),
            timeout_s=self.timeout_s,
            verify=self.verify,
            accept_session_settings=accepts,
        )

    def request(self) -> Request:
        return Request(
            settings=RunSettings(self.parallelism, self.backend),
            go_back_to=self.from_snapshot,
            is_restart=self.restart,
            is_move=self.move,
            checkpoints=self.checkpoints,
            timeout_s=self.timeout_s,
            verify=self.verify,
            if_term=self.if_term,
            accept_session_settings=self.accept_session_settings,
        )


def migrate_stream(
    context: dg.OpExecutionContext, config: MigrateConfig, mount: Mount, name: str
) -> dg.Output[dict[str, Any]]:
    """Migrate a stream, or continue a migration of it whose process died."""

    def show(plan: MigrationPlan | ForkPlan) -> None:
        said = f"the plan of a {'fork' if isinstance(plan, ForkPlan) else 'migration'}"
        observe_stream(context, mount, name, said, {"plan": dg.MetadataValue.md(plan.markdown())})

    if config.acknowledge:
        context.log.info(f"somebody has seen what became of the last migration of {name}; nothing is done")
        return value_output({"job": name, "outcome": "acknowledged"})
    stillstate = stillstate_of(context, mount)
    with typed_failures():
        fork = config.fork_request()
        spec = stillstate.spec()
        now = spec.job(name)
        migrator = migrator_of(
            now,
            stillstate.catalog,
            lambda job: stillstate.launcher(spec, job),
            actor_of(stillstate),
            jobs=spec.job,
            poll=stillstate.poll(),
            say=context.log.info,
        )
        try:
            if config.resume:
                under_way, accepts = migrator.is_under_way(), config.accept_session_settings
                done = None if under_way is None else migrator.resume(accept_session_settings=accepts)
            elif fork is not None:
                done = fork_or_resume(migrator, fork, on_plan=show)
            else:
                done = migrate_or_resume(migrator, config.request(), on_plan=show)
        finally:
            if migrator.history:
                _show_steps(context, mount, name, migrator, stillstate.clock())
        error = None if done is None else error_of(done, name, migrator.failure)
        if error is not None:
            raise error
    return value_output({"job": name, "outcome": "nothing to do"} if done is None else _value(name, done))


def _value(name: str, done: Migration) -> dict[str, Any]:
    """Return the output for a migration that was kept."""
    if done.fork_of:
        told: dict[str, Any] = {"outcome": "forked", "fork_of": done.fork_of, "fork_at": done.fork_at}
    else:
        told = {
            "outcome": "migrated",
            "parallelism": done.target.parallelism,
            "backend": done.target.backend,
            "savepoint": done.savepoint,
        }
    moved = {"moved_to": done.to_root} if done.to_root else {}
    return {"job": name, **told, "term": done.run_term, "how": done.reason, **moved}


def _show_steps(context: dg.OpExecutionContext, mount: Mount, name: str, migrator: Migrator, clock: Clock) -> None:
    """Show the steps of this run, also if it ends with an error: the job may be back at its savepoint, or at a step."""
    last = migrator.history[-1]
    _, *log = [line.strip() for line in migrator.failure.splitlines() if line.strip()] or [""]
    said = f"{last.what if last.fork_of else f'a migration to {last.target}'}: {last.step}"
    steps = {"steps": migration_table(migrator.history, clock.now_ms())}
    observe_stream(context, mount, name, said, {**steps, **({"log_last_line": log[-1]} if log else {})})


MIGRATE: Final = DriverWork(
    action="migrate",
    text="Change the parallelism, backend or code of {} as it runs: savepoint, stop, verify, start, watch; and back, "
    "by itself, if the new run does not come up. Without configuration it does what the file says, or goes on with a "
    "migration whose process died. With `fork_of` it begins beside another job, with that one's state.",
    act=migrate_stream,
    config=MigrateConfig,
)
