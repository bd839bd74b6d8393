"""The system under seeded interleavings (world.py): drivers with all of their threads (runs.py), zombies,
folds, collection, retention, copies, children, readers, pins.

A failing seed is named; `STILLSTATE_TEST_SEED=<seed> pytest tests/simulation` plays it again. `make soak` plays 20,000.
"""

from __future__ import annotations

from collections import Counter

from model import seeds

from .cast import play, seed_plan
from .soak import REAL_EVERY
from .world import HOUR_MS

SEEDS = 200


def test_no_interleaving_breaks_a_law() -> None:
    """After every step: what is shown is complete, what is needed stays, ids are won once, states are what was written."""
    seen: Counter[str] = Counter()
    played = 0
    for seed, _ in seeds(SEEDS):
        world = play(seed, seed_plan(seed, real=seed % REAL_EVERY == 0))
        assert not world.violations, f"STILLSTATE_TEST_SEED={seed}: {world.violations[:3]}"
        seen.update(world.seen)
        seen["deleted"] += world.laws.deleted
        played += 1
    if played < SEEDS:
        return
    # The scheduler must reach what it is meant to test.
    assert not {what for what in REACHED if not seen[what]}, seen


REACHED = (
    "acknowledged", "fenced", "woken and fenced", "folded", "adopted", "read",
    "gone before it was pinned", "pinned", "given up", "collected", "deleted",
    "copied", "NO_CLAIM child", "savepoint COMPLETED", "root copy done",
    "given up by a driver", "collected by a driver", "savepoint begun by a driver", "deleted and begun anew", "backup put back",
)  # fmt: skip


def test_a_run_that_meets_the_end_of_a_deletion_is_fenced() -> None:
    """Seeds of the soak: the root went between two requests of a run, or while a newer run started."""
    for seed in (3506, 3560, 9880):
        assert not play(seed, seed_plan(seed, real=seed % REAL_EVERY == 0, whole=False)).violations, seed


def test_a_run_names_no_tables_that_went_with_a_backup() -> None:
    """A seed of the soak: the newest snapshot was in the backup, the tables of the fold that followed it were not."""
    world = play(9653, seed_plan(9653))
    assert not world.violations
    assert world.seen["backup put back"]


def test_a_savepoint_of_before_may_be_copied_by_both_jobs_of_a_restored_root() -> None:
    """A seed of the soak: the sleeper wakes in a copy that the next job makes too, and writes the same bytes."""
    world = play(406816, seed_plan(406816))
    assert not world.violations
    assert world.seen["backup put back"]


def test_what_a_late_commit_left_in_a_deleted_root_may_be_removed_by_anybody() -> None:
    """A seed of the soak: two sleepers of a root that is nobody's by then."""
    assert not play(500166, seed_plan(500166)).violations


def test_a_savepoint_that_is_being_deleted_leaves_no_record_that_says_it_is_complete() -> None:
    """A seed of the soak: its owner woke when the deletion had removed his record, and not yet its own."""
    assert not play(419841, seed_plan(419841)).violations


def test_a_sleepers_manifest_in_a_savepoint_that_is_made_anew_names_what_is_there() -> None:
    # It was written after the folder had been removed, and is a snapshot again once the folder belongs to somebody.
    assert not play(702091, seed_plan(702091)).violations


def test_a_boundary_stays_when_its_writer_slept_while_the_one_before_was_tidied_away() -> None:
    """A seed of the soak: it was taken back, and what others had removed by then was a snapshot again."""
    assert not play(705066, seed_plan(705066)).violations


def test_nobody_holds_a_snapshot_of_a_root_that_was_removed_as_a_whole() -> None:
    """A seed of the soak: the boundary, which would have told, was gone too when the pin was placed."""
    assert not play(705489, seed_plan(705489)).violations


def test_of_two_who_move_a_root_the_slower_is_told_that_it_went() -> None:
    """A seed of the soak: it was told of damage."""
    assert not play(706689, seed_plan(706689)).violations


def test_a_sleeper_may_remove_what_his_own_boundary_gives_up_in_a_backup_that_holds_it() -> None:
    """A seed of the soak: the backup is younger than the boundary; what it gives up is a snapshot for nobody."""
    world = play(5405, seed_plan(5405))
    assert not world.violations
    assert world.seen["backup put back"]


def test_a_seed_is_played_again_exactly() -> None:
    """A printed seed is worth something only if it plays the same again."""
    for seed in range(12):
        first, second = play(seed), play(seed)
        assert first.fingerprint() == second.fingerprint()


def test_two_collectors_and_two_retentions_agree() -> None:
    """Each does what the other does, at the same time; somebody is always holding something."""
    for seed in range(12):
        world = play(
            seed, seed_plan(seed, collectors=2, retainers=2, pinners=2, savers=0, movers=0, children=0, fate="none")
        )
        assert not world.violations, f"seed {seed}: {world.violations[:3]}"


def test_wrong_clocks_delete_nothing_early() -> None:
    """Clocks that are off by an hour and jump by another, hours between two epochs."""
    for seed in range(12):
        world = play(seed, seed_plan(seed, skew_ms=HOUR_MS, jump=0.2, pause_ms=6 * HOUR_MS, collectors=2, retainers=1))
        assert not world.violations, f"seed {seed}: {world.violations[:3]}"
