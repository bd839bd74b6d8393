"""The sensor that notifies a receiver outside of Dagster of the troubles of a file's streams.

A trouble is a check that is red, or one of Stillstate's runs that failed and was not followed by one that succeeded.
The sent notifications are in a book (orchestration/notify/outbox.py), which is stored after every call, beside
Dagster's own cursors: a sensor's cursor is stored at a tick's end only, and after a daemon's death in a tick all its
calls would be repeated. So at most the call under way is repeated. A receiver that is down gets everything later, and
costs a tick one time-out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import dagster as dg

from state_runtime.base.clock import SYSTEM_CLOCK
from stillstate.assets.checks import ALIVE_CHECK, MATCHES_CHECK
from stillstate.assets.mount import Mount
from stillstate.orchestration.config.notify import NotifySpec
from stillstate.orchestration.config.spec import JobSpec, Spec
from stillstate.orchestration.jobs.alive_check import alive_spec
from stillstate.orchestration.jobs.checks import check_specs
from stillstate.orchestration.jobs.deletions import safe_spec
from stillstate.orchestration.jobs.matches_check import matches_spec
from stillstate.orchestration.jobs.materialize import materializations_spec
from stillstate.orchestration.jobs.past_checks import evaluation_of_record, is_red, newest_evaluations
from stillstate.orchestration.jobs.tags import ACTION_TAG, STREAM_TAGS
from stillstate.orchestration.jobs.verification import intact_spec, restorable_spec
from stillstate.orchestration.notify.outbox import TEXT_CHARS_MAX, Book, Trouble, read_book
from stillstate.orchestration.notify.receiver import NotTold, tell
from stillstate.orchestration.recovery.plan import GIVE_UP
from stillstate.orchestration.resources import StillstateResource
from stillstate.orchestration.sensors.sensor import sensor_of
from stillstate.orchestration.text import counted_text

__all__ = ["book_key", "build_failures_sensor"]

CALLS_BUDGET_S: Final = 30.0
"""For one tick, which Dagster ends after 60 s."""
RUNS_PER_TICK_MAX: Final = 200
_DRIVER_ACTIONS: Final = ("start", "recover", GIVE_UP)


def book_key(mount: Mount) -> str:
    """Return the key of a mount's book among Dagster's cursors."""
    return mount.name("stillstate_failures")


def build_failures_sensor(
    mount: Mount, jobs: Sequence[JobSpec], tell: Callable[..., None] = tell
) -> dg.SensorDefinition:
    """Build the sensor for the jobs that this code location knows.

    Args:
        tell: makes one call; replaced in tests that need no receiver.
    """
    checks = {spec.key: job.name for job in jobs for spec in _checks_of(mount, job)}
    streams = {mount.tag(job.name): job.name for job in jobs}

    @sensor_of(
        mount,
        "stillstate_failures",
        "Tells the receiver of `notify` once of every check that is red and of every run that failed, and once when "
        "that has passed.",
        30,
    )
    def stillstate_failures(context: dg.SensorEvaluationContext, stillstate: StillstateResource) -> dg.SensorResult:
        spec, storage, key = stillstate.spec(), context.instance.daemon_cursor_storage, book_key(mount)
        if spec.notify is None:
            return dg.SensorResult(skip_reason="the file has no section `notify` any more; reload the code location")
        before = read_book(storage.get_cursor_values({key}).get(key))
        now_ms = stillstate.clock().now_ms()
        book = _look(context.instance, before, checks, streams, spec, now_ms)
        if book != before:
            storage.set_cursor_values({key: book.text()})
        said = []
        began_s = SYSTEM_CLOCK.monotonic_s()
        for message in book.due()[: spec.notify.per_tick_max]:
            if SYSTEM_CLOCK.monotonic_s() - began_s + spec.notify.timeout_s > CALLS_BUDGET_S:
                break
            try:
                tell(spec.notify, message.document(), spec.file.parent)
            except NotTold as error:
                # The next call would wait as long for the same receiver.
                context.log.error(str(error))
                said.append(str(error))
                break
            book = book.after(message)
            storage.set_cursor_values({key: book.text()})
            said.append(f"{message.trouble.key}: {message.state}, told")
        waiting, lasting = len(book.due()), sum(not entry.passed_ms for entry in book.entries.values())
        waits = f"{counted_text(lasting, 'trouble')}, {counted_text(waiting, 'message')} to be told"
        return dg.SensorResult(
            cursor=waits,
            skip_reason="; ".join([*said, waits]),
        )

    return stillstate_failures


def _checks_of(mount: Mount, job: JobSpec) -> Iterator[dg.AssetCheckSpec]:
    yield alive_spec(mount, job.name)
    yield matches_spec(mount, job.name)
    yield materializations_spec(mount, job.name)
    yield intact_spec(mount, job.name)
    yield restorable_spec(mount, job.name)
    yield safe_spec(mount, job.name, "retention")
    yield safe_spec(mount, job.name, "gc")
    yield from check_specs(mount, job)


def _look(
    instance: dg.DagsterInstance,
    before: Book,
    checks: Mapping[dg.AssetCheckKey, str],
    streams: Mapping[str, str],
    spec: Spec,
    now_ms: int,
) -> Book:
    """Return the book after a look at Dagster's own record; read no store."""
    seen = newest_evaluations(instance, list(checks))
    red = [_red_check(key, checks[key], found, spec) for key, found in seen.items() if is_red(found)]
    passed = {_check_trouble(key): _at_ms(found) for key, found in seen.items() if evaluation_of_record(found).passed}
    failed_in = {found.run_id for found in seen.values() if is_red(found)}
    ill = {
        checks[key] for key, found in seen.items() if key.name == ALIVE_CHECK and not evaluation_of_record(found).passed
    }
    well = {checks[key]: _at_ms(found) for key, found in seen.items() if key.name == ALIVE_CHECK}
    matching = {
        checks[key]: _at_ms(found)
        for key, found in seen.items()
        if key.name == MATCHES_CHECK and evaluation_of_record(found).passed and checks[key] in well.keys() - ill
    }
    runs, read_id = _ended_runs(instance, before.read_id)
    for record, at_ms, is_failed in runs:
        tags = record.dagster_run.tags
        tag = next((tags[name] for name in STREAM_TAGS if name in tags), "")
        stream, action = streams.get(tag), tags.get(ACTION_TAG, "")
        if stream is None or not action:
            continue  # not a run of Stillstate, or of another mount
        key = f"run {action} {tag}"
        if not is_failed:
            red = [trouble for trouble in red if trouble.key != key]
            passed[key] = at_ms
            continue
        # The check that is red for the same reason is already notified, and says more.
        if record.dagster_run.run_id in failed_in or (action in ("recover", GIVE_UP) and stream in ill):
            continue
        passed.pop(key, None)
        red.append(_failed_run(instance, key, stream, record, at_ms, spec))
    for entry in before.entries.values():
        passed |= _passed_otherwise(entry.trouble, checks, streams, well, ill, matching, now_ms)
    return replace(before.with_seen(red, passed), read_id=read_id)


