"""One of NEXMark's queries, as a job of ours and as a job of Flink, in turns over the same files.

Ours is up for the whole measurement; a turn gives it the next files, an epoch each. A turn of Flink is a whole job over all
files in its cluster, which stays up too. What a job takes whatever its input (slots, deployment, the last checkpoint) is
measured by one over a few files and taken off: what is left is the time for the rest of the events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.engines import WorkerPlan
from benchmarks.flink import events
from benchmarks.flink.cluster import Cluster
from benchmarks.flink.distribution import Distribution
from benchmarks.flink.queries import QUERIES, SETTINGS, tables
from benchmarks.flink.rest import FlinkFailed
from benchmarks.nexmark_queries import QUERIES as OUR_QUERIES
from benchmarks.report import Figure, Target, median, percentile, usable_cores
from benchmarks.workers import Worker
from benchmarks.workloads import Turns, Workload, write_data

__all__ = ["BACKENDS", "WORKLOADS", "FlinkRun", "figures_of", "measured", "rate_per_s", "scaled", "settings"]

Backend = Literal["hashmap", "rocksdb"]
BACKENDS: tuple[Backend, ...] = ("hashmap", "rocksdb")
FEW_FILES = 2
"""Of ours, that the job reads whose time is taken off."""
TURN_TIMEOUT_S = 540.0
TARGET = Target(">=", 2.0)
CLUSTER: Mapping[str, str] = {
    # Ours: 3 GiB for driver and executors, which are one JVM, and two Python workers.
    "jobmanager.memory.process.size": "1g",
    "taskmanager.memory.process.size": "5g",
    "restart-strategy.type": "none",
    "web.checkpoints.history": "1000",
    "execution.checkpointing.mode": "EXACTLY_ONCE",
    "execution.checkpointing.interval": "1s",
    "execution.checkpointing.incremental": "true",
    # As nexmark-flink has it: the end of a job waits for no checkpoint.
    "execution.checkpointing.checkpoints-after-tasks-finish.enabled": "false",
}
_ROWS = {"q18": 100_000}
Step = Callable[[str], None]


def _workload(name: str) -> Workload:
    return Workload(
        key=name,
        title=OUR_QUERIES[name].title,
        operator=name,
        # An epoch, with its checkpoint, takes about a second or less.
        rows=_ROWS.get(name, 200_000),
        keys=0,
        prefill_batches=0,
        rounds=3,
        turns={"ours": Turns(warm=6, per_round=6)},
        measure="rows_per_s",
        target=TARGET,
        data="bids",
        compare=(),
    )


WORKLOADS: Mapping[str, Workload] = {name: _workload(name) for name in QUERIES}


def scaled(workload: Workload, scale: float) -> Workload:
    """The same with a share of the events in a batch, and two rounds."""
    if scale >= 1:
        return workload
    rows = max(1_000, int(workload.rows * scale))
    return replace(workload, rows=rows, rounds=2, turns={"ours": Turns(warm=2, per_round=3)}, target=None)


@dataclass(frozen=True)
class FlinkRun:
    """One job of Flink.

    Attributes:
        runtime_s: from its tasks' start to the end, as the JobManager has it.
        cpu_s: of JobManager and TaskManager meanwhile.
        checkpoints: how many were completed.
        checkpoint_ms: end to end, of those that the JobManager's history has.
    """

    events: int
    runtime_s: float
    cpu_s: float
    checkpoints: int
    checkpoint_ms: tuple[float, ...]


def rate_per_s(whole: FlinkRun, few: FlinkRun, of: Literal["runtime_s", "cpu_s"] = "runtime_s") -> float:
    """Events a second (of CPU time) beyond what a job over a few files takes.

    Raises:
        FlinkFailed: the job over all files was not the longer one; there is no rate.
    """
    more, seconds = whole.events - few.events, float(getattr(whole, of) - getattr(few, of))
    if more <= 0 or seconds <= 0:
        raise FlinkFailed(
            f"{whole.events} events took {seconds:.2f} s more than {few.events}: measure on a quieter machine"
        )
    return more / seconds


def measured(workload: Workload, flink: Distribution, folder: Path, step: Step) -> dict[str, Any]:
    """Both engines in turns.

    Raises:
        WorkerFailed: ours failed.
        FlinkFailed: Flink did.
    """
    step("writing events")
    files = write_data(workload, folder / "input")
    whole, few = folder / "whole", folder / "few"
    events.write_streams(files, whole)
    events.write_streams(files[:FEW_FILES], few)
    counts = {whole: len(files) * workload.rows, few: FEW_FILES * workload.rows}
    turns = workload.turns["ours"]
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(flink, folder / "flink", settings(folder)))
        plan = WorkerPlan("ours", workload, folder / "ours", usable_cores(), tuple(files))
        worker = stack.enter_context(Worker(plan))
        worker.wait_ready()
        step("ours: warm-up")
        worker.run(turns.warm, TURN_TIMEOUT_S)
        backends: dict[Backend, list[float]] = {}
        for backend in BACKENDS:
            step(f"Flink: warm-up, {backend}")
            # Twice: the first compiles.
            backends[backend] = [_run(cluster, workload, backend, whole, counts).runtime_s for _ in range(2)]
        backend = min(BACKENDS, key=lambda name: backends[name][-1])
        ours: list[dict[str, Any]] = []
        peer: list[dict[str, Any]] = []
        for number in range(workload.rounds):
            for side in ("ours", "peer") if number % 2 == 0 else ("peer", "ours"):
                step(f"{side}: round {number + 1} of {workload.rounds}")
                if side == "ours":
                    turn = worker.run(turns.per_round, TURN_TIMEOUT_S)
                    ours.append({"cpu_ms": turn.cpu_ms, "triggers": [asdict(sample) for sample in turn.samples]})
                else:
                    runs = [_run(cluster, workload, backend, path, counts) for path in (few, whole)]
                    peer.append({"few": asdict(runs[0]), "whole": asdict(runs[1])})
    return {"rows": workload.rows, "backend": backend, "backends_s": backends, "ours": ours, "peer": peer}


def settings(folder: Path) -> dict[str, str]:
    return {**CLUSTER, "execution.checkpointing.dir": f"file://{folder / 'checkpoints'}"}


def _run(cluster: Cluster, workload: Workload, backend: Backend, inbox: Path, counts: Mapping[Path, int]) -> FlinkRun:
    """One job, to its end."""
    query = QUERIES[workload.key]
    cluster.gateway.open({**SETTINGS, "state.backend.type": backend})
    for statement in (*tables(inbox), query.sink):
        cluster.gateway.run(statement)
    before_s = cluster.cpu_seconds()
    job = cluster.gateway.run(query.insert)
    state = cluster.jobmanager.wait_ended(job, TURN_TIMEOUT_S)
    cpu_s = cluster.cpu_seconds() - before_s
    if state.state != "FINISHED":
        raise FlinkFailed(f"{workload.key}: {state.state}: {cluster.jobmanager.failure(job)}\n{cluster.log_tails()}")
    made = cluster.jobmanager.checkpoints(job)
    return FlinkRun(counts[inbox], state.runtime_s, cpu_s, made.completed, made.durations_ms)


def figures_of(name: str, piece: Mapping[str, Any], target: Target | None) -> list[Figure]:
    """Events a second, of clock and of CPU; checkpoints."""
    title = f"{name}: {WORKLOADS[name].title}"
    triggers = [sample for turn in piece["ours"] for sample in turn["triggers"]]
    rates, cpu_rates = _flink_rates(piece["peer"])
    # The whole of a turn, its slow epochs included: Flink's runs have theirs in them, too.
    our_rates = [
        _events(turn, piece["rows"]) / sum(s["trigger_ms"] for s in turn["triggers"]) * 1000 for turn in piece["ours"]
    ]
    our_cpu = [_events(turn, piece["rows"]) / turn["cpu_ms"] * 1000 for turn in piece["ours"]]
    made = [ms for run in piece["peer"] for ms in run["whole"]["checkpoint_ms"]]
    figures = [
        Figure(f"{title}: events", "events/s", median(our_rates), median(rates), target),
        Figure(f"{title}: events, CPU", "events/CPU-s", median(our_cpu), median(cpu_rates)),
    ]
    if made:
        ours_ms = percentile([sample["trigger_ms"] for sample in triggers], 50)
        figures.append(Figure(f"{title}: epoch; Flink's checkpoint, p50", "ms", ours_ms, median(made)))
    return figures


def _events(turn: Mapping[str, Any], rows: int) -> int:
    return len(turn["triggers"]) * rows


def _flink_rates(turns: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    pairs = [(FlinkRun(**turn["whole"]), FlinkRun(**turn["few"])) for turn in turns]
    return [rate_per_s(*pair) for pair in pairs], [rate_per_s(*pair, of="cpu_s") for pair in pairs]
