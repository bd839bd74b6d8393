"""What must hold when a soak under Dagster is over, found in what it left: the jobs' roots, their output, Dagster's record."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import dagster as dg

from examples.flights import oracle
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.maintenance.gc.collect import MIN_AGE_SAFE_S, apply_gc, plan_gc
from state_runtime.maintenance.verify.roots import verify_root
from state_runtime.snapshot.savepoint_record import savepoint_names
from state_runtime.spark.session import build_session
from stillstate.assets.checks import ALIVE_CHECK, MATCHES_CHECK
from stillstate.orchestration.sensors.overview import CHANGES_EVERY_S
from stillstate.orchestration.sensors.recovery import SHOWN_EVERY_S
from tests.soak.disturbances import (
    EventBound,
    events_of_checkpoints_max,
    events_of_checks_max,
    events_of_the_overview_max,
)
from tests.soak.flights_folder import INTERVAL_S, JOBS, SCHEDULED, UNREACHABLE, FlightsFolder

__all__ = ["Record", "Root", "checked_output", "checked_root", "record_of"]

EVENTS_READ_MAX: Final = 10_000
_TEXT_CHARS: Final = 300


@dataclass(frozen=True, kw_only=True)
class Root:
    """One job root.

    Attributes:
        made, left: snapshots: the newest id, and how many there are.
        findings: of a full verification, before and after everything that nothing needs was collected.
        orphans, orphan_bytes: what nothing needs; of it `past_floor` is older than the floor that the jobs have.
        uncollected: of `orphans`, what a collection left.
    """

    job: str
    terms: int
    made: int
    left: int
    savepoints: int
    findings: tuple[str, ...]
    orphans: int
    orphan_bytes: int
    past_floor: int
    uncollected: int

    def problems(self) -> Iterator[str]:
        """What does not hold."""
        yield from (f"verify of {self.job}: {text}" for text in self.findings)
        if self.past_floor:
            yield f"{self.job} has {self.past_floor} orphans older than the floor of {MIN_AGE_SAFE_S:g} s"
        if self.uncollected:
            yield f"a collection of {self.job} without a floor left {self.uncollected} orphans"


def checked_root(folder: FlightsFolder, job: str) -> Root:
    """Verify a root that nobody writes to any more, collect all that nothing needs, and verify it again.

    The soak is shorter than any floor that the file may have. So the orphans that it left are also collected without
    one: each must be collectable, and none may be needed.
    """
    catalog = folder.catalogs[job]
    status, newest, root = catalog.status(), catalog.latest(), catalog.root
    findings = _verified(folder, job)
    old = plan_gc(root, clock=SYSTEM_CLOCK, min_age_s=MIN_AGE_SAFE_S)
    all_of_them = plan_gc(root, clock=SYSTEM_CLOCK, min_age_s=0.0, unsafe_min_age=True)
    done = apply_gc(root, all_of_them, clock=SYSTEM_CLOCK, ids=SYSTEM_IDS, owner="soak")
    findings += (*_verified(folder, job), *(f"{f.path}: {f.message}" for f in done.failures))
    return Root(
        job=job,
        terms=0 if status is None else status.term,
        made=0 if newest is None else newest.snapshot_id,
        left=len(catalog.snapshot_ids()),
        savepoints=len(savepoint_names(root)),
        findings=findings,
        orphans=len(all_of_them.candidates),
        orphan_bytes=all_of_them.bytes,
        past_floor=len(old.candidates),
        uncollected=len(plan_gc(root, clock=SYSTEM_CLOCK, min_age_s=0.0, unsafe_min_age=True).candidates),
    )


def _verified(folder: FlightsFolder, job: str) -> tuple[str, ...]:
    report = verify_root(folder.catalogs[job].root, level="full", clock=SYSTEM_CLOCK, ids=SYSTEM_IDS)
    cut = () if report.complete else ("the verification was given up before its end",)
    return (*(f"{f.kind}: {f.path}: {f.detail}" for f in report.findings), *cut)


def checked_output(folder: FlightsFolder, fed: int) -> dict[str, oracle.OracleReport]:
    """The output of each job beside a recomputation of the flights that were fed, by a Spark batch."""
    conf = {"spark.sql.shuffle.partitions": "2", "spark.ui.enabled": "false"}
    spark = build_session("soak-oracle", master="local[2]", conf=conf)
    try:
        year = spark.read.parquet(str(folder.year)).where(f"flight_id <= {fed}")
        return {
            job: oracle.compare_frames(
                spark,
                year=year,
                legs=spark.read.parquet(str(folder.legs(job))),
                by_carrier=spark.read.parquet(str(folder.by_carrier(job))),
            )
            for job in JOBS
        }
    finally:
        spark.stop()


# --- Dagster's record ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Record:
    """What Dagster says of the soak.

    Attributes:
        runs: by stream, kind and outcome.
        failures: runs that did not succeed, of the streams whose store answers, in words.
        failed_ticks: of sensors and schedules, in words.
        ticks: of each sensor.
        bounds: events without a run, kind by kind.
    """

    runs: dict[str, dict[str, dict[str, int]]]
    failures: tuple[str, ...]
    failed_ticks: tuple[str, ...]
    ticks: dict[str, int]
    bounds: tuple[EventBound, ...]

    def problems(self, *, has_had_each_schedule: bool) -> Iterator[str]:
        """What does not hold."""
        yield from (f"tick failed: {text}" for text in self.failed_ticks)
        for bound in self.bounds:
            if not bound.holds:
                yield f"{bound.events} events of {bound.what}; at most {bound.most} are due"
        for job in JOBS if has_had_each_schedule else ():
            for kind in SCHEDULED[job]:
                if not self.runs.get(job, {}).get(kind, {}).get("SUCCESS"):
                    yield f"no run of {kind}_{job} succeeded"


def record_of(folder: FlightsFolder, roots: Iterable[Root], began_s: float, ended_s: float) -> Record:
    """Read Dagster's record; the daemon has ended.

    Args:
        began_s, ended_s: when the daemon was started, and first asked to end. Ticks that its end has cut are its.
    """
    os.environ["DAGSTER_HOME"] = str(folder.home)
    with dg.DagsterInstance.get() as instance:
        runs, failures = _runs(instance)
        ticks, failed = _ticks(instance, ended_s)
        terms = {root.job: root.terms for root in roots}
        elapsed_s = ended_s - began_s
        bounds = tuple(_bounds(instance, terms, elapsed_s))
    return Record(runs=runs, failures=failures, failed_ticks=failed, ticks=ticks, bounds=bounds)


def _runs(instance: dg.DagsterInstance) -> tuple[dict[str, dict[str, dict[str, int]]], tuple[str, ...]]:
    found: dict[str, dict[str, Counter[str]]] = {}
    failures = []
    for run in instance.get_runs():
        kind, _, job = run.job_name.rpartition("_")
        found.setdefault(job, {}).setdefault(kind, Counter())[run.status.value] += 1
        if run.status is not dg.DagsterRunStatus.SUCCESS and job in JOBS:
            failures.append(f"{run.job_name} {run.status.value}: {_why(instance, run.run_id)}")
    plain = {job: {kind: dict(counts) for kind, counts in kinds.items()} for job, kinds in found.items()}
    return plain, tuple(failures)


def _why(instance: dg.DagsterInstance, run_id: str) -> str:
    """The last thing that a run said of its failure."""
    for record in instance.get_records_for_run(run_id, ascending=False, limit=20).records:
        event = record.event_log_entry.dagster_event
        if event is not None and event.is_failure:
            said: Any = event.event_specific_data
            error = getattr(said, "error", None)
            return (error.message if error is not None else event.message or "").strip()[:_TEXT_CHARS]
    return "it did not say"


def _ticks(instance: dg.DagsterInstance, ended_s: float) -> tuple[dict[str, int], tuple[str, ...]]:
    counts, failed = {}, []
    for state in instance.all_instigator_state():
        ticks = instance.get_ticks(state.instigator_origin_id, state.selector_id)
        counts[state.name] = len(ticks)
        failed += [
            f"{state.name}: {tick.error.message.strip()[:_TEXT_CHARS]}"
            for tick in ticks
            if tick.error is not None and tick.timestamp < ended_s
        ]
    return counts, tuple(failed)


def _bounds(instance: dg.DagsterInstance, terms: dict[str, int], elapsed_s: float) -> Iterator[EventBound]:
    for job in JOBS:
        keys = (dg.AssetKey([job, "checkpoints"]), dg.AssetKey([job, "stream"]))
        yield EventBound(
            what=f"checkpoints and runs of {job}",
            events=sum(_without_a_run(instance, key) for key in keys),
            most=events_of_checkpoints_max(elapsed_s, INTERVAL_S, terms[job]),
        )
    for job in (*JOBS, UNREACHABLE):
        for check in (ALIVE_CHECK, MATCHES_CHECK):
            yield EventBound(
                what=f"the check {check} of {job}",
                events=_evaluations(instance, dg.AssetCheckKey(dg.AssetKey([job, "stream"]), check)),
                most=events_of_checks_max(elapsed_s, terms.get(job, 0), SHOWN_EVERY_S),
            )
    yield EventBound(
        what="the overview",
        events=_without_a_run(instance, dg.AssetKey(["stillstate", "overview"])),
        most=events_of_the_overview_max(elapsed_s, CHANGES_EVERY_S),
    )


def _without_a_run(instance: dg.DagsterInstance, key: dg.AssetKey) -> int:
    records = instance.fetch_materializations(key, limit=EVENTS_READ_MAX).records
    return sum(not record.event_log_entry.run_id for record in records)


def _evaluations(instance: dg.DagsterInstance, key: dg.AssetCheckKey) -> int:
    storage = instance.event_log_storage
    return len(storage.get_asset_check_execution_history(key, limit=EVENTS_READ_MAX))
