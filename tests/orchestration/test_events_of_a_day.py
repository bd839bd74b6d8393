"""What a day of fifty fast jobs leaves in Dagster's storage: a clock that is simulated, events of the size that a real
instance stores."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import dagster as dg
from dagster._core.test_utils import instance_for_test
from job_roots import FakeClock, JobRoot

from state_runtime.base.steps import Step
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.term_files import RunStatus
from stillstate.assets.metadata import checkpoint_materialization, run_materialization, shape_of
from stillstate.assets.mount import Mount
from stillstate.orchestration.config.sections import ObservationSpec
from stillstate.orchestration.probes.points import POINTS_MAX, Point
from stillstate.orchestration.sensors.publishing import Published, why_publish

DAY_S, TICK_S, INTERVAL_S, PER_S = 86_400, 5, ObservationSpec().interval_s, 5
BYTES_MAX = 75 * 10**6
BYTES_MAX_WELL = 50 * 10**6
JOBS_OF_A_KIND = 10


def a_day(one: Manifest, *, restart_every_s: int = DAY_S, rescale_every_s: int = DAY_S) -> Counter[str]:
    """Events of one job that makes five checkpoints a second."""
    known, counts = Published(uid="root"), Counter[str]()
    for at_s in range(0, DAY_S, TICK_S):
        term = 1 + at_s // restart_every_s
        head = replace(
            one,
            snapshot_id=10 + at_s * PER_S,
            term=term,
            parallelism=1 + (at_s // rescale_every_s) % 2,
            kind="checkpoint",
        )
        if head.term > known.run_term:
            counts["runs"] += 1
            known = replace(known, run_term=head.term)
        if why_publish(head, known, at_s * 1000, INTERVAL_S) is not None:
            counts["checkpoints"] += 1
            known = replace(
                known, snapshot_id=head.snapshot_id, term=head.term, shape=shape_of(head), at_ms=at_s * 1000
            )
    return counts


def bytes_of_an_event(head: Manifest, points: tuple[Point, ...], status: RunStatus) -> tuple[int, int]:
    """Of a checkpoint's and a run's, in the files of a real instance."""

    def stored(instance: dg.DagsterInstance) -> int:
        return sum(file.stat().st_size for file in Path(instance.root_directory).rglob("*") if file.is_file())

    count = 100
    with instance_for_test() as instance:
        for_checkpoint = [
            checkpoint_materialization(
                Mount().checkpoints("job-017"), "a" * 32, head, points, status, after=1, why="interval"
            )
            for _ in range(count)
        ]
        for_run = [run_materialization(Mount().stream("job-017"), "a" * 32, points[0]) for _ in range(count)]
        sizes = [stored(instance)]
        for events in (for_checkpoint, for_run):
            for event in events:
                instance.report_runless_asset_event(event)
            sizes.append(stored(instance))
    return (sizes[1] - sizes[0]) // count, (sizes[2] - sizes[1]) // count


def test_a_day_of_fifty_jobs_at_five_checkpoints_a_second_stays_within_its_bounds(
    flights: JobRoot, clock: FakeClock
) -> None:
    flights.start()
    operators = [
        step
        for n in range(0, 8, 2)
        for step in (
            Step(kind="aggregate", name="plane-day", reads=(n,), keys=(("k",),), rows=10**9, late_rows=9, state_rows=9),
            Step(kind="sink", name=f"sink-{n}", reads=(n + 1,), rows=10**9),
        )
    ]
    flights.beat(steps=(Step(kind="source", name="flights", rows=10**9), *operators))
    status = flights.catalog.status()
    assert status is not None
    head = flights.checkpoint()
    points = tuple(replace(Point.of(head), snapshot_id=10**7 + n, at_ms=clock.now_ms()) for n in range(POINTS_MAX))
    kinds = [
        a_day(head),
        a_day(head, restart_every_s=3600),
        a_day(head, restart_every_s=600),
        a_day(head, rescale_every_s=3600),
        a_day(head, restart_every_s=7000, rescale_every_s=5000),
    ]
    checkpoints, runs = (JOBS_OF_A_KIND * sum(kind[name] for kind in kinds) for name in ("checkpoints", "runs"))
    of_checkpoint, of_run = bytes_of_an_event(head, points, status)
    total = checkpoints * of_checkpoint + runs * of_run
    print(f"{checkpoints + runs:,} events, {of_checkpoint:,} and {of_run:,} bytes each, {total:,} bytes")
    assert checkpoints >= len(kinds) * JOBS_OF_A_KIND * DAY_S / INTERVAL_S, "and every interval has one"
    assert 5 * JOBS_OF_A_KIND * (kinds[0]["checkpoints"] * of_checkpoint + kinds[0]["runs"] * of_run) < BYTES_MAX_WELL
    assert total < BYTES_MAX, "and a pruning deletes all but a month of it"
