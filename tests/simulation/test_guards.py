"""Each guard is needed: without it a seed breaks a law. (What no seed finds missing, the simulation does not test.)"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from state_runtime.base.clock import Clock
from state_runtime.base.ids import Ids
from state_runtime.maintenance import marks
from state_runtime.maintenance.copy import objects as copying
from state_runtime.maintenance.delete import snapshots as delete
from state_runtime.maintenance.gc import collect as gc
from state_runtime.maintenance.gc import survey
from state_runtime.materialize import background, records
from state_runtime.materialize.records import Protected, protected
from state_runtime.reading import references
from state_runtime.reading.references import StoredRef
from state_runtime.snapshot import claim, commit, fencing, pins
from state_runtime.snapshot import expiry_boundary as boundary
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.expiry_boundary import NO_BOUNDARY, advance_boundary
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.ownership import JobProof, Ownership
from state_runtime.store import Store

from . import actors
from .cast import play
from .world import HOUR_MS, Plan

SEEDS_MAX = 400
NOBODY = Plan(
    drivers=2, commits=6, folders=0, collectors=0, retainers=0, readers=0, pinners=0, copiers=0, savers=0, children=0,
    kill=0.0, lost_request=0.0, lost_answer=0.0, torn_listing=0.0,
)  # fmt: skip


def with_only(**given: Any) -> Plan:
    """A quiet plan with a few actors, so that those that matter meet often."""
    return replace(NOBODY, **given)


def first_violation(plan: Plan, law: str) -> int:
    """The first seed that breaks `law`; fails if none does: then the guard that was removed is not needed here.

    With the guard that seed is fine: it is the guard that the law hangs on.
    """
    for seed in range(SEEDS_MAX):
        if [v for v in play(seed, plan).violations if law in v]:
            return seed
    pytest.fail(f"{SEEDS_MAX} seeds without the guard, and the law {law!r} held: the test proves nothing")


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Removes a guard, finds a seed that breaks a law, and plays that seed once more with the guard."""
    found: list[tuple[int, Plan]] = []

    def without(plan: Plan, law: str) -> None:
        found.append((first_violation(plan, law), plan))

    yield without
    monkeypatch.undo()
    for seed, plan in found:
        assert not play(seed, plan).violations, f"seed {seed} breaks a law with the guard too"


def _attributes() -> dict[tuple[str, ...], object]:
    """What the modules of the runtime hold, and their classes."""
    found: dict[tuple[str, ...], object] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("state_runtime"):
            for key, value in vars(module).items():
                found[name, key] = value
                if isinstance(value, type):
                    # Pydantic builds a model's schema when it is first used.
                    own = {inner: each for inner, each in vars(value).items() if not inner.startswith("__pydantic")}
                    found |= {(name, key, inner): each for inner, each in own.items()}
    return found


@pytest.fixture(autouse=True)
def _guards_are_put_back() -> Iterator[None]:
    """What is removed by several actors at once may stay away for all tests after this one: then those break laws."""
    before = _attributes()
    yield
    after = _attributes()
    assert not [key for key, value in before.items() if after.get(key) is not value]


# --- commits -----------------------------------------------------------------------------------------------------


def test_without_create_if_absent_two_runs_share_a_snapshot() -> None:
    first_violation(with_only(drivers=3, honours_create=False), "two runs")


def test_without_the_fencing_snapshot_a_stale_run_is_acknowledged(
    monkeypatch: pytest.MonkeyPatch, guarded: Any
) -> None:
    """A term alone does not stop an older run."""

    def open_without_fencing(catalog: Catalog, info: Any, empty: Manifest, **who: Any) -> Committer:
        term = fencing.claim_term(catalog.root, actor=who["actor"])
        fencing.leave_mark(catalog.root, term)
        return Committer(catalog.root, info, term, catalog.latest() or empty, who["actor"])

    monkeypatch.setattr(fencing, "open_run", open_without_fencing)
    guarded(with_only(drivers=3, sleep=0.1), "took over")


def test_without_the_look_at_the_boundary_a_sleeper_is_acknowledged(
    monkeypatch: pytest.MonkeyPatch, guarded: Any
) -> None:
    """A store forgets deleted names: the sleeper creates its next one anew, and nobody will ever read it."""
    monkeypatch.setattr(commit, "check_not_given_up", lambda root, manifest, run, known: NO_BOUNDARY)
    guarded(with_only(drivers=3, retainers=4, sleep=0.15), "was acknowledged, and the newest one lacks it")


