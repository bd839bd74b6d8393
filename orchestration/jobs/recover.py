"""The run that brings a driver back: it looks once more, decides where the driver continues, starts it, and waits for
its first checkpoint. It fails if the checkpoint does not come, so a job in a crash loop shows as failed runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import dagster as dg

from state_runtime.base.errors import EXIT_OF_KIND, CorruptData, InvalidConfiguration, StillstateError
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import savepoint_path
from state_runtime.snapshot.savepoint_record import read_savepoint
from stillstate.assets.metadata_sets import rounded
from stillstate.assets.tables import restored_text
from stillstate.orchestration.config.begin_at import NEWEST, BeginAt
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.config.start_options import StartOptions
from stillstate.orchestration.jobs.tags import DAMAGE_TAG, DOWN_TAG, EXIT_TAG, LOST_TAG, RESTORED_TAG
from stillstate.orchestration.launchers import FirstCheckpoint, Launched, Launcher
from stillstate.orchestration.recovery.fallback import decide_fallback, look_for_damage
from stillstate.orchestration.recovery.observe import Observation
from stillstate.orchestration.resources import StillstateResource
from stillstate.orchestration.text import duration_text, redacted_location, time_text
from stillstate.orchestration.workers import add_tags

__all__ = [
    "RECOVERY_CAUSE",
    "GaveUp",
    "RecoverConfig",
    "Recovered",
    "note_exit",
    "note_recovered",
    "recover_driver",
    "recovered_value",
]

DAMAGE_CHARS_MAX: Final = 1000
"""Longest text of a damage in a run's tag; every page that lists runs shows their tags."""


RECOVERY_CAUSE: Final = "recovery of term "
"""The beginning of the cause of a run that a recovery started."""


class RecoverConfig(dg.Config):
    """Which failure to recover.

    Attributes:
        term: the term that was lost; 0 takes the newest. A newer term means that the job was already started again.
        from_snapshot: go back to this snapshot of the job's, regardless of `recovery.fallback`; 0: the newest. Also
            after recovery has abandoned the job. Later input of the job is read again; output that was published is
            kept.
        from_savepoint: the same to a savepoint, by its name.
        accept_session_settings: start although settings of Spark's session that change results (such as its time zone)
            are others than in that snapshot; the new ones are recorded. No sensor sets it.
        gave_up: set by the sensor when no attempt is left: the run starts nothing and fails with this text, so that the
            alerts for failed runs are sent.
        kind: of the error that ended the driver, as the sensor knows it; a driver that ended before it had a term has
            no heartbeat that reports it.
    """

    term: int = 0
    from_snapshot: int = 0
    from_savepoint: str = ""
    accept_session_settings: bool = False
    gave_up: str = ""
    kind: str = ""


class GaveUp(StillstateError):
    """A job is down and does not come back by itself; the message gives the reason and the next step.

    Args:
        driver_exit_code: that of the driver whose failure led here.
    """

    kind = "gave-up"

    def __init__(self, message: str, driver_exit_code: int) -> None:
        super().__init__(message)
        self.driver_exit_code = driver_exit_code


@dataclass(frozen=True)
class Recovered:
    """The result of a recovery.

    Attributes:
        launched: None if there was nothing to do.
        explained: why it continues from another snapshot than the newest, if it does.
        restored_from: the snapshot that it continues from, for people.
        down_since_ms: the last heartbeat of the run that was lost.
        began_ms: when this recovery began.
    """

    reason: str
    launched: Launched | None = None
    first: FirstCheckpoint | None = None
    explained: str = ""
    restored_from: str = ""
    down_since_ms: int = 0
    began_ms: int = 0


