"""A few hundred seeds of everything going wrong: the invariants hold in each.

A failing test prints its seed; `STILLSTATE_TEST_SEED=<seed> pytest <this file>` plays it again. `make soak` plays thousands.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from model import seeds

from tests.faults.playground import play

SEEDS = 50


def test_state_and_output_are_those_of_a_calm_day(tmp_path: Path) -> None:
    """Lost answers, outages, refusals, hangs, kills, frozen drivers, rescales, damaged disks."""
    seen: Counter[str] = Counter()
    played = 0
    for seed, rng in seeds(SEEDS):
        seen.update(play(seed, rng, tmp_path / str(seed)).seen)
        played += 1
    if played < SEEDS:
        return
    # The storms must have reached what they are for.
    wanted = {
        "Killed", "StoreUnavailable", "StoreRefused", "OutcomeUnknown", "frozen", "woken and fenced", "hedged", "undisturbed",
        "changelog off", "changelog either", "local flip", "local cut", "local remove", "local folder", "local all",
    }  # fmt: skip
    assert not {what for what in wanted if not seen[what]}, seen


def test_a_seed_is_played_again_exactly(tmp_path: Path) -> None:
    """A printed seed is worth something only if it plays the same again."""
    for seed in range(10):
        first, second = (play(seed, random.Random(seed), tmp_path / f"{seed}-{n}") for n in range(2))
        assert first.seen == second.seen
        assert {p: m.fs.requests for p, m in enumerate(first.processes)} == {
            p: m.fs.requests for p, m in enumerate(second.processes)
        }
