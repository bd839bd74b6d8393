"""Kill -9 of Flink's processes → the first checkpoint completed afterwards.

A keyed SQL aggregation counts and sums generated rows, with a checkpoint every second. Two kinds, in a cluster of their own
each: `taskmanager`, where the JobManager stays up and a supervisor, as a process manager or Kubernetes would be, starts a new
TaskManager as soon as the old one is gone; and `cluster`, where JobManager and TaskManager are killed and started at once,
and the job is given again with its newest retained checkpoint as soon as there are slots. Clients stay up in both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.flink.cluster import SLOTS, Cluster
from benchmarks.flink.distribution import Distribution
from benchmarks.flink.queries import SETTINGS
from benchmarks.flink.rest import Checkpoints, FlinkFailed
from benchmarks.report import Figure, median

__all__ = ["KINDS", "FlinkRestart", "Kind", "figures_of", "measured", "parts"]

Kind = Literal["taskmanager", "cluster"]
KINDS: tuple[Kind, ...] = ("taskmanager", "cluster")
CHECKPOINTS_BETWEEN = 3
LOOK_EVERY_S = 0.05
KEYS = 20_000
ROWS_PER_S = 2_000
"""As in `benchmarks.restart`, where ours reads so many."""
CLUSTER: Mapping[str, str] = {
    "jobmanager.memory.process.size": "1g",
    "taskmanager.memory.process.size": "2g",
    "execution.checkpointing.mode": "EXACTLY_ONCE",
    "execution.checkpointing.interval": "1s",
    "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
    "web.checkpoints.history": "100",
    # What a user sets who wants it to be fast: a death is seen within a second or two and not after up to fifty, and there is
    # no pause before the restart.
    "heartbeat.interval": "500",
    "heartbeat.timeout": "3000",
    "heartbeat.rpc-failure-threshold": "1",
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": "1000000",
    "restart-strategy.fixed-delay.delay": "0 ms",
    "state.backend.type": "hashmap",
}
SOURCE = f"""CREATE TABLE generated (id BIGINT, amount DOUBLE) WITH (
  'connector' = 'datagen', 'rows-per-second' = '{ROWS_PER_S}',
  'fields.id.min' = '0', 'fields.id.max' = '{KEYS - 1}', 'fields.amount.min' = '0', 'fields.amount.max' = '1')"""
SINK = "CREATE TABLE totals (id BIGINT, n BIGINT, total DOUBLE) WITH ('connector' = 'blackhole')"
JOB = "INSERT INTO totals SELECT id, COUNT(*), SUM(amount) FROM generated GROUP BY id"


@dataclass(frozen=True, kw_only=True)
class FlinkRestart:
    """One restart, in seconds; the last three add up to the first.

    Attributes:
        launch_s: kill → a new TaskManager's slots are there.
        restore_s: → the job is given its state's handles; nothing where the JobManager stayed, which does so before.
        first_checkpoint_s: → tasks deployed, state read, the first checkpoint completed.
        seen_s: kill → the JobManager restores the job, slots or not.
    """

    total_s: float
    launch_s: float
    restore_s: float
    first_checkpoint_s: float
    seen_s: float


def parts(killed_s: float, slots_s: float, seen: Checkpoints) -> FlinkRestart | None:
    """What a restart took; None while there is no checkpoint after its restore.

    Only what completed after the restore counts: a checkpoint that was on its way when the process died may be there later.
    """
    if seen.restored_ms / 1000 < killed_s:
        return None
    end_ms = seen.first_after(seen.restored_ms)
    if not end_ms:
        return None
    restored_s, end_s = seen.restored_ms / 1000, end_ms / 1000
    # Slots may be seen, by asking, a moment after the JobManager has used them.
    slots_s = min(slots_s, end_s)
    ready_s = max(slots_s, restored_s)
    return FlinkRestart(
        total_s=end_s - killed_s,
        launch_s=slots_s - killed_s,
        restore_s=ready_s - slots_s,
        first_checkpoint_s=end_s - ready_s,
        seen_s=restored_s - killed_s,
    )


def measured(kind: Kind, times: int, flink: Distribution, folder: Path, step: Callable[[str], None]) -> dict[str, Any]:
    """Kill so many times.

    Raises:
        FlinkFailed: a restart did not come.
    """
    settings = {**CLUSTER, "execution.checkpointing.dir": f"file://{folder / 'checkpoints'}"}
    restarts: list[FlinkRestart] = []
    with Cluster(flink, folder / "flink", settings) as cluster:
        job = _submit(cluster, "")
        for number in range(1, times + 1):
            step(f"{kind}: kill {number} of {times}")
            before = _checkpoints_between(cluster, job)
            killed_s = cluster.kill("taskmanager")
            if kind == "cluster":
                cluster.kill("jobmanager")
                cluster.wait_gone("jobmanager")
                cluster.start("jobmanager")
            cluster.wait_gone("taskmanager")
            cluster.start("taskmanager")
            slots_s = _slots(cluster, killed_s, kind)
            if kind == "cluster":
                job = _submit(cluster, before.path)
            restarts.append(_restarted(cluster, job, killed_s, slots_s))
    return {"restarts": [asdict(restart) for restart in restarts]}


def _submit(cluster: Cluster, path: str) -> str:
    start = {"execution.state-recovery.path": path} if path else {}
    cluster.gateway.open({**SETTINGS, **start})
    for statement in (SOURCE, SINK):
        cluster.gateway.run(statement)
    return cluster.gateway.run(JOB)


def _checkpoints_between(cluster: Cluster, job: str) -> Checkpoints:
    """Wait for a few checkpoints after the start or the last restart."""
    seen = cluster.jobmanager.checkpoints(job)

    def enough() -> bool:
        nonlocal seen
        seen = cluster.jobmanager.checkpoints(job)
        return sum(end > seen.restored_ms for _, end in seen.by_end) >= CHECKPOINTS_BETWEEN

    cluster.wait("checkpoints before a kill", enough, every_s=LOOK_EVERY_S)
    return seen


def _slots(cluster: Cluster, killed_s: float, kind: Kind) -> float:
    """Wall clock when a new TaskManager has offered its slots."""

    def there() -> bool:
        # The JobManager that stayed may still count the one that died.
        managers = cluster.jobmanager.get("/taskmanagers")["taskmanagers"]
        alive = [one for one in managers if one["timeSinceLastHeartbeat"] > killed_s * 1000]
        return sum(one["slotsNumber"] for one in alive) >= SLOTS and (kind == "cluster" or len(managers) == 1)

    cluster.wait("the new TaskManager", there, every_s=LOOK_EVERY_S)
    return time.time()


def _restarted(cluster: Cluster, job: str, killed_s: float, slots_s: float) -> FlinkRestart:
    found: list[FlinkRestart] = []

    def there() -> bool:
        restart = parts(killed_s, slots_s, cluster.jobmanager.checkpoints(job))
        if restart is not None:
            found.append(restart)
        elif cluster.jobmanager.state(job).ended:
            raise FlinkFailed(f"the job ended: {cluster.jobmanager.failure(job)}")
        return bool(found)

    cluster.wait("the first checkpoint", there, every_s=LOOK_EVERY_S)
    return found[0]


def figures_of(kind: Kind, piece: Mapping[str, Any], ours: Mapping[str, Any] | None) -> list[Figure]:
    """The median of all, and of each part. `ours` is the piece of our own restarts, if there is one."""
    restarts = [FlinkRestart(**one) for one in piece["restarts"]]
    name = {"taskmanager": "TaskManager killed", "cluster": "JobManager and TaskManager killed"}[kind]
    total_s = median([one.total_s for one in restarts])
    named = {
        "new slots": [one.launch_s for one in restarts],
        "→ job restored": [one.restore_s for one in restarts],
        "→ first checkpoint": [one.first_checkpoint_s for one in restarts],
    }
    if ours is None:
        whole = Figure(f"{name} → first checkpoint, p50, Flink alone", "s", total_s, None)
    else:
        our_s = median([one["total_s"] for one in ours["restarts"]])
        whole = Figure(f"{name} (ours: driver) → first checkpoint, p50", "s", our_s, total_s)
    return [whole, *(Figure(f"{name}: {part}, p50, Flink alone", "s", median(v), None) for part, v in named.items())]