def recover_driver(
    context: dg.OpExecutionContext, config: RecoverConfig, stillstate: StillstateResource, name: str, launch: str
) -> Recovered:
    """Bring a driver back; see the module.

    Args:
        launch: how a person launches the same recovery, in words.

    Raises:
        GaveUp: the run is to report that.
        CorruptData: the newest snapshot is damaged, and the policy leaves the choice to a person.
        LaunchFailed: the driver ended before its first checkpoint.
    """
    spec = stillstate.spec()
    job = spec.job(name)
    launcher = stillstate.launcher(spec, job)
    seen = stillstate.observe(spec, job)
    if config.gave_up:
        code = EXIT_OF_KIND.get(config.kind or ("" if seen.status is None else seen.status.error_kind), 1)
        raise GaveUp(f"{name}: {config.gave_up}{_last_words(launcher, seen)}", code)
    # Checked again here: the job may have been started between the sensor's tick and this run.
    if seen.status is None or not (seen.health.needs_recovery or (_asked_for(config) is not None and _is_over(seen))):
        return Recovered(seen.health.reason)
    if config.term and seen.status.term != config.term:
        return Recovered(f"term {config.term} was followed by {seen.health.reason}: another failure")
    context.log.warning(f"{name} is {seen.health.verdict}: {seen.health.reason}")
    began_ms = stillstate.clock().now_ms()
    begin, explained = _where(context, config, job, stillstate, seen, launch)
    context.log.info(launcher.end_lost(seen.status))
    cause = f"{RECOVERY_CAUSE}{seen.status.term}, which was {seen.health.verdict}"
    cause += f": {explained}" if explained else ""
    restored_from = _restored_from(stillstate.catalog(job), begin, job)
    context.log.info(f"it goes on from {restored_from}")
    # It was just judged lost, so its last heartbeat must not make the new driver end.
    options = StartOptions(takeover=True, begin=begin, accept_session_settings=config.accept_session_settings)
    launched = launcher.start(options, cause=cause)
    context.log.info(f"term {launched.term} runs (process {launched.pid}, log {launched.log}); its checkpoint …")
    first = launcher.wait_for_checkpoint(launched, job.recovery.first_checkpoint_s)
    context.log.info(first.how)
    return Recovered(
        seen.health.reason,
        launched,
        first,
        explained,
        restored_from=restored_from,
        down_since_ms=seen.status.at_ms,
        began_ms=began_ms,
    )


def _restored_from(catalog: Catalog, begin: BeginAt, job: JobSpec) -> str:
    """Return the snapshot that the next run continues from, and where it is."""
    place = f"{redacted_location(job.store).rstrip('/')}/{job.name}"
    wanted = begin.from_snapshot
    if isinstance(wanted, str):
        folder = savepoint_path(wanted)
        held = read_savepoint(catalog.root, wanted).snapshot_id
        found: Manifest | None = Catalog.of_root(catalog.root.child(folder), catalog.clock).manifest(held)
        place = f"{place}/{folder}"
    else:
        found = catalog.latest() if wanted is None else catalog.manifest(wanted)
    if found is None:
        return "nothing: the job has no snapshot yet"
    return f"snapshot {found.snapshot_id} of {time_text(found.created_at_ms)} in {place}"


def _asked_for(config: RecoverConfig) -> int | str | None:
    """Return the snapshot or the savepoint that a person requested; None without a request.

    Raises:
        InvalidConfiguration: it cannot be a snapshot or a savepoint.
    """
    if config.from_snapshot < 0:
        raise InvalidConfiguration(f"from_snapshot {config.from_snapshot} is no snapshot; give the id of one")
    if config.from_snapshot and config.from_savepoint:
        raise InvalidConfiguration("give from_snapshot or from_savepoint, one of the two")
    return config.from_snapshot or config.from_savepoint or None


def note_exit(context: dg.OpExecutionContext, error: StillstateError) -> None:
    """Record the exit code of the driver for a later tick: the driver may have had no term to report it in."""
    code = error.driver_exit_code if isinstance(error, GaveUp) else error.exit_code
    add_tags(context.instance, context.run_id, {EXIT_TAG: str(code)})


