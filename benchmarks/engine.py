"""`python -m benchmarks.engine`: the state engine in one table: against Spark's operators, and how it grows.

Every kind of state and every built-in operator beside its counterpart in Spark, in the same run; then what Spark has no part in:
how an epoch's time depends on the number of keys, how far the slow epochs are from the median, and what a worker needs of
memory. Prints one table and writes benchmarks/results/engine.json.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress, TaskID

from benchmarks.engine_workloads import (
    COMPARISONS,
    GROWTH,
    SMALL,
    TAIL,
    Growth,
    Small,
    Tail,
    quick_growth,
    quick_small,
    quick_tail,
)
from benchmarks.engines import COMMON_CONF, PEER_CONF, Sample, WorkerPlan
from benchmarks.measure import (
    BATCH_TIMEOUT_S,
    DisagreementError,
    Measured,
    figures_of,
    measure,
    new_console,
    progress_display,
    samples_dict,
    steps_shown,
    workload_dict,
)
from benchmarks.report import (
    Figure,
    Report,
    describe_machine,
    median,
    percentile,
    render_table,
    usable_cores,
    write_json,
)
from benchmarks.workers import Turn, Worker, WorkerFailed, settle
from benchmarks.workloads import Turns, Workload, quick, write_data

__all__ = ["app", "comparison_order", "growth_figures", "small_figures", "tail_figures"]

RESULTS = Path(__file__).parent / "results"

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@dataclass
class _Results:
    """What a run has found so far."""

    figures: list[Figure] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, Any] = field(default_factory=dict)


@app.command()
def main(
    only: Annotated[
        str, typer.Option(help="Only these, e.g. [b]list,map[/b]; writes results/engine-partial.json.")
    ] = "",
    quick_run: Annotated[
        bool, typer.Option("--quick", help="Smoke test, no targets; writes results/engine-quick.json.")
    ] = False,
    keep: Annotated[bool, typer.Option(help="Keep the working folder with the engines' logs.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a target is missed.")] = False,
) -> None:
    """Measure the state engine: same machine, same run, same classes, same data as Spark's operators.

    Example: [b]python -m benchmarks.engine --only list,map[/b]
    """
    console = new_console()
    chosen = _chosen(only)
    results = _Results()
    folder = Path(tempfile.mkdtemp(prefix="stillstate-bench-"))
    try:
        with progress_display(console) as progress:
            _compare(comparison_order(chosen), folder, progress, results, quick_run)
            if GROWTH.key in chosen:
                _growth(quick_growth(GROWTH) if quick_run else GROWTH, folder, progress, results)
            if TAIL.key in chosen:
                _tail(quick_tail(TAIL) if quick_run else TAIL, folder, progress, results)
            if SMALL.key in chosen:
                _small(quick_small(SMALL) if quick_run else SMALL, folder, progress, results)
    except (WorkerFailed, DisagreementError) as error:
        console.print(f"[red]benchmark failed:[/red] {error}", highlight=False)
        raise typer.Exit(1) from error
    finally:
        if keep:
            console.print(f"working folder: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)

    name = "engine-quick" if quick_run else "engine-partial" if only else "engine"
    report = Report(
        name="engine",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        figures=tuple(results.figures),
        machine=describe_machine(),
        settings={"both": COMMON_CONF, "peer": PEER_CONF, "workloads": results.settings},
        samples=results.samples,
    )
    write_json(report, RESULTS / f"{name}.json")
    console.print(render_table(report))
    console.print(f"written: benchmarks/results/{name}.json")
    if strict and not report.holds:
        raise typer.Exit(1)


def comparison_order(chosen: Sequence[str]) -> list[Workload]:
    """The comparisons to run, in order; one that borrows its peer's figures brings the workload that has them."""
    known = {workload.key: workload for workload in COMPARISONS}
    needed = {*chosen, *(known[key].peer_from for key in chosen if key in known)}
    return [workload for workload in COMPARISONS if workload.key in needed]


