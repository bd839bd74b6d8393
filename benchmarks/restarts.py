"""Builds the state of a job and restarts from it, in processes of their own.

A process starts its session and runs a small job of the same kind first: JVM and Python workers are warm then, and what a
measured run's first epoch takes beyond the others is the restore, not the start of a JVM. Even then a JVM is still compiling for minutes,
on the cores that restore, and each new one differently: so restarts that are compared are taken in turns in one process, where the engine
keeps no state in it from one run to the next.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import time
import traceback
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.engines import COMMON_CONF, WorkerPlan, our_job, peer_conf, set_up_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from state_runtime.base.progress import Progress

__all__ = ["Epoch", "Run", "RunFailed", "run_in_turns", "run_once"]

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
        removed: folders that are removed before.
        linked: a store, and the folder that it is copied to before, by links: objects never change, and a real copy would still be on its
            way to the disk while the run is timed.
    """

    plan: WorkerPlan
    warm: tuple[Path, ...] = ()
    removed: tuple[Path, ...] = ()
    linked: tuple[Path, Path] | None = None


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
    (epochs,) = run_in_turns([run], log, timeout_s)
    return epochs


def run_in_turns(runs: Sequence[Run], log: Path, timeout_s: float) -> Generator[list[Epoch]]:
    """Run jobs, one after the other, in one new process, each until it has read all of its input.

    Yields:
        Each run's epochs, when it is done.

    Raises:
        RunFailed: one failed, or took longer than `timeout_s`; then the process and its children are killed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, tuple(runs), log))
    process.start()
    theirs.close()
    answered = False
    try:
        for run in runs:
            answered = False
            if not ours.poll(timeout_s):
                raise RunFailed(f"{run.plan.side}: not done within {timeout_s:.0f} s\n{_tail(log)}")
            answer = ours.recv()
            answered = True
            if isinstance(answer, str):
                raise RunFailed(f"{run.plan.side}: {answer}\n{_tail(log)}")
            yield list(answer)
    except EOFError:
        raise RunFailed(f"{runs[0].plan.side}: the process died\n{_tail(log)}") from None
    finally:
        _end(process, END_TIMEOUT_S if answered else 0.0)
        ours.close()


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


def _serve(connection: Connection, runs: Sequence[Run], log: Path) -> None:
    """Run in the new process."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        set_up_python()
        spark = _session(runs[0].plan)
        try:
            for run in runs:
                connection.send(_measured(spark, run))
        finally:
            spark.stop()
    except Exception as error:
        traceback.print_exc()
        connection.send(f"{type(error).__name__}: {error}")


def _measured(spark: SparkSession, run: Run) -> list[Epoch]:
    drive = _ours if run.plan.side == "ours" else _peer
    if run.warm:
        warm = run.plan.folder / "warm"
        drive(spark, replace(run.plan, folder=warm, files=run.warm, store=""))
        shutil.rmtree(warm)
    for folder in run.removed:
        shutil.rmtree(folder, ignore_errors=True)
    if run.linked is not None:
        shutil.copytree(*run.linked, copy_function=os.link)
    return drive(spark, run.plan)


def _session(plan: WorkerPlan) -> SparkSession:
    if plan.side == "ours":
        from state_runtime.spark.session import build_session

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
