"""The effects of a migration to another store beside starting and stopping drivers: the root goes to the target. In the
end the old root is deleted; or the new root is, and the job is home again.

    move       the old root is fenced and copied; the record is copied too; then the new one counts (job_location.py)
    leave      the old root is deleted; the tombstone that stays in its place refuses every start
    go-home    the record continues in the old root; the new one is deleted, so that the old one counts; it is released

Each may be repeated. While the new root counts, the old one is whole and fenced (`moving.json`), so that no run starts
there and the job can go back. It goes back only if the new run has committed nothing: otherwise its published output
would come again under the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from state_runtime.base.actor import Actor
from state_runtime.base.errors import InvalidConfiguration, JobNotFound, StillstateError, Unavailable, can_pass, check
from state_runtime.maintenance.delete.roots import delete_root
from state_runtime.maintenance.move.execute import abort_move, execute_move, let_go
from state_runtime.maintenance.move.plan import plan_move
from state_runtime.snapshot.catalog import Catalog, read_job_info
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.fencing import live_run
from state_runtime.snapshot.handover import Moving, read_moving, read_outcome
from state_runtime.snapshot.migration import Migration, carry_migration, read_migration, record_step
from state_runtime.snapshot.paths import MOVING_FILE
from state_runtime.store import Store
from stillstate.orchestration.config.job_location import is_home

__all__ = ["Moves", "refuse_other_target", "wait_until_quiet"]

QUIET_WITHIN_S: Final = 180.0
POLL_S: Final = 0.5


class Moves:
    """The effects on one job, between two roots.

    Args:
        poll: waits between two looks at a store.
        say: gets a line on each action.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        actor: Actor,
        *,
        poll: Callable[[float], object],
        say: Callable[[str], object],
    ) -> None:
        self._source, self._target, self._actor = source, target, actor
        self._poll, self._say = poll, say

    def move(self, migration: Migration) -> dict[str, Any]:
        """Copy everything to the target, and let the target count.

        Raises:
            Unavailable, if it can pass: the migration stays where it is; repeat it. StillstateError: the job still
                lives at the source.
        """
        try:
            if not is_home(self._target):
                wait_until_quiet(self._source, self._actor, self._poll)
                self._execute(keep_source=True, before_decided=lambda: carry_migration(self._target, migration))
        except StillstateError as error:
            if can_pass(error):
                raise
            if is_home(self._target):
                # A process that took over from this one has finished the move: nothing may be taken back here.
                raise Unavailable(f"{self._target.url} counts already: {error}") from error
            raise
        return {}

    def leave(self, migration: Migration) -> dict[str, Any]:
        """Delete the source; its tombstone refuses to begin the job again there.

        Raises:
            SnapshotInUse: another user needs it, and is named; repeat it when that user is done.
        """
        if self._source.list_names("") != [MOVING_FILE]:
            self._execute(keep_source=False, before_decided=lambda: None)
        outcome, info = read_outcome(self._target), Catalog.of_root(self._target).job_info()
        check(outcome is not None, "a root that counts says how it came")
        gone = Moving(
            uid=outcome.uid if outcome is not None else "",
            role="source",
            mode="move",
            what="root",
            other_url=self._target.url,
            job_uid=info.uid,
            snapshot_id=0,
            at_ms=self._actor.clock.now_ms(),
            host=self._actor.host,
            pid=self._actor.pid,
            term=migration.run_term,
        )
        if read_moving(self._source) is None:
            self._source.create(MOVING_FILE, gone.encode())
        return {}

    def has_committed(self, migration: Migration) -> bool:
        """Whether a run at the target has made a checkpoint: then the job stays there."""
        there = Catalog.of_root(self._target, self._actor.clock)
        return any(
            there.manifest(snapshot_id).kind == "checkpoint"
            for snapshot_id in there.snapshot_ids(after=migration.snapshot_id)
        )

    def go_home(self, migration: Migration) -> None:
        """Let the source count again, with the next step of the migration recorded there.

        Raises:
            SnapshotInUse: another user needs the target, and is named; repeat it when that user is done.
        """
        here = read_migration(self._source)
        check(here is not None and here.uid == migration.uid, "the source has the record of what began there")
        if here is not None and here.step == "move":
            # Before the target stops counting: from then on the source's record shows the next step.
            record_step(
                self._source,
                here,
                "start-old",
                self._actor.clock,
                reason=migration.reason,
                owner=migration.owner,
                owner_space=migration.owner_space,
                run_term=migration.run_term,
            )
        self._give_target_up()

    def free(self) -> None:
        """Release the source from the move; files at the target will never be used."""
        moving = read_moving(self._source)
        if moving is not None and (moving.role, moving.other_url) == ("source", self._target.url):
            if read_boundary(self._target).is_tombstone or read_moving(self._target) is None:
                let_go(self._source, moving.uid)
            else:
                abort_move(self._source, self._target, clock=self._actor.clock, ids=self._actor.ids)
        try:
            self._clear_target()
        except Unavailable as error:
            # The job must not wait for a place that it does not go to.
            self._say(f"{self._target.url} could not be looked at; remove what lies there: {error}")

    def _clear_target(self) -> None:
        there = read_moving(self._target)
        if there is not None and there.role == "target" and there.other_url == self._source.url:
            if read_outcome(self._target) is None:
                abort_move(self._source, self._target, clock=self._actor.clock, ids=self._actor.ids)
            self._give_target_up()

    def _give_target_up(self) -> None:
        wait_until_quiet(self._target, self._actor, self._poll)
        try:
            done = delete_root(
                self._target,
                clock=self._actor.clock,
                ids=self._actor.ids,
                owner=self._actor.owner,
                with_savepoints=True,
            )
        except JobNotFound:
            return  # an interrupted attempt has removed it
        if done.failures:
            self._say(f"{len(done.failures)} objects stay in {self._target.url}, which no job uses: remove the folder")

    def _execute(self, *, keep_source: bool, before_decided: Callable[[], None]) -> None:
        actor = self._actor
        plan = plan_move(self._source, self._target, mode="move", snapshot_id=None, clock=actor.clock)
        result = execute_move(
            self._source,
            self._target,
            plan,
            keep_source=keep_source,
            before_decided=before_decided,
            actor=actor,
        )
        for path in result.left[:5]:
            self._say(f"{path} in {self._source.url} is not of Stillstate, and stays")


def wait_until_quiet(root: Store, actor: Actor, poll: Callable[[float], object]) -> None:
    """Wait while the heartbeat of a killed run still looks alive."""
    if read_job_info(root) is None:
        return  # no run is there, or it is being removed
    catalog = Catalog.of_root(root, actor.clock)
    deadline_s = actor.clock.monotonic_s() + QUIET_WITHIN_S
    while live_run(catalog, actor.clock) is not None and actor.clock.monotonic_s() < deadline_s:
        poll(POLL_S)


def refuse_other_target(migration: Migration, target: Store | None) -> None:
    """Refuse to continue a migration to another target than the one with which it was begun.

    Raises:
        InvalidConfiguration: the file names another place by now, or no place.
    """
    if migration.to_root and (target is None or target.url != migration.to_root):
        raise InvalidConfiguration(
            f"{migration} is under way, from {migration.from_root}, and the file does not name that place as "
            "`migration.to_store` any more: let it say so again until the migration is over"
        )
