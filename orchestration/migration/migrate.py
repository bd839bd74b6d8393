"""The execution of a migration: the plain function under `stillstate migrate` and Dagster's `migrate_<job>`.

Each step is recorded before its effect (state_runtime/snapshot/migration.py), and each effect may be repeated: it first
checks which part is already done. So the process that resumes after a crash does the recorded step once more, and no
step before it. Safety does not depend on the order alone: terms decide which driver may write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from state_runtime.base.actor import Actor
from state_runtime.base.errors import (
    InvalidConfiguration,
    JobNotFound,
    MissingSnapshot,
    SnapshotInUse,
    StillstateError,
    can_pass,
    check,
)
from state_runtime.base.process_space import process_space
from state_runtime.maintenance.copy.savepointer import Savepointer
from state_runtime.maintenance.move.plan import MovePlan, plan_move
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.migration import (
    Migration,
    RunSettings,
    begin_migration,
    newest_migration,
    read_migration,
    record_step,
    take_migration_over,
)
from state_runtime.snapshot.term_files import RunStatus
from state_runtime.store import Store
from stillstate.orchestration.config.effective_settings import settings_of
from stillstate.orchestration.config.job_location import at_source, at_target, is_home, location_of
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.launchers import Launcher
from stillstate.orchestration.launchers.port import LOG_FOLLOWS
from stillstate.orchestration.launchers.processes import living
from stillstate.orchestration.migration.effects import Effects, RolledBack
from stillstate.orchestration.migration.fork_plan import ForkPlan, ForkRequest
from stillstate.orchestration.migration.forking import FORK_STEPS, Forks, ForkSide
from stillstate.orchestration.migration.messages import said_of
from stillstate.orchestration.migration.moving import Moves, refuse_other_target
from stillstate.orchestration.migration.plan import Found, MigrationPlan, Request, plan_migration, said_by
from stillstate.orchestration.migration.steps import step_after, step_back_from
from stillstate.orchestration.recovery.observe import observe
from stillstate.orchestration.running.make_savepoint import savepointer_watching

__all__ = ["Migrator", "Place", "fork_or_resume", "migrate_or_resume", "migrator_of"]


_THERE: Final = frozenset({"start", "watch", "stop-new"})
"""Steps at which the driver of a moved job is the one at the target."""


@dataclass(frozen=True)
class Place:
    """A job at one of the places that the file names."""

    job: JobSpec
    catalog: Catalog
    launcher: Launcher


class Migrator:
    """Migrates one job.

    Args:
        job: with the file's settings, where it lives; or from where it is moved.
        target: to where it is moved, or may be; None if the file names no such place.
        other: opens another job of the file by its name, with the maker of its savepoints; for a fork.
        savepointer, actor, poll, say: see `Effects`.
        on_point: called after each record and after each effect; tests die there.

    Attributes:
        failure: why this process has taken a migration back, with the end of the driver's log.
        history: the steps that this process has recorded or taken over, in order.
    """

    def __init__(
        self,
        job: JobSpec,
        catalog: Catalog,
        launcher: Launcher,
        savepointer: Savepointer,
        actor: Actor,
        *,
        target: Place | None = None,
        other: Callable[[str], tuple[Place, Savepointer]] | None = None,
        poll: Callable[[float], object] | None = None,
        say: Callable[[str], object] = lambda line: None,
        on_point: Callable[[str], object] = lambda point: None,
    ) -> None:
        self._job, self._catalog, self._root, self._actor = job, catalog, catalog.root, actor
        self._say, self._on_point = say, on_point
        self.failure = ""
        self.history: list[Migration] = []
        self._effects = Effects(job, catalog, launcher, savepointer, actor, poll=poll, say=say)
        self._target, self._other = target, other
        self._poll: Callable[[float], object] = threading.Event().wait if poll is None else poll
        if target is not None:
            self._there = Effects(target.job, target.catalog, target.launcher, savepointer, actor, poll=poll, say=say)
            self._moves = Moves(self._root, target.catalog.root, actor, poll=self._poll, say=say)

    def plan(self, request: Request) -> MigrationPlan:
        """Plan a migration; only read.

        Raises:
            JobNotFound, MissingSnapshot: the job has nothing to migrate, or there is no such snapshot.
            SnapshotInUse: a migration is under way.
            InvalidConfiguration: the migration is not possible.
        """
        self._refuse_under_way()
        self._catalog.job_info()
        newest = self._catalog.latest()
        if newest is None:
            raise MissingSnapshot(
                f"job {self._job.name!r} has no snapshot yet, so there is nothing to migrate: change the file and "
                "start it"
            )
        if request.go_back_to:
            self._effects.plan_back(request.go_back_to)
        move = self._plan_move() if request.is_move else None
        seen = self._effects.seen()
        found = Found(
            running=self._running(seen.status, newest.parallelism),
            verdict=seen.health.verdict,
            why=seen.health.reason,
            snapshot_id=newest.snapshot_id,
            snapshot_bytes=newest.total_bytes,
            term=0 if seen.status is None else seen.status.term,
        )
        return plan_migration(
            self._job.name,
            request,
            found,
            settings_of(self._job),
            self._job.recovery.first_checkpoint_s,
            is_automatic=self._job.migration.automatic,
            move=move,
        )

    def plan_fork(self, request: ForkRequest) -> ForkPlan:
        """Plan to let the job begin beside another one, with that one's state; only read.

        Raises:
            JobNotFound, MissingSnapshot: the other job is not in the file, or has nothing to begin with.
            SnapshotInUse: a migration is under way, or the job has begun already.
            InvalidConfiguration: the fork is not possible.
        """
        self._refuse_under_way()
        return self._forks(request.of).plan(request)

    def fork(self, plan: ForkPlan) -> Migration:
        """Execute a plan to its end; see `migrate`."""
        now_ms, uid = self._actor.clock.now_ms(), self._actor.ids.uid()
        savepoint = "" if plan.place else f"fork-{uid[:12].lower()}"
        first = Migration(
            uid=uid,
            number=0,
            step="copy" if plan.place else "save",
            at_ms=now_ms,
            began_ms=now_ms,
            owner=self._actor.owner,
            owner_space=process_space(),
            before=RunSettings(),
            target=RunSettings(),
            was_running=False,
            savepoint=savepoint,
            checkpoints=1,
            timeout_s=plan.timeout_s,
            verify=plan.verify,
            fork_of=plan.of,
            fork_at=plan.place or self._forks(plan.of).savepoint_place(savepoint),
            accept_session_settings=plan.accept_session_settings,
        )
        return self._go_on(begin_migration(self._root, first), self._root)

    def migrate(self, plan: MigrationPlan) -> Migration:
        """Execute a plan to its end.

        Returns:
            The last step: `kept` or `rolled-back` (`error_of`).

        Raises:
            SnapshotInUse: another migration is under way, or another process continues this one.
            Unavailable: the store did not answer, or a driver did not stop. The migration stays where it is: resume it.
                A store that refuses (no room, no permission) does not end like this: the migration is taken back.
            StillstateError: it could not be taken back; the same.
        """
        now_ms, uid = self._actor.clock.now_ms(), self._actor.ids.uid()
        first = Migration(
            uid=uid,
            number=0,
            step="save",
            at_ms=now_ms,
            began_ms=now_ms,
            owner=self._actor.owner,
            owner_space=process_space(),
            before=plan.before,
            target=plan.target,
            was_running=plan.was_running,
            savepoint=f"migration-{uid[:12].lower()}",
            checkpoints=plan.checkpoints,
            timeout_s=plan.timeout_s,
            verify=plan.verify,
            go_back_to=plan.go_back_to,
            from_root="" if plan.move is None else plan.move.source_url,
            to_root="" if plan.move is None else plan.move.target_url,
            accept_session_settings=plan.accept_session_settings,
        )
        return self._go_on(begin_migration(self._root, first), self._root)

    def resume(self, *, accept_session_settings: bool = False) -> Migration:
        """Continue the migration that is under way, no matter who began it.

        Args:
            accept_session_settings: see `Request`; also if it was begun without.

        Raises:
            InvalidConfiguration: no migration is under way. SnapshotInUse: its owner lives. And the errors of
                `migrate`.
        """
        found = self._newest_open()
        if found is None:
            raise InvalidConfiguration(f"no migration of job {self._job.name!r} is under way; nothing was done")
        if _lives_here(found, self._actor):
            raise SnapshotInUse(f"job {self._job.name!r}: {found} is under way, and that process lives; let it end")
        refuse_other_target(found, None if self._target is None else self._target.catalog.root)
        if found.fork_of:
            self._forks(found.fork_of)  # refused before anything is taken over, if the file has no such job
        root, actor = self._home(), self._actor
        taken = take_migration_over(
            root, found, actor.owner, actor.clock, process_space(), accept_session_settings=accept_session_settings
        )
        return self._go_on(taken, root)

    def is_under_way(self) -> Migration | None:
        """Return the migration that is under way, or was when its process died; None without one."""
        return self._newest_open()

    # --- the machine -------------------------------------------------------------------------------------------------

    def _go_on(self, migration: Migration, root: Store) -> Migration:
        """Execute the steps to the end. `root` has the record: for a job that is moved, the root where the record is at
        the moment."""
        while migration.is_open:
            self.history.append(migration)
            self._on_point(f"recorded {migration.step}")
            self._say(said_of(migration))
            step = step_after(migration)
            if newest_migration(root) != migration.number:
                raise SnapshotInUse(
                    f"job {self._job.name!r}: somebody else goes on with {migration}; this process stops"
                )
            try:
                changes = self._do(migration)
            except StillstateError as error:
                if can_pass(error):
                    error.add_note(f"the migration stands at step {migration.step!r}; go on with --resume")
                    raise
                back = step_back_from(migration)
                if back is None:
                    down = "" if migration.fork_of else ", and the job may be down"
                    error.add_note(
                        f"the migration could not be taken back: it stands at step {migration.step!r}{down}. "
                        "Mend the cause named above, then continue with --resume"
                    )
                    raise
                self._say(f"{migration.step} failed: {error}")
                self.failure = f"{migration.step}: {error}"
                # A line for the store; a driver's last output may contain anything, and is only shown to the caller.
                reason = self.failure.split("\n")[0].split(f". {LOG_FOLLOWS}")[0]
                step, changes = back, {"reason": reason}
                if isinstance(error, RolledBack) and error.stays_stopped:
                    changes["was_running"] = False
            self._on_point(f"done {migration.step}")
            step = changes.pop("step", step)
            if migration.to_root:
                root = self._home()
            following = self._newest_open() if (migration.step, step) == ("go-home", "start-old") else None
            migration = following or record_step(root, migration, step, self._actor.clock, **changes)
        self.history.append(migration)
        self._effects.release(migration)
        self._say(f"{migration.step}: {migration.reason}")
        return migration

    def _do(self, migration: Migration) -> dict[str, Any]:
        """Do the effect of a step."""
        if migration.fork_of and migration.step in FORK_STEPS:
            return self._forks(migration.fork_of).do(migration)
        if not migration.to_root:
            return self._effects.do(migration)
        if migration.step == "move":
            return self._moves.move(migration)
        if migration.step == "leave":
            return self._moves.leave(migration)
        if migration.step == "go-home":
            if self._moves.has_committed(migration):
                self._there.run_on(migration, "it was moved, and its first run there has ended")
                why = f"it had committed there, and was started again as it was before: {migration.reason}"
                return {"step": "leave", "target": migration.before, "reason": why}
            self._moves.go_home(migration)
            return {}
        if migration.step == "start-old":
            self._moves.free()
        return (self._there if migration.step in _THERE else self._effects).do(migration)

    def _forks(self, of: str) -> Forks:
        """Return the effects of a fork of another job.

        Raises:
            JobNotFound: the file has no job of that name.
        """
        check(self._other is not None, "only a process that can open the other job can fork it")
        assert self._other is not None
        there, savepointer = self._other(of)
        actor, poll, say = self._actor, self._poll, self._say
        effects = Effects(there.job, there.catalog, there.launcher, savepointer, actor, poll=poll, say=say)
        side = ForkSide(self._job, self._catalog, self._effects)
        return Forks(side, ForkSide(there.job, there.catalog, effects), actor, poll=poll, say=say)

    def _refuse_under_way(self) -> None:
        open_one = self._newest_open()
        if open_one is not None:
            raise SnapshotInUse(
                f"job {self._job.name!r}: {open_one} is under way; `stillstate migrate {self._job.name} --resume` goes "
                "on with it, should its process be gone"
            )

    def _plan_move(self) -> MovePlan:
        """Plan the move to the target; refuse it if it is not possible.

        Raises:
            InvalidConfiguration: the file names no target, or the job is already there, or the target holds other data.
        """
        if self._target is None:
            raise InvalidConfiguration(
                f"job {self._job.name!r} is in {self._root.url}, and the file names no other place to move it to: put "
                "that into `migration.to_store`, or if the job lives there already, edit `store`"
            )
        # Planned as a copy: a move would be refused because of the living run, which is stopped first.
        root = self._target.catalog.root
        return plan_move(self._root, root, mode="copy", snapshot_id=None, clock=self._actor.clock)

    def _home(self) -> Store:
        """Return the root that has the record now."""
        if self._target is not None and is_home(self._target.catalog.root):
            return self._target.catalog.root
        return self._root

    def _newest_open(self) -> Migration | None:
        found = read_migration(self._home())
        return found if found is not None and found.is_open else None

    def _running(self, status: RunStatus | None, parallelism: int) -> RunSettings:
        """Return the settings that the newest run has or had: as it reports them, else as the last migration or the
        file has them."""
        last, file = read_migration(self._root), settings_of(self._job)
        held = last.settings if last is not None else file
        said = RunSettings() if status is None else said_by(status)
        return RunSettings(said.parallelism or parallelism, said.backend or held.backend or file.backend)


def migrator_of(
    job: JobSpec,
    catalog: Callable[[JobSpec], Catalog],
    launcher: Callable[[JobSpec], Launcher],
    actor: Actor,
    *,
    jobs: Callable[[str], JobSpec] | None = None,
    poll: Callable[[float], object] | None = None,
    say: Callable[[str], object] = lambda line: None,
    on_point: Callable[[str], object] = lambda point: None,
) -> Migrator:
    """Make a migrator whose savepoints are made as `stillstate savepoint --stop` makes them.

    Args:
        catalog, launcher: open them, of a job where it is.
        jobs: looks up jobs of the file by name: resuming a fork needs the other job.
        on_point: see `Migrator`.
    """

    def savepointer(at: Place) -> Savepointer:
        return savepointer_watching(
            at.catalog,
            lambda: observe(at.job, at.catalog, at.launcher, actor.clock),
            clock=actor.clock,
            ids=actor.ids,
            poll=poll,
        )

    def other(name: str) -> tuple[Place, Savepointer]:
        found = location_of((jobs or _unknown)(name))
        place = Place(found, catalog(found), launcher(found))
        return place, savepointer(place)

    here, there = _places(job, catalog, launcher)
    return Migrator(
        here.job,
        here.catalog,
        here.launcher,
        savepointer(here),
        actor,
        target=there,
        other=other,
        poll=poll,
        say=say,
        on_point=on_point,
    )


def _unknown(name: str) -> JobSpec:
    raise JobNotFound(f"job {name!r} is not known here: go on with the fork where stillstate.yaml has both jobs")


def _places(
    job: JobSpec, catalog: Callable[[JobSpec], Catalog], launcher: Callable[[JobSpec], Launcher]
) -> tuple[Place, Place | None]:
    """Return the place where the job is, or is moved from; and the target of a move, if the file names one."""

    def place(at: JobSpec) -> Place:
        return Place(at, catalog(at), launcher(at))

    if not job.migration.to_store:
        return place(job), None
    there = place(at_target(job))
    if is_home(there.catalog.root):
        migration = read_migration(there.catalog.root)
        if migration is None or not migration.is_open or migration.to_root != there.catalog.root.url:
            return there, None  # it was moved, and the file is not edited yet
    return place(at_source(job)), there


def migrate_or_resume(
    migrator: Migrator, request: Request, *, on_plan: Callable[[MigrationPlan], object]
) -> Migration | None:
    """Run or resume a migration, as a run of Dagster's does: continue a migration whose process is gone, else plan one
    and execute it. Safe to repeat.

    Args:
        on_plan: gets a new plan before anything is done.

    Returns:
        The last step; None if the job already runs with the wanted settings.

    Raises:
        SnapshotInUse: a migration to other settings is under way. And the errors of `Migrator`.
    """
    under_way = migrator.is_under_way()
    if under_way is not None and request.if_term:
        return None  # another process's, begun after the request
    if under_way is None:
        plan = migrator.plan(request)
        on_plan(plan)
        return None if plan.is_nothing else migrator.migrate(plan)
    if not request.is_of(under_way):
        raise SnapshotInUse(
            f"{under_way} is under way, and something else is asked for. Go on with that one first: ask for nothing "
            "by name"
        )
    return migrator.resume(accept_session_settings=request.accept_session_settings)


def fork_or_resume(migrator: Migrator, request: ForkRequest, *, on_plan: Callable[[ForkPlan], object]) -> Migration:
    """Run or resume a fork: continue the interrupted one, else plan one and execute it.

    Returns:
        The last step.

    Raises:
        SnapshotInUse: another migration is under way, or the job has begun already. And the errors of `Migrator`.
    """
    under_way = migrator.is_under_way()
    if under_way is None:
        plan = migrator.plan_fork(request)
        on_plan(plan)
        return migrator.fork(plan)
    if not request.is_of(under_way):
        raise SnapshotInUse(
            f"{under_way} is under way, and another fork is asked for, of {request.of!r}. Go on with that one first"
        )
    return migrator.resume(accept_session_settings=request.accept_session_settings)


def _lives_here(migration: Migration, actor: Actor) -> bool:
    """Whether the process that recorded a step certainly lives: only its own host can tell."""
    host, _, pid = migration.owner.rpartition(":")
    if host != actor.host or not pid.isdigit() or int(pid) == actor.pid:
        return False
    return living(int(pid), migration.at_ms) is not None
