"""How a driver process comes to be and goes: one port, one adapter for each kind of cluster."""

from __future__ import annotations

from orchestration.config.spec import JobSpec, Spec
from orchestration.launchers.local import LocalLauncher
from orchestration.launchers.port import Launched, Launcher, LaunchFailed, Stopped, StopTimedOut

__all__ = [
    "LaunchFailed",
    "Launched",
    "Launcher",
    "LocalLauncher",
    "StopTimedOut",
    "Stopped",
    "build_launcher",
]


def build_launcher(spec: Spec, job: JobSpec) -> Launcher:
    """The launcher that the job's `launcher.kind` names."""
    return LocalLauncher(spec.file, job)
