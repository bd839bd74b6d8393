"""The common part of Stillstate's sensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dagster as dg

from stillstate.assets.mount import Mount
from stillstate.orchestration.jobs.driver import stillstate_of
from stillstate.orchestration.resources import StillstateResource

__all__ = ["Tick", "sensor_of"]

Tick = Callable[[dg.SensorEvaluationContext, StillstateResource], dg.SensorResult]


def sensor_of(
    mount: Mount, name: str, description: str, interval_s: int, jobs: Sequence[Any] | None = None
) -> Callable[[Tick], dg.SensorDefinition]:
    """Return a decorator for a running sensor of a mount: its name and its resource are the mount's.

    Args:
        jobs: that it requests runs of.
    """

    def made(tick: Tick) -> dg.SensorDefinition:
        def evaluate(context: dg.SensorEvaluationContext, **resources: Any) -> dg.SensorResult:
            # A caller that calls a sensor like a function passes the same resources by name too.
            return tick(context, stillstate_of(context, mount))

        return dg.sensor(
            name=mount.name(name),
            description=description,
            minimum_interval_seconds=interval_s,
            default_status=dg.DefaultSensorStatus.RUNNING,
            jobs=jobs,
            required_resource_keys={mount.resource},
        )(evaluate)

    return made
