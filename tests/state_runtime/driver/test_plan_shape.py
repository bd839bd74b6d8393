"""Which epochs have the same plan but for their rows and functions; pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from state_runtime.driver.epoch_plan import _Asked

ASKED = _Asked(
    parallelism=4,
    wake={"a": [1]},
    beginning=frozenset(),
    seats=None,
    aggregated=frozenset(),
    in_one_task=False,
    now_ms=1,
    observed=("max(at)",),
)


@pytest.mark.parametrize(
    "other",
    [
        {"parallelism": 8},
        {"wake": {}},
        {"wake": {"a": [1, 2]}},
        {"wake": {"b": [1]}},
        {"aggregated": frozenset("a")},
        {"in_one_task": True},
        {"observed": ("max(CASE WHEN at <= 5 THEN at END)",)},
    ],
)
def test_what_decides_a_plan_decides_its_shape(other: dict[str, Any]) -> None:
    """Shards that wake have rows of their own in it: by the plan of another epoch they would not wake.
    A bound of event times is a number in it."""
    assert replace(ASKED, **other).shape != ASKED.shape


def test_what_decides_nothing_does_not() -> None:
    assert replace(ASKED, wake={"a": (1,), "b": ()}, now_ms=2).shape == ASKED.shape
    assert hash(ASKED.shape) == hash(replace(ASKED).shape)


@pytest.mark.parametrize("other", [{"beginning": frozenset("a")}, {"seats": object()}])
def test_a_plan_with_an_initial_state_or_with_seats_is_one_epochs_own(other: dict[str, Any]) -> None:
    assert replace(ASKED, **other).shape is None
