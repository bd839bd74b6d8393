"""Builds the state of a job and restarts from it, each in a process of its own.

A restart's process starts its session and runs a small job of the same kind first: JVM and Python workers are warm then, and what
the measured run's first epoch takes beyond the others is the restore, not the start of a JVM.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.engines import COMMON_CONF, WorkerPlan, our_job, peer_conf, set_up_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from state_runtime.progress import Progress

__all__ = ["Epoch", "Run", "RunFailed", "run_once"]

LOG_TAIL_LINES = 25
END_TIMEOUT_S = 30.0
AVAILABLE_NOW = {"availableNow": True}


class RunFailed(RuntimeError):
    """The process of a run failed; the message has its error and the end of its log."""


@dataclass(frozen=True)
class Run:
    """One run of a job over the files that are given to it.

    Attributes:
        plan: `files` are what this run adds to the inbox.
        warm: what a job of the same kind reads first, in an inbox of its own; nothing runs if there are none.
    """

    plan: WorkerPlan
    warm: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Epoch:
    """One epoch (of the peer: one trigger).

    Attributes:
        ready_ms: from the call that started the run to the end of this epoch.
        numbers: of ours, the numbers of its `Progress`.
    """

    duration_ms: float
    ready_ms: float
    numbers: Mapping[str, float]


def run_once(run: Run, log: Path, timeout_s: float) -> list[Epoch]:
    """Run a job in a new process until it has read all of its input.

    Raises:
        RunFailed: it failed, or took longer than `timeout_s`; then the process and its children are killed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, run, log))
    process.start()
    theirs.close()
    answered = False
    try:
        if not ours.poll(timeout_s):
            raise RunFailed(f"{run.plan.side}: not done within {timeout_s:.0f} s\n{_tail(log)}")
        answer = ours.recv()
        answered = True
    except EOFError:
        raise RunFailed(f"{run.plan.side}: the process died\n{_tail(log)}") from None
    finally:
        _end(process, END_TIMEOUT_S if answered else 0.0)
        ours.close()
    if isinstance(answer, str):
        raise RunFailed(f"{run.plan.side}: {answer}\n{_tail(log)}")
    return list(answer)


def _end(process: Any, patience_s: float) -> None:
    """Nothing of a run may take time from the next one: what does not end by itself is killed."""
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    process.join(patience_s)
    if process.is_alive():
        process.kill()
        process.join()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return "\n".join(["last lines of its log:", *lines[-LOG_TAIL_LINES:]])


def _serve(connection: Connection, run: Run, log: Path) -> None:
    """Run in the new process."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        set_up_python()
        connection.send(_measured(run))
    except Exception as error:
        traceback.print_exc()
        connection.send(f"{type(error).__name__}: {error}")


def _measured(run: Run) -> list[Epoch]:
    drive = _ours if run.plan.side == "ours" else _peer
    spark = _session(run.plan)
    try:
        if run.warm:
            drive(spark, replace(run.plan, folder=run.plan.folder / "warm", files=run.warm, store=""))
        return drive(spark, run.plan)
    finally:
        spark.stop()


def _session(plan: WorkerPlan) -> SparkSession:
    if plan.side == "ours":
        from state_runtime.session import build_session

        return build_session("benchmark", master=f"local[{plan.cores}]", conf={**COMMON_CONF, **dict(plan.conf)})
    from pyspark.sql import SparkSession as Session

    builder = Session.builder.master(f"local[{plan.cores}]").appName("benchmark")
    for key, value in peer_conf(plan).items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    session.sparkContext.setLogLevel("WARN")
    return session


def _link(plan: WorkerPlan) -> None:
    plan.inbox.mkdir(parents=True, exist_ok=True)
    for path in plan.files:
        os.link(path, plan.inbox / path.name)


def _ours(spark: SparkSession, plan: WorkerPlan) -> list[Epoch]:
    _link(plan)
    epochs: list[Epoch] = []
    job = our_job(plan)
    began_s = time.monotonic()

    def note(progress: Progress) -> None:
        # An epoch without input, for the watermark, is none of those that are compared.
        if progress.input_rows:
            fields = progress.to_json_dict()
            numbers = {name: value for name, value in fields.items() if isinstance(value, int | float)}
            epochs.append(Epoch(progress.duration_ms, (time.monotonic() - began_s) * 1000, numbers))

    job.run(spark, trigger=AVAILABLE_NOW, on_progress=note)
    return epochs


def _peer(spark: SparkSession, plan: WorkerPlan) -> list[Epoch]:
    from benchmarks.operators import peer_operator

    _link(plan)
    output, mode = peer_operator(plan.workload.operator, spark, plan.workload.schema, plan.inbox)
    began_ms = time.time() * 1000
    query = (
        output.writeStream.format("noop")
        .outputMode(mode)
        .option("checkpointLocation", str(plan.folder / "checkpoint"))
        .trigger(**AVAILABLE_NOW)
        .start()
    )
    query.awaitTermination()
    return [
        Epoch(one["durationMs"]["triggerExecution"], _ended_ms(one) - began_ms, {})
        for one in query.recentProgress
        if one["numInputRows"] > 0
    ]


def _ended_ms(progress: Mapping[str, Any]) -> float:
    """When a trigger ended: Spark reports when it began, and how long it took."""
    began = datetime.fromisoformat(progress["timestamp"]).timestamp() * 1000
    return began + float(progress["durationMs"]["triggerExecution"])
