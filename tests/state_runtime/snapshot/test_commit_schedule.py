"""The commit protocol under thousands of interleavings, and a proof for each guard that it is needed.

A failing test prints its seed; `STILLSTATE_TEST_SEED=<seed> pytest <this file>` runs that interleaving again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from model import seeds
from schedule import Plan, run_seed

from state_runtime.snapshot import commit, fencing
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.expiry_boundary import NO_BOUNDARY
from state_runtime.store import Created, FsspecStore

GUARD_SEEDS_MAX = 1500


def first_violation(plan: Plan, law: str) -> int:
    """The first seed that breaks `law`; fails if none does: then the guard that was removed is not needed."""
    for seed in range(GUARD_SEEDS_MAX):
        if [v for v in run_seed(seed, plan).violations if law in v]:
            return seed
    pytest.fail(f"{GUARD_SEEDS_MAX} seeds without the guard, and the law {law!r} held: the test proves nothing")


def test_no_interleaving_breaks_a_law() -> None:
    """One committer per id, stale runs never acknowledged, one chain, sleepers past the boundary fenced."""
    acknowledged = fenced = collected = 0
    for seed, rng in seeds(400):
        plan = Plan(
            drivers=rng.choice([2, 3, 4]),
            sleep_chance=rng.choice([0.02, 0.06, 0.15]),
            lost_answer_chance=rng.choice([0.0, 0.1, 0.3]),
            lost_request_chance=rng.choice([0.0, 0.1]),
        )
        ran = run_seed(seed, plan)
        assert not ran.violations, f"STILLSTATE_TEST_SEED={seed}: {ran.violations}"
        acknowledged += len(ran.acknowledged)
        fenced += len(ran.fenced)
        collected += any("collected boundary" in reason for reason in ran.fenced)
        if ran.opened:
            assert ran.step > 0
    # The scheduler must reach what it is meant to test.
    if acknowledged > 500:
        assert fenced > 50
        assert collected > 2


def test_a_seed_is_replayed_exactly() -> None:
    """A printed seed is worth something only if it runs the same again."""
    for seed in range(20):
        first, second = run_seed(seed), run_seed(seed)
        assert (first.step, first.acknowledged, first.fenced, first.objects) == (
            second.step,
            second.acknowledged,
            second.fenced,
            second.objects,
        )


def test_a_lone_run_is_never_fenced_by_lost_answers() -> None:
    """Its own manifest, whose answer was lost, must not look like another run's."""
    for seed in range(120):
        ran = run_seed(seed, Plan(drivers=1, collector=False, kill_chance=0.0, lost_answer_chance=0.5))
        assert not ran.violations, f"seed {seed}: {ran.violations}"
        assert not ran.fenced, f"seed {seed}: {ran.fenced}"
        assert len(ran.acknowledged) == 4


def test_without_the_refusal_of_taken_names_two_runs_share_a_snapshot() -> None:
    """Guard: create-if-absent."""
    first_violation(Plan(honours_create=False), "two runs were told")


def test_without_the_fencing_snapshot_a_stale_run_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard: the fencing snapshot. A term alone does not stop an older run."""

    def open_without_fencing(catalog: Catalog, info: Any, empty: Any, **who: Any) -> Committer:
        term = fencing.claim_term(catalog.root, actor=who["actor"])
        fencing.leave_mark(catalog.root, term)
        return Committer(catalog.root, info, term, catalog.latest() or empty, who["actor"])

    monkeypatch.setattr(fencing, "open_run", open_without_fencing)
    first_violation(Plan(), "took over")


def test_without_the_boundary_check_a_sleeper_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard: the boundary, read after the create. A collected name is free again."""
    monkeypatch.setattr(commit, "check_not_given_up", lambda root, manifest, run, known: NO_BOUNDARY)
    first_violation(Plan(sleep_chance=0.15), "although it was collected")


def test_with_the_boundary_read_before_the_create_a_sleeper_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard: the order. A writer that sleeps between check and create passes the check and re-creates the name."""
    create = commit._create
    check = commit.check_not_given_up
    leave_mark = fencing.leave_mark
    runs: dict[int, Any] = {}

    def leave_and_remember(root: Any, run: Any) -> None:
        runs[run.term] = run
        leave_mark(root, run)

    def check_then_create(root: Any, manifest: Any, body: bytes) -> bool:
        check(root, manifest, runs[manifest.term], None)
        return create(root, manifest, body)

    monkeypatch.setattr(fencing, "leave_mark", leave_and_remember)
    monkeypatch.setattr(commit, "_create", check_then_create)
    monkeypatch.setattr(commit, "check_not_given_up", lambda root, manifest, run, known: NO_BOUNDARY)
    first_violation(Plan(sleep_chance=0.15), "although it was collected")


def create_without_read_back(answer: Created) -> Callable[[FsspecStore, str, bytes], Created]:
    """A create that guesses when the answer was lost."""

    def create(self: FsspecStore, path: str, body: bytes) -> Created:
        try:
            self._fs.pipe_file(self.at(path), body, mode="create")
        except FileExistsError:
            return Created.LOST
        except OSError:
            return answer
        return Created.MINE

    return create


def test_without_the_read_back_a_lost_request_loses_acknowledged_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard: the read-back. "It probably worked" acknowledges what was never stored."""
    monkeypatch.setattr(FsspecStore, "create", create_without_read_back(Created.MINE))
    first_violation(Plan(lost_request_chance=0.2), "lacks")


def test_without_the_read_back_a_lone_run_fences_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard: the read-back. "It probably failed" takes the own manifest for another run's."""
    monkeypatch.setattr(FsspecStore, "create", create_without_read_back(Created.LOST))
    plan = Plan(drivers=1, collector=False, kill_chance=0.0, lost_answer_chance=0.5)
    assert any(run_seed(seed, plan).fenced for seed in range(50))


def test_without_unique_ids_two_runs_hold_one_term() -> None:
    """Guard: the identity inside the bytes. Equal bytes mean "mine", so no two writers may ever write equal bytes."""
    first_violation(Plan(same_ids=True, kill_chance=0.0), "two runs hold one term")
