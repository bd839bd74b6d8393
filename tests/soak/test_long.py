"""How `make soak-long` judges what it measured."""

from __future__ import annotations

import math

from .long import BOUNDS, bound_of, held

EPOCHS = list(range(250, 100_001, 250))


def _judged(measure: str, value: float, per_10_000: float) -> bool:
    """Whether a measure that grows so quickly is red."""
    (row,) = held(EPOCHS, [{measure: value + per_10_000 * epoch / 10_000} for epoch in EPOCHS])
    assert math.isclose(row.per_10_000, per_10_000, abs_tol=0.01)
    return row.is_red


def test_what_grows_slowly_for_ever_is_red_and_what_stays_is_not() -> None:
    """A leak of 1.4 MiB in 10,000 epochs is no more than the noise of a short run, and 140 MiB after a million."""
    assert _judged("folding_private_mib", 109, 1.4)
    assert not _judged("folding_private_mib", 126, 0)
    assert not _judged("folding_private_mib", 126, -3)


def test_a_step_within_the_noise_is_not_red_however_short_the_run() -> None:
    """A short run shows that the soak itself works; it must not be red for what an allocator does."""
    epochs, noise = [50, 100, 150, 200], BOUNDS["private_mib"].noise
    for step, is_red in ((noise * 0.9, False), (noise * 1.5, True)):
        (row,) = held(epochs, [{"driver_private_mib": 90 + step * (epoch > 150)} for epoch in epochs])
        assert row.is_red is is_red


def test_each_measure_has_the_bound_that_names_it_best() -> None:
    assert bound_of("jvm_private_mib") is BOUNDS["jvm_private_mib"]
    assert bound_of("driver_private_mib") is BOUNDS["private_mib"]
    assert bound_of("local_mib") is BOUNDS["mib"]