def note_recovered(context: dg.OpExecutionContext, done: Recovered) -> None:
    """Let the overview list this restart without reading the events of all streams."""
    first = done.first
    down = duration_text(_seconds(done.down_since_ms, first.at_ms)) if first is not None and first.at_ms else ""
    lost = done.explained or done.reason
    add_tags(
        context.instance,
        context.run_id,
        {LOST_TAG: lost[:DAMAGE_CHARS_MAX], RESTORED_TAG: done.restored_from, DOWN_TAG: down or "unknown"},
    )


def _is_over(seen: Observation) -> bool:
    """Whether the job stopped: a person who names a snapshot may also mean a stopped job, never one that runs."""
    return seen.health.standing == "ended"


def _where(
    context: dg.OpExecutionContext,
    config: RecoverConfig,
    job: JobSpec,
    stillstate: StillstateResource,
    seen: Observation,
    launch: str,
) -> tuple[BeginAt, str]:
    asked_for = _asked_for(config)
    if asked_for is not None:
        what = "savepoint" if isinstance(asked_for, str) else "snapshot"
        return BeginAt(from_snapshot=asked_for), f"back to {what} {asked_for}, as a person asked"
    catalog = stillstate.catalog(job)
    is_suspect = CorruptData.kind in (config.kind, "" if seen.status is None else seen.status.error_kind)
    try:
        catalog.latest()
    except CorruptData:
        is_suspect = True
    if not is_suspect:
        return NEWEST, ""
    damage = look_for_damage(catalog, stillstate.clock(), SYSTEM_IDS, on_look=context.log.info)
    chosen = decide_fallback(damage, job.recovery.fallback, launch)
    context.log.warning(chosen.explained)
    if chosen.is_refused:
        # A later tick gives this reason when it abandons the recovery, and the overview shows it.
        said = chosen.explained[:DAMAGE_CHARS_MAX]
        add_tags(context.instance, context.run_id, {DAMAGE_TAG: said})
        raise CorruptData(f"{job.name}: {chosen.explained}")
    return (NEWEST if chosen.back_to is None else BeginAt(from_snapshot=chosen.back_to)), chosen.explained


def _last_words(launcher: Launcher, seen: Observation) -> str:
    words = launcher.last_words(seen.status) if seen.status is not None else None
    return "" if words is None else f". The end of the log {words.log}:\n{words.text}"


def recovered_value(name: str, done: Recovered) -> dict[str, Any]:
    """Return the run's output, which is its metadata too."""
    if done.launched is None:
        return {"job": name, "outcome": "nothing to do", "reason": done.reason}
    launched, first = done.launched, done.first
    # Dagster's page shows only the first lines of a long event: the most wanted facts come first.
    return {
        "job": name,
        "outcome": "recovered",
        "restored_from": done.restored_from,
        **_times(done),
        **({"explained": done.explained} if done.explained else {}),
        "reason": done.reason,
        "how": first.how if first is not None else "",
        "first_checkpoint": (first.snapshot_id if first is not None else None) or 0,
        "term": launched.term,
        "state": launched.state,
        "pid": launched.pid,
        "host": launched.host,
        "log": launched.log,
    }


def _times(done: Recovered) -> dict[str, Any]:
    """Return how long it took, and what was restored, as far as its first checkpoint says so."""
    first = done.first
    if first is None or not first.at_ms:
        return {}
    found: dict[str, Any] = {
        "first_checkpoint_after_s": _seconds(done.began_ms, first.at_ms),
        "down_s": _seconds(done.down_since_ms, first.at_ms),
    }
    restored = restored_text(first.progress) if first.progress is not None else ""
    if first.progress is not None and restored:
        found["shards_restored"] = restored
        found["restored_bytes"] = first.progress.restored_bytes
        found["restore_s"] = rounded(first.progress.restore_ms / 1000)
    return found


def _seconds(from_ms: int, to_ms: int) -> float:
    """Return the seconds between two moments of two machines' clocks: never negative."""
    return rounded(max(0, to_ms - from_ms) / 1000)