def test_without_the_mark_of_the_root_a_run_goes_on_in_a_root_that_was_deleted(
    monkeypatch: pytest.MonkeyPatch, guarded: Any
) -> None:
    """Its boundary is gone with it: whoever slept sees no boundary, as in a root where nothing was ever given up."""
    monkeypatch.setattr(commit, "boundary_for_run", lambda root, run: boundary.newest_boundary_sequence(root))
    # The looks before the create find most of these sleepers; what is shown here is the last net, after it.
    monkeypatch.setattr(Committer, "_check_root", lambda self, manifest, objects: None)
    guarded(
        with_only(drivers=4, commits=4, children=2, claims=True, switch=0.7, pause_ms=HOUR_MS),
        "was acknowledged, and the newest one lacks it",
    )


# --- deletion ----------------------------------------------------------------------------------------------------


def forgetting(*fields: str) -> Any:
    """`protected` that does not say all."""

    def partly(root: Store, now_ms: int, *more: Any) -> Protected:
        return replace(protected(root, now_ms, *more), **dict.fromkeys(fields, frozenset()))

    return partly


def settle_blindly(
    root: Store, announced: Collection[int], proof: Any, *, clock: Clock, ids: Ids, since: int = 0
) -> Mapping[int, tuple[str, ...]]:
    advance_boundary(root, lambda now: now.settling(announced, ()), clock=clock, ids=ids)
    return {}


def test_without_the_second_look_at_pins_a_pinned_snapshot_is_deleted(
    monkeypatch: pytest.MonkeyPatch, guarded: Any
) -> None:
    """Who pins while a snapshot is given up is seen by the look after the announcement, and by no other."""
    monkeypatch.setattr(delete, "settle", settle_blindly)
    monkeypatch.setattr(delete, "read_holders", lambda root, clock, *more: ({}, Protected()))
    monkeypatch.setattr(marks, "read_holders", lambda root, clock, *more: ({}, Protected()))
    guarded(with_only(drivers=1, commits=10, retainers=2, pinners=3), "pinned snapshot")


def test_without_the_announcement_a_pin_comes_too_late(monkeypatch: pytest.MonkeyPatch, guarded: Any) -> None:
    """Pins looked at only before the boundary is written: one that is placed in between is not seen."""

    def give_up_at_once(
        root: Store,
        doomed: Collection[int],
        existing: Collection[int],
        proof: Any,
        *,
        clock: Clock,
        ids: Ids,
        since: int = 0,
    ) -> Any:
        advance_boundary(root, lambda now: now.announcing(doomed, existing), clock=clock, ids=ids)
        return settle_blindly(root, doomed, proof, clock=clock, ids=ids)

    monkeypatch.setattr(delete, "give_up", give_up_at_once)
    monkeypatch.setattr(delete, "read_holders", lambda root, clock, *more: ({}, Protected()))
    monkeypatch.setattr(marks, "read_holders", lambda root, clock, *more: ({}, Protected()))
    guarded(with_only(drivers=1, commits=10, retainers=2, pinners=3), "pinned")


def test_without_the_pins_own_look_at_the_boundary_nobody_holds_it(
    monkeypatch: pytest.MonkeyPatch, guarded: Any
) -> None:
    """The other half of the agreement: a pin that came after the announcement is none."""
    monkeypatch.setattr(pins, "_check_kept", lambda root, pin: None)
    guarded(with_only(drivers=1, commits=10, retainers=2, pinners=3), "which is gone")


# --- collection --------------------------------------------------------------------------------------------------


def test_without_the_watermark_what_is_on_its_way_is_deleted(monkeypatch: pytest.MonkeyPatch, guarded: Any) -> None:
    """Uploaded before the collector listed, named after it had read the manifests. (Of data whose name does not say what it is for.)"""
    monkeypatch.setattr(survey.Survey, "_is_under_way", lambda self, kind, path: False)
    monkeypatch.setattr(survey, "_watermark_ms", lambda root, newest, now_ms: 1 << 60)
    guarded(with_only(drivers=2, collectors=2), "is missing")


def test_without_names_and_floor_a_clock_of_the_store_that_jumps_loses_what_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was written after the newest manifest looks older than it. Its name says that it is not, and so does the floor where names
    say nothing."""
    plan = with_only(drivers=2, collectors=2, store_jump_ms=HOUR_MS)
    by_name = survey.Survey._is_under_way
    monkeypatch.setattr(survey.Survey, "_is_under_way", lambda self, kind, path: False)
    seed = first_violation(plan, "is missing")
    assert not play(seed, replace(plan, floor_ms=24 * HOUR_MS)).violations
    monkeypatch.setattr(survey.Survey, "_is_under_way", by_name)
    assert not play(seed, plan).violations


@pytest.mark.parametrize(("field", "law"), [("paths", "is missing")])
def test_without_what_folds_need_their_tables_are_deleted(
    monkeypatch: pytest.MonkeyPatch, guarded: Any, field: str, law: str
) -> None:
    """Those of a record that the driver has not adopted yet. (Of a fold under way: tests/state_runtime/materialize/test_materialize_races.py.)"""
    for module in (marks, delete, gc):
        if hasattr(module, "protected"):
            monkeypatch.setattr(module, "protected", forgetting(field))
    # A second guard behind it: nobody adopts a record whose tables are gone.
    monkeypatch.setattr(background, "_is_there", lambda *_: True)
    guarded(with_only(drivers=2, commits=10, folders=2, collectors=2), law)


def test_without_direct_objects_among_the_references_they_are_deleted(
    monkeypatch: pytest.MonkeyPatch, guarded: Any
) -> None:
    """Only a segment's index names them: a collector that looks at manifests alone takes them for garbage."""
    real = references.references

    def without_direct(*args: Any) -> Iterator[StoredRef]:
        return (ref for ref in real(*args) if ref.kind != "direct")

    monkeypatch.setattr(marks, "references", without_direct)
    guarded(with_only(collectors=1), "needs it")