def _compare(
    workloads: Sequence[Workload], folder: Path, progress: Progress, results: _Results, quick_run: bool
) -> None:
    """Run the comparisons with Spark one after the other."""
    measured: dict[str, Measured] = {}
    for one in workloads:
        workload = quick(one) if quick_run else one
        step = steps_shown(progress, workload)
        found = measure(workload, folder / workload.key, usable_cores(), step)
        step("done", 0)
        if workload.peer_from:
            peer = measured[workload.peer_from]
            found = Measured(
                {"ours": found.samples["ours"], "peer": peer.samples["peer"]},
                {"ours": found.cpu_ms["ours"], "peer": peer.cpu_ms["peer"]},
            )
        measured[workload.key] = found
        results.figures.extend(figures_of(workload, found))
        results.settings[workload.key] = workload_dict(workload)
        results.samples[workload.key] = samples_dict(found)
        # Ten million keys and their log need the room that finished workloads have.
        shutil.rmtree(folder / workload.key, ignore_errors=True)


def _growth(growth: Growth, folder: Path, progress: Progress, results: _Results) -> None:
    """Time the same updates over few and over many keys, in turns; then watch the memory of the workers with many."""
    workloads = {"few": growth.few, "many": growth.many}
    turns = growth.few.turns["ours"]
    total = sum(w.prefill_batches + turns.total(w.rounds) for w in workloads.values()) + growth.memory_batches
    task = progress.add_task(growth.key, total=total)
    samples: dict[str, list[Sample]] = {name: [] for name in workloads}
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, workload in workloads.items():
            progress.update(task, description=f"{growth.key}: {workload.title}: writing input")
            more = workload if name == "few" else _with_batches(workload, growth.memory_batches)
            files = tuple(write_data(more, folder / name / "input"))
            plan = WorkerPlan("ours", workload, folder / name / "ours", usable_cores(), files)
            workers[name] = stack.enter_context(Worker(plan))
            workers[name].wait_ready()

        def turn(name: str, batches: int) -> tuple[Sample, ...]:
            progress.update(task, description=f"{growth.key}: {workloads[name].title}")
            return _turn(workers, name, batches, progress, task).samples

        for name, workload in workloads.items():
            turn(name, workload.prefill_batches + turns.warm)
        for number in range(growth.few.rounds):
            for name in workloads if number % 2 == 0 else reversed(workloads):
                # The first epoch of a turn follows an idle time.
                samples[name].extend(turn(name, turns.per_round)[1:])
        watched = workers["many"].run(growth.memory_batches, BATCH_TIMEOUT_S * growth.memory_batches, watch_memory=True)
        progress.update(task, advance=growth.memory_batches)
    results.figures.extend(growth_figures(growth, samples["many"], samples["few"], watched.private_mib))
    results.settings[growth.key] = {name: workload_dict(workload) for name, workload in workloads.items()}
    results.samples[growth.key] = {
        **{name: [asdict(sample) for sample in found] for name, found in samples.items()},
        "private_mib": watched.private_mib,
    }
    shutil.rmtree(folder, ignore_errors=True)


def _turn(workers: Mapping[str, Worker], name: str, batches: int, progress: Progress, task: TaskID) -> Turn:
    """One worker's turn, once all of them are quiet."""
    settle(list(workers.values()))
    done = workers[name].run(batches, BATCH_TIMEOUT_S * batches)
    progress.update(task, advance=batches)
    return done


def _with_batches(workload: Workload, more: int) -> Workload:
    """The workload with more input at its end."""
    turns = workload.turns["ours"]
    return replace(workload, turns={"ours": Turns(turns.warm + more, turns.per_round)})


def growth_figures(growth: Growth, many: Sequence[Sample], few: Sequence[Sample], private_mib: float) -> list[Figure]:
    """The epoch's time with many keys by that with few, and the memory of a worker."""
    title = f"{growth.key}: epoch at {growth.many.title} / {growth.few.title}"
    many_ms, few_ms = (median([sample.trigger_ms for sample in samples]) for samples in (many, few))
    memory = f"{growth.key}: private memory of a worker, {growth.many.title}, {growth.many.partitions} shards"
    return [
        Figure(title, "ms", many_ms, few_ms, growth.target),
        Figure(memory, "MiB", private_mib, None, growth.memory),
    ]


