"""Limits, choices and defaults of settings are stated once, in `state_runtime/base/settings.py`."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.settings import (
    CHOICES,
    JOB_BOUNDS,
    RETENTION_BOUNDS,
    Bounds,
    Compression,
    JobSettings,
    RetentionPolicy,
)
from state_runtime.state.backends import Backend
from stillstate.orchestration.config import sections
from stillstate.orchestration.config.spec import JobSpec, to_policy, to_settings

# Where a setting stands in the file: the section, or "" for the job itself, and its name there.
PLACES = {
    "parallelism": ("", "parallelism"),
    "heartbeat_interval_s": ("checkpoint", "heartbeat_interval_s"),
    "inline_bytes_max": ("checkpoint", "inline_bytes_max"),
    "checkpoint_interval_s": ("checkpoint", "interval_s"),
    "checkpoint_batches": ("checkpoint", "batches"),
    "aligned_timeout_s": ("checkpoint", "aligned_timeout_s"),
    "unaligned_epoch_s": ("checkpoint", "unaligned_epoch_s"),
    "max_inflight_bytes": ("checkpoint", "max_inflight_bytes"),
    "task_bytes_max": ("", "task_bytes_max"),
    "pending_bytes_max": ("checkpoint", "pending_bytes_max"),
    "tolerable_failures": ("checkpoint", "tolerable_failures"),
    "upload_timeout_s": ("upload", "timeout_s"),
    "upload_attempts_max": ("upload", "attempts_max"),
    "upload_in_flight_bytes_max": ("upload", "in_flight_bytes_max"),
    "upload_deadline_s": ("upload", "deadline_s"),
    "upload_bytes_per_s": ("upload", "bytes_per_s"),
    "local_bytes_max": ("local_recovery", "bytes_max"),
    "local_copies_max": ("local_recovery", "copies_max"),
    "drain_epochs_max": ("checkpoint", "drain_epochs_max"),
    "materialize_interval_s": ("materialization", "interval_s"),
    "materialize_min_bytes": ("materialization", "min_bytes"),
    "materialize_ratio": ("materialization", "ratio"),
    "materialize_max_segments": ("materialization", "max_segments"),
    "materialize_replay_s": ("materialization", "replay_s"),
    "materialize_takeover_s": ("materialization", "takeover_s"),
    "materialize_cells_max": ("materialization", "cells_max"),
    "materialize_cell_bytes_max": ("materialization", "cell_bytes_max"),
    "stall_timeout_s": ("recovery", "stall_timeout_s"),
    "retained_checkpoints": ("retention", "retained_checkpoints"),
    **{name: ("retention", name) for name in RETENTION_BOUNDS},
}
CHOICE_PLACES = {"checkpoint_mode": ("checkpoint", "mode")}
BOUNDS = {**JOB_BOUNDS, **RETENTION_BOUNDS}
NOT_IN_THE_FILE = {"runs_max", "output_rows_per_batch"}


def model(section: str) -> type[BaseModel]:
    return sections.SECTIONS[section] if section else JobSpec


def job(section: str, **given: Any) -> JobSpec:
    whole = {"entry_point": "a:b", "store": "/data"}
    return JobSpec.model_validate({**whole, **({section: given} if section else given)})


def value_of(spec: JobSpec, name: str) -> Any:
    return getattr(to_policy(spec) if name in RETENTION_BOUNDS else to_settings(spec), name)


def numbers(settings: type) -> set[str]:
    found = {f.name: str(f.type).removesuffix(" | None") for f in dataclasses.fields(settings)}
    return {name for name, kind in found.items() if kind in ("int", "float")}


def test_every_number_has_bounds() -> None:
    assert numbers(JobSettings) == set(JOB_BOUNDS)
    assert numbers(RetentionPolicy) == set(RETENTION_BOUNDS)
    assert set(PLACES) == set(BOUNDS) - NOT_IN_THE_FILE


@pytest.mark.parametrize("name", sorted(PLACES))
def test_a_limit_of_the_file_is_the_setting_s(name: str) -> None:
    """The metadata of the model say the same limits, and no more than these."""
    section, key = PLACES[name]
    field = model(section).model_fields[key]
    stated = {kind: getattr(m, kind) for m in field.metadata for kind in ("ge", "gt", "le", "lt") if hasattr(m, kind)}
    bounds = BOUNDS[name]
    assert stated == {"gt" if bounds.above else "ge": bounds.low, "le": bounds.high}
    assert field.default == getattr(RetentionPolicy if name in RETENTION_BOUNDS else JobSettings, name)


@pytest.mark.parametrize("name", sorted(PLACES))
def test_both_ways_take_the_ends_of_a_range_and_refuse_what_is_beyond(name: str) -> None:
    section, key = PLACES[name]
    bounds = BOUNDS[name]
    settings: Any = RetentionPolicy if name in RETENTION_BOUNDS else JobSettings
    inside = [bounds.high] if bounds.above else [bounds.low, bounds.high]
    for value in inside:
        assert value_of(job(section, **{key: value}), name) == value
    for beyond in (bounds.low if bounds.above else bounds.low - 1, bounds.high + 1):
        with pytest.raises(ValidationError):
            job(section, **{key: beyond})
        with pytest.raises(InvalidConfiguration, match=name):
            settings(**{name: beyond})


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_both_ways_have_the_same_choices(name: str) -> None:
    section, key = CHOICE_PLACES.get(name, ("", name))
    for choice in CHOICES[name]:
        assert getattr(to_settings(job(section, **{key: choice})), name) == choice
    with pytest.raises(ValidationError):
        job(section, **{key: "other"})
    with pytest.raises(InvalidConfiguration, match=rf"{name} = 'other' is not one of {', '.join(CHOICES[name])}"):
        JobSettings(**{name: "other"})  # type: ignore[arg-type]
    assert getattr(to_settings(job("")), name) == getattr(JobSettings(), name)


def test_who_uses_a_choice_uses_the_setting_s() -> None:
    assert get_args(Backend) == CHOICES["backend"]
    assert get_args(Compression) == CHOICES["compression"]


def test_the_models_state_no_limit_of_a_setting_themselves() -> None:
    """A number beside the default of a setting would be the second place of the same truth."""
    text = Path(sections.__file__).read_text()
    assert "default=JobSettings" not in text
    assert "default=RetentionPolicy" not in text


def test_bounds_turn_away_what_is_no_number() -> None:
    for bounds in (Bounds(0, 1), Bounds(0, 1, above=True)):
        assert not any(bounds.hold(value) for value in (math.nan, math.inf, -math.inf, 10**400))
    assert Bounds(0, 1).hold(0)
    assert not Bounds(0, 1, above=True).hold(0)
