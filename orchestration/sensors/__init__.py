"""Three sensors for all jobs: one publishes what they achieved, one brings lost drivers back, one has their changelog
folded."""

from orchestration.sensors.materialize import build_materialization_sensor
from orchestration.sensors.progress import build_progress_sensor
from orchestration.sensors.recovery import build_recovery_sensor

__all__ = ["build_materialization_sensor", "build_progress_sensor", "build_recovery_sensor"]
