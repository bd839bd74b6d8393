"""Sensors for all jobs of a file. One publishes their progress, one brings lost drivers back, one has their changelog
folded, one judges them by their limits, one compares them with the file, and one sends notifications."""

from stillstate.orchestration.sensors.materialize import build_materialization_sensor
from stillstate.orchestration.sensors.progress import build_progress_sensor
from stillstate.orchestration.sensors.recovery import build_recovery_sensor

__all__ = ["build_materialization_sensor", "build_progress_sensor", "build_recovery_sensor"]
