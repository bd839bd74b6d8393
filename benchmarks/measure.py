"""What the benchmarks share: one workload run through both engines in turns, and its figures.

Both engines are up at once and take turns, so that a slow minute of the machine hits both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.engines import Sample, WorkerPlan
from benchmarks.report import Figure, median, percentile, usable_cores
from benchmarks.workers import Turn, Worker, settle
from benchmarks.workloads import NO_ROW_COUNT, Side, Workload, write_data

__all__ = [
    "BATCH_TIMEOUT_S",
    "SIDES",
    "DisagreementError",
    "Measured",
    "Samples",
    "Step",
    "check_agreement",
    "figures_of",
    "measure",
    "new_console",
    "progress_display",
    "samples_dict",
    "sides_of",
    "steps_shown",
    "workload_dict",
]

BATCH_TIMEOUT_S = 300.0
TABLE_WIDTH = 120
SIDES: tuple[Side, Side] = ("ours", "peer")

Samples = Mapping[Side, Sequence[Sample]]


@dataclass(frozen=True)
class Measured:
    """What counts of one workload.

    Attributes:
        samples: One per counted trigger.
        cpu_ms: CPU time a batch, one per counted turn.
    """

    samples: Samples
    cpu_ms: Mapping[Side, Sequence[float]]


Step = Callable[[str, int], None]


class DisagreementError(RuntimeError):
    """The engines do not hold the same state after the same batch: their times must not be compared."""


def sides_of(workload: Workload) -> tuple[Side, ...]:
    """The engines that run a workload; one that is judged by another's peer needs none of its own."""
    return ("ours",) if workload.peer_from else SIDES


# Engines warm up in turns too: Spark ends Python workers that were idle for a minute
# (`IDLE_WORKER_TIMEOUT_NS` of its PythonWorkerFactory), and the first triggers that count would start them anew.
_WARM_PARTS = 10


def measure(
    workload: Workload, folder: Path, cores: int, step: Step, start: Callable[[WorkerPlan], Worker] = Worker
) -> Measured:
    """Run one workload: pre-fill and warm both engines, then let them take turns.

    Args:
        start: Starts the worker of a plan.

    Returns:
        The counted samples of each side, without pre-fill, warm-up and (`drop_first`) the first of each turn, and
        the CPU time of the turns after the warm-up.

    Raises:
        WorkerFailed: An engine failed.
        DisagreementError: The engines disagree on the state.
    """
    step("writing input", 0)
    files = tuple(write_data(workload, folder / "input"))
    sides = sides_of(workload)
    counted: dict[Side, list[Sample]] = {side: [] for side in sides}
    everything: dict[Side, list[Sample]] = {side: [] for side in sides}
    cpu_ms: dict[Side, list[float]] = {side: [] for side in sides}
    with ExitStack() as stack:
        workers: dict[Side, Worker] = {}
        for side in sides:
            step(f"starting {side}", 0)
            plan = WorkerPlan(side, workload, folder / side, cores, files)
            workers[side] = stack.enter_context(start(plan))
            workers[side].wait_ready()

        def turn(side: Side, batches: int, text: str) -> Turn:
            step(f"{side} {text}", 0)
            settle(list(workers.values()))
            done = workers[side].run(batches, BATCH_TIMEOUT_S * batches)
            everything[side].extend(done.samples)
            step(f"{side} {text}", batches)
            return done

        for side in sides:
            if workload.prefill_batches:
                turn(side, workload.prefill_batches, "pre-fill")
        for part in range(_WARM_PARTS):
            for side in sides:
                warm = workload.turns[side].warm
                if batches := warm * (part + 1) // _WARM_PARTS - warm * part // _WARM_PARTS:
                    turn(side, batches, "warm-up")
        for number in range(workload.rounds):
            # The order changes every round, so that neither engine always follows the other's last turn.
            for side in sides if number % 2 == 0 else reversed(sides):
                batches = workload.turns[side].per_round
                done = turn(side, batches, f"round {number + 1}/{workload.rounds}")
                counted[side].extend(done.samples[1:] if workload.drop_first else done.samples)
                cpu_ms[side].append(done.cpu_ms / batches)
    check_agreement(workload, everything)
    return Measured(counted, cpu_ms)


def check_agreement(workload: Workload, samples: Samples) -> None:
    """Compare what both engines hold after the same batch of the same input.

    Raises:
        DisagreementError: In some batch they read a different number of rows, or hold a different number of state
            rows after it.
    """
    uncounted = dict(workload.peer_conf).keys() & dict(NO_ROW_COUNT).keys()
    what_to_compare = ("input_rows",) if uncounted else workload.compare
    peer = {sample.batch_id: sample for sample in samples.get("peer", ())}
    for ours in samples["ours"]:
        theirs = peer.get(ours.batch_id)
        if theirs is None:
            continue
        for what in what_to_compare:
            if getattr(ours, what) != getattr(theirs, what):
                raise DisagreementError(
                    f"workload {workload.key}, batch {ours.batch_id}: {what} is {getattr(ours, what)} in ours "
                    f"and {getattr(theirs, what)} in the peer; the engines did not do the same work"
                )


def figures_of(workload: Workload, measured: Measured) -> list[Figure]:
    """Turn what counts of one workload into its figures (medians over the triggers)."""
    samples = measured.samples
    name = f"{workload.key}: {workload.title}"
    trigger_ms = {side: median([sample.trigger_ms for sample in samples[side]]) for side in SIDES}
    if workload.measure == "rows_per_s":
        rate = {side: workload.rows / trigger_ms[side] * 1000 for side in SIDES}
        figures = [Figure(f"{name}: rows", "rows/s", rate["ours"], rate["peer"], workload.target)]
    else:
        figures = [Figure(f"{name}: trigger", "ms", trigger_ms["ours"], trigger_ms["peer"], workload.target)]
    if "checkpoint" in workload.informs:
        for q in (50, 99):
            ours, peer = (percentile([sample.checkpoint_ms for sample in samples[side]], q) for side in SIDES)
            figures.append(Figure(f"{name}: checkpoint p{q}", "ms", ours, peer))
    if "cpu" in workload.informs:
        ours, peer = (median(measured.cpu_ms[side]) for side in SIDES)
        figures.append(Figure(f"{name}: CPU time a batch", "ms", ours, peer))
    return figures


def workload_dict(workload: Workload) -> dict[str, object]:
    """A workload for the JSON file."""
    resolved = replace(workload, partitions=workload.partitions or usable_cores())
    return {**asdict(resolved), "target": None if workload.target is None else str(workload.target)}


def samples_dict(measured: Measured) -> dict[str, object]:
    """What was measured, for the JSON file."""
    return {
        side: {"triggers": [asdict(s) for s in measured.samples[side]], "cpu_ms": measured.cpu_ms[side]}
        for side in measured.samples
    }


def steps_shown(progress: Progress, workload: Workload) -> Step:
    """Add a bar that counts the batches of both engines, and return what moves it."""
    turns = [workload.turns[side] for side in sides_of(workload)]
    total = sum(workload.prefill_batches + turn.total(workload.rounds) for turn in turns)
    task = progress.add_task(f"{workload.key}: {workload.title}", total=total)

    def step(text: str, batches: int) -> None:
        progress.update(task, description=f"{workload.key}: {workload.title}: {text}", advance=batches)

    return step


def new_console() -> Console:
    """A console on which the table does not wrap when the output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=TABLE_WIDTH)


def progress_display(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console,
    )  # fmt: skip