def _passed_otherwise(
    trouble: Trouble,
    checks: Mapping[dg.AssetCheckKey, str],
    streams: Mapping[str, str],
    well: Mapping[str, int],
    ill: set[str],
    matching: Mapping[str, int],
    now_ms: int,
) -> dict[str, int]:
    """Return the time at which a trouble passed without a successful run; empty: it lasts. A failed start has passed
    when the driver is alive, no matter what started it. A migration that was taken back, or did not begin, has passed
    when the job is well and has the settings of the file. A trouble of a check or stream that is no longer watched has
    passed.

    Args:
        matching: streams that are alive and have the settings of the file, and since when the latter is known.
    """
    kind, _, rest = trouble.key.partition(" ")
    if kind == "check":
        return {} if any(_check_trouble(key) == trouble.key for key in checks) else {trouble.key: now_ms}
    action, _, tag = rest.partition(" ")
    if tag not in streams:
        return {trouble.key: now_ms}
    if action == "migrate":
        # An older verdict is from before the migration; the sensor of the desired state judges again after each.
        matches_ms = matching.get(trouble.stream, 0)
        return {trouble.key: matches_ms} if matches_ms > trouble.at_ms else {}
    alive_ms = well.get(trouble.stream, 0)
    is_alive = action in _DRIVER_ACTIONS and trouble.stream not in ill and alive_ms > trouble.at_ms
    return {trouble.key: alive_ms} if is_alive else {}


