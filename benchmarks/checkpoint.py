"""`python -m benchmarks.checkpoint`: what a checkpoint costs, with the changelog on, off, and in Spark.

Measured in pieces (:mod:`benchmarks.checkpoint_workloads`), each with its own engine processes and kept in
benchmarks/results/pieces as soon as it is done. Prints one table of all pieces that there are and writes
benchmarks/results/checkpoint.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from benchmarks.checkpoint_workloads import (
    LOADS,
    MANIFEST,
    PIECES,
    REQUESTS,
    TURNS,
    Load,
    Turned,
    check_mode,
    figures_of,
    scaled,
)
from benchmarks.engines import Sample, WorkerPlan
from benchmarks.manifest_size import manifest_size
from benchmarks.measure import workload_dict
from benchmarks.pieces import Benchmark, Options
from benchmarks.report import usable_cores
from benchmarks.s3_counter import counting_s3
from benchmarks.workers import Worker, settle
from benchmarks.workloads import Turns, Workload, write_data

__all__ = ["SMALL_MEMORY", "app", "with_input_for"]

RESULTS = Path(__file__).parent / "results"
CHUNK = 50
"""Epochs of one turn: the bar moves, and the first of each is not counted, because it follows an idle time."""
START_S, EPOCH_S = 120.0, 20.0
"""How long a turn may take: a minute or two, and twenty seconds an epoch."""
FEWER_SHARDS = (2, 6)
"""Of a scaled run."""
SMALL_MEMORY = (("spark.driver.memory", "1g"),)

Piece = Mapping[str, Any]
app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def main(
    only: Annotated[str, typer.Option(help="Only these pieces, e.g. [b]value-on,keys[/b].")] = "",
    scale: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="Share of keys and epochs; below 1 nothing is judged.")
    ] = 1.0,
    table: Annotated[bool, typer.Option("--table", help="Measure nothing, show what there is.")] = False,
    keep: Annotated[bool, typer.Option(help="Keep the working folder with the engines' stores and logs.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a target is missed.")] = False,
) -> None:
    """Measure checkpoints: changelog on, changelog off on both backends, and Spark, on the same data.

    Example: [b]python -m benchmarks.checkpoint --only value-on,value-off-arrow[/b]
    """
    Benchmark("checkpoint", PIECES, _measure, figures_of).run(Options(only, scale, table, keep, strict), RESULTS)


def _measure(name: str, folder: Path, *, scale: float, progress: Progress) -> Piece:
    task = progress.add_task(name, total=None)

    def step(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total)

    try:
        if name in LOADS:
            load = LOADS[name]
            return _load(replace(load, workload=scaled(load.workload, scale)), folder, step, scale)
        if name in TURNS:
            loads = {n: replace(load, workload=scaled(load.workload, scale)) for n, load in TURNS[name].items()}
            return _in_turns(loads, folder, step, scale)
        if name == "requests":
            shards = REQUESTS.shards if scale >= 1 else FEWER_SHARDS
            return _requests(scaled(REQUESTS.workload, scale), shards, folder, step)
        return manifest_size(replace(MANIFEST, epochs=max(int(MANIFEST.epochs * scale), 5)), folder, step)
    finally:
        progress.remove_task(task)


def _load(load: Load, folder: Path, step: Callable[[int, int], None], scale: float) -> Piece:
    """Many small epochs of one workload in one mode."""
    workload = with_input_for(load.workload, load.epochs)
    turns = workload.turns["ours"]
    first = workload.prefill_batches + turns.warm
    total = first + turns.per_round
    files = tuple(write_data(workload, folder / "input"))
    plan = WorkerPlan(
        load.mode.side, workload, folder / "engine", usable_cores(), files, load.mode.settings, _memory(scale)
    )
    samples: list[Sample] = []
    with Worker(plan) as worker:
        worker.wait_ready()
        step(0, total)
        _run(worker, first)
        settle([worker])
        while len(samples) < load.epochs:
            # One more than counts: the first of a turn does not.
            batches = min(CHUNK, load.epochs - len(samples)) + 1
            samples.extend(_run(worker, batches)[1:])
            step(first + len(samples), total)
    return {
        "title": f"{workload.title}, {load.mode.title}",
        "workload": workload_dict(load.workload),
        "settings": dict(load.mode.settings),
        "snapshot_bytes": _snapshot_bytes(plan, load) if load.mode.side == "ours" else [],
        "samples": [asdict(sample) for sample in samples],
    }


def with_input_for(workload: Workload, epochs: int) -> Workload:
    """The workload with input for the epochs that follow an idle time and are not counted, too."""
    turns = workload.turns["ours"]
    return replace(workload, turns={"ours": Turns(turns.warm, epochs + -(-epochs // CHUNK))})


def _run(worker: Worker, batches: int) -> list[Sample]:
    return list(worker.run(batches, START_S + EPOCH_S * batches).samples)


def _memory(scale: float) -> tuple[tuple[str, str], ...]:
    return () if scale >= 1 else SMALL_MEMORY


def _snapshot_bytes(plan: WorkerPlan, load: Load) -> list[int]:
    """What a full restore of each of the newest snapshots would read.

    Raises:
        WrongModeError: the newest snapshot is not one of the load's mode: its times would be of something else.
    """
    from state_runtime.snapshot.catalog import Catalog
    from state_runtime.store import open_store

    catalog = Catalog(open_store(plan.store_url), "benchmark")
    newest = catalog.snapshot_ids()[-load.epochs :]
    shards = catalog.manifest(newest[-1]).shards
    check_mode(load.mode, None if shards is None else shards.backend)
    return [catalog.manifest(number).total_bytes for number in newest]


def _in_turns(loads: Turned, folder: Path, step: Callable[[int, int], None], scale: float) -> Piece:
    """Small epochs of several jobs that are up at once and take turns, in an order that changes."""
    rounds = next(iter(loads.values())).workload.rounds
    total = sum(load.workload.prefill_batches + load.workload.turns["ours"].total(rounds) for load in loads.values())
    done = 0
    samples: dict[str, list[Sample]] = {name: [] for name in loads}
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, load in loads.items():
            files = tuple(write_data(load.workload, folder / name / "input"))
            settings = load.mode.settings
            plan = WorkerPlan(
                "ours", load.workload, folder / name / "engine", usable_cores(), files, settings, _memory(scale)
            )
            workers[name] = stack.enter_context(Worker(plan))
            workers[name].wait_ready()

        def turn(name: str, batches: int) -> list[Sample]:
            nonlocal done
            settle(list(workers.values()))
            found = _run(workers[name], batches)
            done += batches
            step(done, total)
            return found

        for name, load in loads.items():
            turn(name, load.workload.prefill_batches + load.workload.turns["ours"].warm)
        for number in range(rounds):
            for name in loads if number % 2 == 0 else reversed(list(loads)):
                samples[name].extend(turn(name, loads[name].workload.turns["ours"].per_round)[1:])
    return {
        name: {
            "title": load.workload.title,
            "workload": workload_dict(load.workload),
            "settings": dict(load.mode.settings),
            "samples": [asdict(s) for s in samples[name]],
        }
        for name, load in loads.items()
    }


def _requests(workload: Workload, all_shards: tuple[int, int], folder: Path, step: Callable[[int, int], None]) -> Piece:
    """Requests to an S3 server per checkpoint, with few and with many shards."""
    turns = workload.turns["ours"]
    first, counted = workload.prefill_batches + turns.warm, turns.per_round
    total = len(all_shards) * (first + counted)
    counts: list[dict[str, Any]] = []
    for number, shards in enumerate(all_shards):
        of_shards = replace(workload, partitions=shards)
        with counting_s3() as server:
            plan = WorkerPlan(
                "ours",
                of_shards,
                folder / str(shards),
                usable_cores(),
                tuple(write_data(of_shards, folder / f"input-{shards}")),
                # Heartbeats and second attempts come by the clock, not with the checkpoint.
                (
                    ("checkpoint", {"mode": "aligned", "heartbeat_interval_s": 3600.0}),
                    ("upload", {"timeout_s": 60.0}),
                    ("materialization", {"by": "dagster"}),
                ),
                SMALL_MEMORY,
                f"s3://{server.bucket}/state",
                tuple(server.storage_options.items()),
            )
            with Worker(plan) as worker:
                worker.wait_ready()
                worker.run(first, START_S + 60.0 * first)
                step(number * (first + counted) + first, total)
                settle([worker])
                before = server.counts()
                worker.run(counted, START_S + 60.0 * counted)
                after = server.counts()
                step((number + 1) * (first + counted), total)
        counts.append(
            {"shards": shards, "checkpoints": counted}
            | {"per_checkpoint": {kind: (n - before.get(kind, 0)) / counted for kind, n in after.items()}}
        )
    return {"counts": counts, "workload": workload_dict(workload)}


if __name__ == "__main__":
    app()
