"""The code location of these tests: Stillstate's own, but that drivers are played by `fake_driver.py`, without Spark."""

from __future__ import annotations

import sys
from pathlib import Path

import dagster as dg

from stillstate.orchestration.config.spec import JobSpec, Spec, load_spec
from stillstate.orchestration.definitions import build_definitions
from stillstate.orchestration.launchers import Launcher
from stillstate.orchestration.launchers.local import LocalLauncher
from stillstate.orchestration.resources import StillstateResource

FAKE_DRIVER = Path(__file__).resolve().parents[1] / "orchestration" / "fake_driver.py"


class PlayedDrivers(StillstateResource):
    def launcher(self, spec: Spec, job: JobSpec) -> Launcher:
        return LocalLauncher(spec.file, job, command=(sys.executable, str(FAKE_DRIVER)))


@dg.definitions
def defs() -> dg.Definitions:
    spec = load_spec()
    return build_definitions(spec, PlayedDrivers(config_file=str(spec.file)))