# --- Dagster's own record --------------------------------------------------------------------------------------------


def _at_ms(record: Any) -> int:
    return int(record.event.timestamp * 1000)


def _check_trouble(key: dg.AssetCheckKey) -> str:
    return f"check {key.asset_key.to_user_string()}:{key.name}"


def _red_check(key: dg.AssetCheckKey, stream: str, record: Any, spec: Spec) -> Trouble:
    return Trouble(
        key=_check_trouble(key),
        stream=stream,
        what=key.name,
        where=key.asset_key.to_user_string(),
        text=_redacted(evaluation_of_record(record).description or "", stream, spec),
        at_ms=_at_ms(record),
    )


def _ended_runs(instance: dg.DagsterInstance, after_id: int | None) -> tuple[list[tuple[dg.RunRecord, int, bool]], int]:
    """Return the runs that ended since, in that order: the run, when, and whether it failed; and the id of the last
    event read.

    A sensor that looks for the first time begins with runs that end from now on.
    """
    if after_id is None:
        kinds = (dg.DagsterEventType.RUN_FAILURE, dg.DagsterEventType.RUN_SUCCESS)
        newest = [r.storage_id for kind in kinds for r in instance.fetch_run_status_changes(kind, limit=1).records]
        return [], max(newest, default=0)
    failures = dg.RunStatusChangeRecordsFilter(dg.DagsterEventType.RUN_FAILURE, after_storage_id=after_id)
    successes = dg.RunStatusChangeRecordsFilter(dg.DagsterEventType.RUN_SUCCESS, after_storage_id=after_id)
    events: list[tuple[int, Any, bool]] = []
    read_to: list[int] = []
    for after, is_failed in ((failures, True), (successes, False)):
        records = instance.fetch_run_status_changes(after, limit=RUNS_PER_TICK_MAX, ascending=True).records
        events += [(record.storage_id, record, is_failed) for record in records]
        if len(records) == RUNS_PER_TICK_MAX:
            read_to.append(records[-1].storage_id)
    # Events of the other kind beyond the end of a full page are left to the next tick: the order matters.
    end = min(read_to) if read_to else max((number for number, _, _ in events), default=after_id)
    events = sorted((event for event in events if event[0] <= end), key=lambda event: event[0])
    ids = list({record.event_log_entry.run_id for _, record, _ in events})
    runs = {r.dagster_run.run_id: r for r in instance.get_run_records(dg.RunsFilter(run_ids=ids))} if ids else {}
    found = [
        (runs[record.event_log_entry.run_id], int(record.timestamp * 1000), is_failed)
        for _, record, is_failed in events
        if record.event_log_entry.run_id in runs
    ]
    return found, end


def _failed_run(
    instance: dg.DagsterInstance, key: str, stream: str, record: dg.RunRecord, at_ms: int, spec: Spec
) -> Trouble:
    run = record.dagster_run
    return Trouble(
        key=key,
        stream=stream,
        what=run.job_name,
        where=run.run_id,
        text=_redacted(_why_failed(instance, run.run_id), stream, spec),
        at_ms=at_ms,
    )


def _why_failed(instance: dg.DagsterInstance, run_id: str) -> str:
    """Return the error of the first failed step, else the text of the run's end."""
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_FAILURE):
        event = entry.dagster_event
        data = event.step_failure_data if event is not None else None
        if data is not None and data.user_failure_data is not None and data.user_failure_data.description:
            return str(data.user_failure_data.description)
        if data is not None and data.error is not None:
            return str(data.error.message)
    ends = instance.all_logs(run_id, of_type=dg.DagsterEventType.RUN_FAILURE)
    return str(ends[-1].message) if ends else "the run failed"


def _redacted(text: str, stream: str, spec: Spec) -> str:
    """Return a text without the file's values that may be secret; other programs may have printed one."""
    job = spec.jobs.get(stream)
    if job is not None:
        text = job.redact(text)
    notify: NotifySpec | None = spec.notify
    text = text if notify is None else notify.secrets.redact(text)
    return text[:TEXT_CHARS_MAX]
