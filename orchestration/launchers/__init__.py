"""How a driver process is started and ended: one port, one adapter for each kind of cluster."""

from __future__ import annotations

from stillstate.orchestration.config.spec import JobSpec, Spec
from stillstate.orchestration.launchers.local import LocalLauncher
from stillstate.orchestration.launchers.port import (
    FirstCheckpoint,
    LastWords,
    Launched,
    Launcher,
    LaunchFailed,
    Stopped,
    StopTimedOut,
)
from stillstate.orchestration.launchers.spark_submit import SparkSubmitLauncher

__all__ = [
    "FirstCheckpoint",
    "LastWords",
    "LaunchFailed",
    "Launched",
    "Launcher",
    "LocalLauncher",
    "SparkSubmitLauncher",
    "StopTimedOut",
    "Stopped",
    "build_launcher",
]


def build_launcher(spec: Spec, job: JobSpec) -> Launcher:
    """Build the launcher that the job's `launcher.kind` names."""
    match job.launcher.kind:
        case "local":
            return LocalLauncher(spec.file, job)
        case "spark-submit":
            return SparkSubmitLauncher(spec.file, job)