# --- copies and claims -------------------------------------------------------------------------------------------


def test_with_the_manifest_first_a_copy_that_was_cut_is_a_broken_snapshot(
    monkeypatch: pytest.MonkeyPatch, guarded: Any
) -> None:
    copy = copying.Copier.copy

    def manifest_first(self: Any, needed: Any) -> None:
        opened = Catalog.of_root(self._source).latest()
        assert opened is not None
        copying.create_manifest(self._target, opened, opened.encode())
        copy(self, needed)

    monkeypatch.setattr(copying.Copier, "copy", manifest_first)
    guarded(with_only(drivers=1, copiers=1), "was committed, and")


def test_without_the_claims_create_two_children_own_one_source(monkeypatch: pytest.MonkeyPatch, guarded: Any) -> None:
    from state_runtime.driver import start_position as start_from
    from state_runtime.snapshot.document import encode_document
    from state_runtime.snapshot.paths import CLAIM_FILE

    def claim_anyway(root: Store, wanted: claim.Claim) -> None:
        root.put(CLAIM_FILE, encode_document("claim", wanted))

    monkeypatch.setattr(start_from, "claim_root", claim_anyway)
    # A second guard behind it: whoever fences the root looks once more whose it is.
    monkeypatch.setattr(fencing, "refuse_if_claimed", lambda *_, **__: None)
    guarded(
        with_only(drivers=1, commits=3, children=3, claims=True, sleep=0.1, switch=0.7, pause_ms=HOUR_MS),
        "were both told",
    )


def test_without_fencing_a_claimed_root_its_last_epochs_are_lost(monkeypatch: pytest.MonkeyPatch, guarded: Any) -> None:
    """The claimer would copy a snapshot, and the old job commit another after it."""
    from state_runtime.driver import start_position as start_from

    def read_only(self: Any, source: Any, actor: Any) -> Any:
        claim.claim_root(source.root, claim.Claim("child", self._ids.uid(), self._root.url, 0))
        return self._ids.uid(), source

    monkeypatch.setattr(start_from.StartPosition, "_take_over", read_only)
    guarded(with_only(drivers=1, commits=8, children=1, claims=True), "was acknowledged, and the newest one lacks it")


# --- time --------------------------------------------------------------------------------------------------------


def test_without_an_age_limit_a_record_is_adopted_whose_files_are_gone(
    monkeypatch: pytest.MonkeyPatch, guarded: Any
) -> None:
    """Days pass between a fold and the commit that takes it over."""
    for module in (records, background, actors):
        monkeypatch.setattr(module, "is_too_old", lambda record, now_ms: False)
    guarded(with_only(drivers=1, commits=10, folders=2, collectors=3, switch=0.1, pause_ms=48 * HOUR_MS), "is missing")


# --- the threads of a driver, in a root that became another's -------------------------------------------------------


def whole(**given: Any) -> Plan:
    """Whole drivers that sleep often, and whose root is deleted or replaced under them."""
    return with_only(**{"whole": True, "commits": 9, "sleep": 0.1, "pause_ms": 1_000, **given})


def _no_proof(*_: Any, **__: Any) -> None:
    """In place of one."""


def test_without_the_proof_of_ownership_a_sleeping_driver_spoils_the_next_jobs_root(
    monkeypatch: pytest.MonkeyPatch, guarded: Any
) -> None:
    """Retention deletes by number, and the next job counts from one."""
    monkeypatch.setattr(Ownership, "check", _no_proof)
    guarded(whole(fate="deleted", sleep=0.2), "of the next one")


def test_without_the_landmark_retention_gives_up_snapshots_of_a_backup(
    monkeypatch: pytest.MonkeyPatch, guarded: Any
) -> None:
    """The run's mark is in the backup, and no newer run has started there yet."""
    monkeypatch.setattr(Ownership, "check_place", lambda self: JobProof(self.root, self.job_uid).check())
    guarded(whole(fate="restored"), "boundary/")
