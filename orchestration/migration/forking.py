"""The effects of a fork beside starting and watching a driver: the new job gets a snapshot of the other one as its
first, or everything is restored as it was before.

    save     a savepoint of the other job, which continues to run
    copy     all objects that it needs go to the root of the new job, as a start with NO_CLAIM copies them
    verify   the copy is read and compared
    clear    the copy and the savepoint are removed; only if the new job has committed nothing

Each may be repeated. The other job is only read, except for the savepoint, and for a pin while it is copied from. From
then on the new job needs nothing of it, and retention and garbage collection of the two are independent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from state_runtime.base.actor import Actor
from state_runtime.base.errors import JobNotFound, MissingSnapshot, SnapshotInUse, check
from state_runtime.driver.start_position import StartFrom, StartPosition
from state_runtime.maintenance.delete.roots import delete_root, delete_savepoint
from state_runtime.maintenance.layout import ObjectKind
from state_runtime.pipeline.output_owner import OWNERS_DIR
from state_runtime.snapshot.catalog import Catalog, read_job_info
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.locate import own_restore_point
from state_runtime.snapshot.migration import Migration, MigrationStep
from state_runtime.snapshot.paths import savepoint_path
from state_runtime.snapshot.pins import read_pins, unpin
from state_runtime.snapshot.savepoint_record import read_savepoint
from state_runtime.store import Store, open_store
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.migration.effects import Effects, savepoint_names_of
from stillstate.orchestration.migration.fork_plan import ForkFound, ForkPlan, ForkRequest, plan_fork, refuse_itself
from stillstate.orchestration.migration.moving import wait_until_quiet

__all__ = ["FORK_STEPS", "ForkSide", "Forks"]

FORK_STEPS: Final[frozenset[MigrationStep]] = frozenset({"save", "copy", "verify", "clear"})
_RECORD: Final[tuple[ObjectKind, ...]] = ("migration",)
"""When a root is cleared this is kept: the record of the attempt, and the numbers that follow."""
_CAN_SAVE: Final = frozenset({"healthy", "starting"})
"""A driver in one of these states makes a requested savepoint; of all others the newest snapshot is taken as it is."""


@dataclass(frozen=True)
class ForkSide:
    """One of the two jobs, at its place."""

    job: JobSpec
    catalog: Catalog
    effects: Effects


class Forks:
    """The effects on one job, which begins with the state of another one.

    Args:
        side, source: the new job, and the other one.
        poll: waits between two looks at a store.
        say: gets a line on each action.
    """

    def __init__(
        self,
        side: ForkSide,
        source: ForkSide,
        actor: Actor,
        *,
        poll: Callable[[float], object],
        say: Callable[[str], object],
    ) -> None:
        self._side, self._source, self._actor = side, source, actor
        self._root: Store = side.catalog.root
        self._poll, self._say = poll, say

    def plan(self, request: ForkRequest) -> ForkPlan:
        """Plan a fork; only read.

        Raises:
            JobNotFound, MissingSnapshot: the other job has nothing to begin with, or there is no such snapshot.
            InvalidConfiguration, SnapshotInUse: the fork is not possible.
        """
        source, job = self._source, self._side.job
        refuse_itself(job.name, request.of)
        info = source.catalog.job_info()
        place = self._place(request.at)
        # Also refuses what a start from there would refuse: a claimed source, a savepoint that is not complete.
        has_begun = read_job_info(self._root) is not None or read_boundary(self._root).is_tombstone
        found = None
        if not has_begun and source.catalog.root.url != self._root.url:
            found = self._beginning(place or source.catalog.root.url).look()
        return plan_fork(
            job.name,
            request,
            ForkFound(
                source_root=source.catalog.root.url,
                root=self._root.url,
                place=place,
                snapshot_id=0 if found is None else found.snapshot_id,
                snapshot_bytes=0 if found is None else found.total_bytes,
                has_begun=has_begun,
                begins_with="" if job.start_from is None else job.start_from.place,
                shared_outputs=self._shared_outputs(f"{source.job.name}-{info.uid[:8]}-"),
            ),
            job.recovery.first_checkpoint_s,
        )

    def do(self, migration: Migration) -> dict[str, Any]:
        """Do the effect of one of `FORK_STEPS`."""
        effects: dict[MigrationStep, Callable[[Migration], dict[str, Any]]] = {
            "save": self._save,
            "copy": self._copy,
            "verify": self._verify,
            "clear": self._clear,
        }
        return effects[migration.step](migration)

    def savepoint_place(self, name: str) -> str:
        """Return the place of a savepoint of the other job."""
        return self._source.catalog.root.child(savepoint_path(name)).url

    # --- there -------------------------------------------------------------------------------------------------------

    def _save(self, migration: Migration) -> dict[str, Any]:
        made = self._source.effects.saved(
            migration.savepoint,
            then="continue",
            trigger="user",
            tags=("fork",),
            note=f"what job {self._side.job.name} begins with",
        )
        return {"savepoint": made.name, "fork_at": self.savepoint_place(made.name)}

    def _copy(self, migration: Migration) -> dict[str, Any]:
        beginning = self._beginning(migration.fork_at)
        beginning.look()
        info = beginning.fill(migration.uid, host=self._actor.host, pid=self._actor.pid)
        if info.uid != migration.uid:
            raise SnapshotInUse(f"{self._root.url}: somebody else has begun job {info.name!r} meanwhile")
        newest = self._side.catalog.latest()
        check(newest is not None, "a job that was filled has a snapshot")
        return {"snapshot_id": 0 if newest is None else newest.snapshot_id}

    def _verify(self, migration: Migration) -> dict[str, Any]:
        self._side.effects.compare(self._root, f"the copy in {self._root.url}", migration)
        return {}

    # --- and back ----------------------------------------------------------------------------------------------------

    def _clear(self, migration: Migration) -> dict[str, Any]:
        if self._has_committed(migration):
            # The output that it has published would come again under the same numbers if it were begun again.
            self._side.effects.run_on(migration, "it had made a checkpoint when its fork was abandoned")
            why = (
                f"it was ended for being late, had made a checkpoint by then, and was started again: {migration.reason}"
            )
            return {"step": "kept", "reason": why}
        self._remove_copy(migration)
        self._remove_savepoint(migration)
        return {}

    def _has_committed(self, migration: Migration) -> bool:
        """Whether the new job has made a checkpoint: then it stays."""
        if not migration.snapshot_id:
            return False
        catalog = self._side.catalog
        after = catalog.snapshot_ids(after=migration.snapshot_id)
        return any(catalog.manifest(snapshot_id).kind == "checkpoint" for snapshot_id in after)

    def _remove_copy(self, migration: Migration) -> None:
        """Remove all of the new job's root, except the record."""
        info = read_job_info(self._root)
        if info is not None and info.uid != migration.uid:
            self._say(f"{self._root.url} was begun by somebody else, and stays")
            return
        wait_until_quiet(self._root, self._actor, self._poll)
        try:
            done = delete_root(
                self._root,
                clock=self._actor.clock,
                ids=self._actor.ids,
                owner=self._actor.owner,
                with_savepoints=True,
                job_uid=migration.uid,
                keep=_RECORD,
            )
        except JobNotFound:
            return  # nothing was copied yet, or an interrupted attempt has removed it
        if done.failures:
            self._say(f"{len(done.failures)} objects stay in {self._root.url}, which no job uses")

    def _remove_savepoint(self, migration: Migration) -> None:
        """Remove the savepoint that was made for the fork, and the pin of an attempt that was killed."""
        source, actor = self._source.catalog.root, self._actor
        self._unpin(source, migration)
        for name in savepoint_names_of(migration.savepoint) if migration.savepoint else ():
            self._unpin(source.child(savepoint_path(name)), migration)
            try:
                delete_savepoint(source, name, clock=actor.clock, ids=actor.ids, owner=actor.owner)
            except MissingSnapshot:
                continue  # it was not made, or is removed
            except SnapshotInUse as error:
                self._say(f"savepoint {name!r} of job {self._source.job.name!r} stays: {error}")

    @staticmethod
    def _unpin(root: Store, migration: Migration) -> None:
        for pin in read_pins(root):
            if (pin.reason, pin.note) == ("start", migration.uid):
                unpin(root, pin)

    # --- looking -----------------------------------------------------------------------------------------------------

    def _place(self, at: str) -> str:
        """Return the place that the new job begins with; empty if that is a savepoint which is to be made."""
        root = self._source.catalog.root
        if at:
            wanted = own_restore_point(at)
            if isinstance(wanted, int):
                return f"{root.url}@{wanted}"
            read_savepoint(root, wanted)  # raises the error for a name that cannot be one
            return self.savepoint_place(wanted)
        if self._source.effects.seen().health.verdict in _CAN_SAVE:
            return ""
        newest = self._source.catalog.latest()
        if newest is None:
            raise MissingSnapshot(
                f"job {self._source.job.name!r} has no snapshot yet, so there is nothing to begin with; start both"
            )
        return f"{root.url}@{newest.snapshot_id}"

    def _beginning(self, place: str) -> StartPosition:
        return StartPosition(
            self._side.catalog,
            start_from=StartFrom(place, "NO_CLAIM", self._source.job.storage_options),
            storage_options=self._side.job.storage_options,
            clock=self._actor.clock,
            ids=self._actor.ids,
        )

    def _shared_outputs(self, identity: str) -> tuple[str, ...]:
        """Return the options of the new job that name a folder which the other one writes to: its sinks have left their
        names in it. Only options that the file declares as paths can be examined."""
        job = self._side.job
        return tuple(
            f"options.{name}"
            for name in job.path_options
            if isinstance(place := job.options.get(name), str)
            and any(n.startswith(identity) for n in open_store(place, job.storage_options).list_names(OWNERS_DIR))
        )
