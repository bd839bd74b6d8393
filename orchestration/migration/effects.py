"""The effect of each step of a migration. Each effect may be repeated: it first checks which part is already done.

Safety does not depend on that alone: terms decide which driver may write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from state_runtime.base.actor import Actor
from state_runtime.base.errors import (
    CorruptData,
    InvalidConfiguration,
    MissingSnapshot,
    StillstateError,
    StoreRefused,
    StoreUnavailable,
    Unavailable,
)
from state_runtime.driver.rollback import RollbackPlan, execute_rollback, plan_rollback
from state_runtime.maintenance.copy.savepointer import Savepointer
from state_runtime.maintenance.verify.roots import verify_root
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.locate import own_restore_point
from state_runtime.snapshot.migration import Migration, MigrationStep, RunSettings
from state_runtime.snapshot.paths import savepoint_path
from state_runtime.snapshot.pins import pin_snapshot, read_pins, unpin
from state_runtime.snapshot.savepoint_record import SavepointRecord, read_savepoint
from state_runtime.snapshot.term_files import RunStatus
from state_runtime.store import Store
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.config.start_options import StartOptions
from stillstate.orchestration.launchers import Launcher, StopTimedOut
from stillstate.orchestration.launchers.port import LOG_FOLLOWS
from stillstate.orchestration.migration.plan import LIVE, said_by
from stillstate.orchestration.migration.steps import has_same_state, judge_watched
from stillstate.orchestration.recovery.observe import Observation, observe

__all__ = ["Effects", "RolledBack", "savepoint_names_of"]

POLL_S: Final = 0.2
PIN_LASTS_MS: Final = 30 * 86_400_000
"""For a migration that never ends; the pin of any other is removed."""
_REASON_CHARS_SHOWN: Final = 200


class RolledBack(StillstateError):
    """The new run did not come up, and the job is as it was before; the message gives the reason.

    Args:
        stays_stopped: a person has stopped the new run, and so has stopped the job.
    """

    kind = "rolled-back"

    def __init__(self, message: str, *, stays_stopped: bool = False) -> None:
        super().__init__(message)
        self.stays_stopped = stays_stopped


def savepoint_names_of(wanted: str) -> tuple[str, str]:
    """Return the names that `Effects.saved` may give."""
    return wanted, f"{wanted}-again"


class Effects:
    """The effects on one job. An effect returns the values to record with the next step, or raises: an error that can
    pass by itself (`can_pass`), or why the step has failed.

    Args:
        job: with the settings of the file.
        savepointer: makes its savepoints.
        actor: this process.
        poll: waits between two looks at the store; returns at once in tests.
        say: gets a line on each action.
    """

    def __init__(
        self,
        job: JobSpec,
        catalog: Catalog,
        launcher: Launcher,
        savepointer: Savepointer,
        actor: Actor,
        *,
        poll: Callable[[float], object] | None = None,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._job, self._catalog = job, catalog
        self._root: Store = catalog.root
        self._launcher, self._savepointer, self._actor = launcher, savepointer, actor
        self._poll: Callable[[float], object] = threading.Event().wait if poll is None else poll
        self._say = say
        self._effects: dict[MigrationStep, Callable[[Migration], dict[str, Any]]] = {
            "save": self._save,
            "verify": self._verify,
            "go-back": self._go_back,
            "start": self._start,
            "watch": self._watch,
            "stop-new": self._stop_new,
            "restore": self._restore,
            "start-old": self._start_old,
        }

    def do(self, migration: Migration) -> dict[str, Any]:
        """Do the effect of a migration's present step."""
        return self._effects[migration.step](migration)

    def seen(self) -> Observation:
        """Return the driver's present condition."""
        return observe(self._job, self._catalog, self._launcher, self._actor.clock)

    def plan_back(self, place: str) -> RollbackPlan:
        """Plan a rollback to a snapshot or a savepoint of this job."""
        wanted = own_restore_point(place)
        if isinstance(wanted, str):
            read_savepoint(self._root, wanted)  # raises the error for a name that cannot be one
            where = self._root.child(savepoint_path(wanted)).url
        else:
            where = f"@{wanted}"
        return plan_rollback(self._catalog, where, takeover=True, storage_options=self._job.storage_options)

    def release(self, migration: Migration) -> None:
        """Release the savepoint: the migration no longer goes back to it, and rules of retention may expire it."""
        if migration.to_root or migration.fork_of:
            return
        try:
            folder = self._root.child(savepoint_path(migration.savepoint))
            for pin in read_pins(folder):
                if pin.note == migration.uid:
                    unpin(folder, pin)
        except StillstateError as error:
            self._say(f"the pin on savepoint {migration.savepoint!r} stays for now: {error}")

    # --- there -------------------------------------------------------------------------------------------------------

    def _save(self, migration: Migration) -> dict[str, Any]:
        self._end_what_hangs()
        made = self.saved(
            migration.savepoint,
            then="stop",
            trigger="upgrade",
            tags=("migration",),
            note=f"before the migration to {migration.target}",
        )
        if self.seen().health.verdict in LIVE:
            self._launcher.stop()  # it was recovered meanwhile, or did not get the request
        status = self._catalog.status()
        return {
            "savepoint": made.name,
            "snapshot_id": made.snapshot_id,
            "stopped_term": 0 if status is None else status.term,
        }

    def saved(self, wanted: str, **asked: Any) -> SavepointRecord:
        """Make a savepoint; if the driver ended before it made one, a second one of the job that does not run.

        Args:
            wanted: its name; the second one has another (`savepoint_names_of`).
            asked: see `Savepointer.make`.

        Raises:
            Unavailable: repeat it. InvalidConfiguration: it was not made.
        """
        message = ""
        for name in savepoint_names_of(wanted):
            try:
                made = self._savepointer.make_or_join(name, **asked)
            except StoreUnavailable:
                raise
            except Unavailable as error:
                if self.seen().health.verdict in LIVE:
                    raise
                message = str(error)
                continue
            if made.state == "COMPLETED":
                return made
            message = made.message
            if self.seen().health.verdict in LIVE:
                break
        raise InvalidConfiguration(f"the savepoint was not made: {message}")

    def _verify(self, migration: Migration) -> dict[str, Any]:
        folder = self._root.child(savepoint_path(migration.savepoint))
        # A job that is moved does not go back to a snapshot, and its pin would block the move.
        if not migration.to_root and not self._is_pinned(migration):
            # Rules of retention may not expire it while the job may go back to it.
            pin_snapshot(
                folder,
                migration.snapshot_id,
                reason="start",
                holder=str(migration),
                note=migration.uid,
                clock=self._actor.clock,
                ids=self._actor.ids,
                lasts_ms=PIN_LASTS_MS,
            )
        self.compare(folder, f"savepoint {migration.savepoint!r}", migration)
        return {}

    def compare(self, folder: Store, what: str, migration: Migration) -> None:
        """Read a folder that is laid out like a job root, and compare it with its manifests.

        Args:
            what: it is, for the message.

        Raises:
            StoreUnavailable: it cannot be read now. CorruptData: it is damaged.
        """
        report = verify_root(
            folder, level=migration.verify, seed=migration.uid, clock=self._actor.clock, ids=self._actor.ids
        )
        kinds = {finding.kind for finding in report.findings}
        if "unreachable" in kinds or not report.complete:
            raise StoreUnavailable(f"{what} cannot be read now; try again")
        if report.findings:
            worst = report.findings[0]
            raise CorruptData(f"{what} is damaged: {worst.path}: {worst.detail}")

    def _go_back(self, migration: Migration) -> dict[str, Any]:
        execute_rollback(self._catalog, self.plan_back(migration.go_back_to), self._actor)
        return {}

    def _start(self, migration: Migration) -> dict[str, Any]:
        status = self._live_run(above=migration.stopped_term, settings=migration.target)
        cause = migration.what if migration.fork_of else f"migration to {migration.target}"
        term = self._started(cause, migration) if status is None else status.term
        return {"run_term": term, "deadline_ms": self._actor.clock.now_ms() + int(migration.timeout_s * 1000)}

    def _watch(self, migration: Migration) -> dict[str, Any]:
        counted, made = migration.snapshot_id, 0
        while True:
            is_late = self._actor.clock.now_ms() > migration.deadline_ms
            try:
                status = self._catalog.status()
                for snapshot_id in self._catalog.snapshot_ids(after=counted):
                    manifest = self._catalog.manifest(snapshot_id)
                    made += manifest.kind == "checkpoint" and manifest.term >= migration.run_term
                    counted = snapshot_id
            except MissingSnapshot:
                status = self._catalog.status()  # one that is just being written, or has expired
            except Unavailable as error:
                if is_late:
                    # Nothing is known of the driver: that is no reason to take it back.
                    raise StoreUnavailable(f"the new run could not be looked at in time: {error}") from error
                self._poll(POLL_S)
                continue
            process = "unknown" if status is None else self._launcher.is_alive(status)
            found = judge_watched(status, migration, process, made=made, is_late=is_late)
            if found.is_up:
                return {"reason": found.why}
            if found.is_up is not None:
                words = self._launcher.last_words(status) if status is not None else None
                told = "" if words is None else f". {LOG_FOLLOWS}:\n{words.text}"
                raise RolledBack(found.why + told, stays_stopped=found.is_stopped)
            self._poll(POLL_S)

    # --- and back ----------------------------------------------------------------------------------------------------

    def _stop_new(self, migration: Migration) -> dict[str, Any]:
        status = self._catalog.status()
        if status is None or status.term <= migration.stopped_term:
            return {}
        try:
            self._launcher.stop()
        except (StopTimedOut, StoreRefused) as error:
            self._say(str(error))  # it is ended, or fenced by the run that follows
        now = self._catalog.status() or status
        if now.state not in ("stopped", "finished"):
            # Also a driver that has failed: its supervisor would start it again.
            self._say(self._launcher.end_lost(now))
        return {"run_term": max(migration.run_term, now.term)}

    def _restore(self, migration: Migration) -> dict[str, Any]:
        if not migration.snapshot_id:
            return {}
        folder = self._root.child(savepoint_path(migration.savepoint))
        saved = Catalog.of_root(folder, self._actor.clock).manifest(migration.snapshot_id)
        newest = self._catalog.latest_to_go_back_from()
        if newest is None or has_same_state(newest, saved):
            return {}
        self._say(f"back to snapshot {saved.snapshot_id}: the new run has committed up to {newest.snapshot_id}")
        plan = plan_rollback(self._catalog, folder.url, takeover=True, storage_options=self._job.storage_options)
        execute_rollback(self._catalog, plan, self._actor)
        return {}

    def _start_old(self, migration: Migration) -> dict[str, Any]:
        if not migration.was_running:
            return {}
        # Terms of a root that the job was moved to are not comparable here.
        above = migration.stopped_term if migration.to_root else migration.run_term
        if self._live_run(above=above, settings=migration.before) is None:
            why = migration.reason.split("\n")[0][:_REASON_CHARS_SHOWN]
            self._started(f"a migration was taken back: {why}", migration)
        return {}

    def run_on(self, migration: Migration, why: str) -> None:
        """Start a run with the settings before, if none lives: the job stays at the place where it has committed.

        Args:
            why: for its heartbeat.
        """
        if self._live_run(above=migration.run_term, settings=migration.before) is None:
            self._started(why, migration)

    # --- used by both ------------------------------------------------------------------------------------------------

    def _live_run(self, *, above: int, settings: RunSettings) -> RunStatus | None:
        """Return a run that an earlier attempt at this step has started, with these settings as far as it reports
        them."""
        seen = self.seen()
        if seen.status is None or seen.status.term <= above or seen.health.verdict not in LIVE:
            return None
        said = said_by(seen.status)
        is_other = (said.parallelism and settings.parallelism and said.parallelism != settings.parallelism) or (
            said.backend and settings.backend and said.backend != settings.backend
        )
        return None if is_other else seen.status

    def _started(self, cause: str, migration: Migration) -> int:
        # A run that still seems to live was stopped, or has other settings: it is fenced.
        options = StartOptions(takeover=True, accept_session_settings=migration.accept_session_settings)
        launched = self._launcher.start(options, cause=cause)
        self._say(f"term {launched.term} runs (process {launched.pid}, log {launched.log})")
        return launched.term

    def _end_what_hangs(self) -> None:
        """End a lost driver: it must not commit after the savepoint of the job, which was made as of a job that does
        not run."""
        seen = self.seen()
        if seen.status is None or seen.health.verdict in LIVE:
            return
        if seen.status.state in ("starting", "running", "failed"):
            self._say(self._launcher.end_lost(seen.status))

    def _is_pinned(self, migration: Migration) -> bool:
        folder = self._root.child(savepoint_path(migration.savepoint))
        return any(pin.note == migration.uid for pin in read_pins(folder))