def _tail(tail: Tail, folder: Path, progress: Progress, results: _Results) -> None:
    """Run many epochs in one turn."""
    workload = tail.workload
    turns = workload.turns["ours"]
    batches = workload.rounds * turns.per_round
    task = progress.add_task(f"{tail.key}: {workload.title}", total=workload.prefill_batches + turns.warm + batches)
    files = tuple(write_data(workload, folder / "input"))
    with Worker(WorkerPlan("ours", workload, folder / "ours", usable_cores(), files)) as worker:
        worker.wait_ready()
        first = workload.prefill_batches + turns.warm
        worker.run(first, BATCH_TIMEOUT_S * first)
        progress.update(task, advance=first)
        settle([worker])
        samples = worker.run(batches, BATCH_TIMEOUT_S * batches).samples[1:]
        progress.update(task, advance=batches)
    results.figures.extend(tail_figures(tail, samples))
    results.settings[tail.key] = workload_dict(workload)
    results.samples[tail.key] = [asdict(sample) for sample in samples]
    shutil.rmtree(folder, ignore_errors=True)


def tail_figures(tail: Tail, samples: Sequence[Sample]) -> list[Figure]:
    """The slow epochs by the median one."""
    times = [sample.trigger_ms for sample in samples]
    title = f"{tail.key}: p99 / median of {len(times)} epochs, {tail.workload.title}"
    return [Figure(title, "ms", percentile(times, 99), median(times), tail.target)]


def _small(small: Small, folder: Path, progress: Progress, results: _Results) -> None:
    """Time the same updates with each variant's settings, in turns."""
    workload, turns = small.workload, small.workload.turns["ours"]
    total = workload.prefill_batches + turns.total(workload.rounds)
    task = progress.add_task(small.key, total=total * len(small.variants))
    samples: dict[str, list[Sample]] = {name: [] for name in small.variants}
    cpu_ms: dict[str, list[float]] = {name: [] for name in small.variants}
    files = tuple(write_data(workload, folder / "input"))
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for number, (name, settings) in enumerate(small.variants.items()):
            plan = WorkerPlan(
                "ours", workload, folder / str(number), usable_cores(), files, settings=tuple(settings.items())
            )
            workers[name] = stack.enter_context(Worker(plan))
            workers[name].wait_ready()

        def turn(name: str, batches: int) -> Turn:
            progress.update(task, description=f"{small.key}: {workload.title}: {name}")
            return _turn(workers, name, batches, progress, task)

        for name in small.variants:
            turn(name, workload.prefill_batches + turns.warm)
        for number in range(workload.rounds):
            for name in small.variants if number % 2 == 0 else reversed(small.variants):
                done = turn(name, turns.per_round)
                # The first epoch of a turn follows an idle time.
                samples[name].extend(done.samples[1:])
                cpu_ms[name].append(done.cpu_ms / turns.per_round)
    results.figures.extend(small_figures(small, samples, cpu_ms))
    results.settings[small.key] = {**workload_dict(workload), "variants": small.variants}
    results.samples[small.key] = {
        name: {"triggers": [asdict(sample) for sample in samples[name]], "cpu_ms": cpu_ms[name]}
        for name in small.variants
    }
    shutil.rmtree(folder, ignore_errors=True)


def small_figures(
    small: Small, samples: Mapping[str, Sequence[Sample]], cpu_ms: Mapping[str, Sequence[float]]
) -> list[Figure]:
    """Each variant's epoch by that of a job as it comes, and its CPU time: work beside the epochs is in the second only."""
    first, *others = small.variants
    figures = []
    for name in others:
        title = f"{small.key}: {small.workload.title}, {name} / {first}"
        ours, peer = (median([sample.trigger_ms for sample in samples[of]]) for of in (name, first))
        figures.append(Figure(f"{title}: epoch", "ms", ours, peer))
        slow, usual = (percentile([sample.trigger_ms for sample in samples[of]], 99) for of in (name, first))
        figures.append(Figure(f"{title}: epoch p99", "ms", slow, usual))
        figures.append(
            Figure(f"{title}: CPU time a batch", "ms", *(sum(cpu_ms[n]) / len(cpu_ms[n]) for n in (name, first)))
        )
    return figures


def _chosen(only: str) -> list[str]:
    wanted = [part.strip() for part in only.split(",") if part.strip()]
    known = [*(workload.key for workload in COMPARISONS), GROWTH.key, TAIL.key, SMALL.key]
    unknown = [key for key in wanted if key not in known]
    if unknown:
        raise typer.BadParameter(f"unknown workload {', '.join(unknown)}; there are {', '.join(known)}")
    return wanted or known


if __name__ == "__main__":
    app()
