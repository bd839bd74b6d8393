"""How a recovery handles a damaged newest snapshot: which other one could be restored, what that loses, and whether the
job's policy allows it.

Candidates are all snapshots of the job: checkpoints in its root, and complete savepoints, which may have separate
bytes. The newest snapshot comes first; the root's own copy before those of savepoints. The first that is whole is
taken.

The recovery run looks, never a sensor. Each object of the newest snapshot is read once, then the other objects of older
snapshots; of a savepoint all objects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

from state_runtime.base.clock import Clock
from state_runtime.base.errors import (
    CorruptManifest,
    MissingSnapshot,
    SnapshotInUse,
    StoreUnavailable,
    UnsupportedFormat,
)
from state_runtime.base.ids import Ids
from state_runtime.maintenance.verify.report import Finding
from state_runtime.maintenance.verify.roots import verify_root
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.claim import refuse_if_claimed
from state_runtime.snapshot.locate import own_restore_point
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import savepoint_path
from state_runtime.snapshot.savepoint_record import complete_savepoints
from state_runtime.store import Store

__all__ = ["Damage", "Fallback", "FallbackPolicy", "decide_fallback", "look_for_damage"]

FallbackPolicy = Literal["never", "same_output", "older"]

SNAPSHOTS_LOOKED_AT_MAX: Final = 50
_PASSED_OVER_SHOWN_MAX: Final = 5


@dataclass(frozen=True, kw_only=True)
class Damage:
    """The result of a look for damage.

    Attributes:
        newest: id of the newest snapshot.
        where: its damaged parts; empty if it is sound.
        restorable: id of the newest other one that is sound; None if none was found.
        savepoint: name of the savepoint that holds it; empty: it is a snapshot of the root.
        looked_at: how many snapshots and savepoints.
        epochs: that going back to it loses; None if the newest manifest cannot be read.
        published: whether output of them may have been published; None if that cannot be known.
        passed_over: newer candidates that were not chosen, each with the reason.
    """

    newest: int
    where: str = ""
    restorable: int | None = None
    savepoint: str = ""
    looked_at: int = 1
    epochs: int | None = None
    published: bool | None = None
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fallback:
    """`back_to` is the snapshot to go back to, or the name of a savepoint; None: the newest one is sound, or
    (`is_refused`) a person decides. `explained` is for people."""

    back_to: int | str | None
    explained: str
    is_refused: bool = False


def decide_fallback(damage: Damage, policy: FallbackPolicy, launch: str) -> Fallback:
    """Decide by the policy how a damage is handled; pure.

    Args:
        launch: how a person launches the recovery of the job, in words.
    """
    if not damage.where:
        return Fallback(None, f"newest {damage.newest} is sound: each object was read, and its digest is right")
    said = f"newest {damage.newest} damaged in {damage.where}"
    others = _passed_over_text(damage.passed_over)
    if damage.restorable is None:
        return Fallback(
            None,
            f"{said}; not one of the {damage.looked_at} newest snapshots and savepoints can be restored{others}. Go "
            "back to a copy: `stillstate rollback`",
            is_refused=True,
        )
    back_to = damage.savepoint or damage.restorable
    option = "from_savepoint" if damage.savepoint else "from_snapshot"
    found = f"{damage.restorable} (savepoint {damage.savepoint})" if damage.savepoint else f"{damage.restorable}"
    said = f"{said}; {found} restorable; {_loss_text(damage)}{others}. recovery.fallback is {policy}"
    if policy == "older" or (policy == "same_output" and damage.published is False):
        return Fallback(back_to, f"{said}: going back")
    return Fallback(
        None,
        f"{said}: a person decides. To go back, launch {launch} with {option}: {back_to}",
        is_refused=True,
    )


def _loss_text(damage: Damage) -> str:
    if damage.epochs == 0:
        unknown = "; whether its output was published is unknown, and unpublished output is lost"
        return f"loses no epoch{'' if damage.published is False else unknown}"
    one = damage.epochs == 1
    lost = "an unknown number of epochs" if damage.epochs is None else f"{damage.epochs} {'epoch' if one else 'epochs'}"
    output = {
        True: f"{'its' if one else 'their'} output was published, and comes again",
        False: f"nothing of {'it' if one else 'them'} was published",
        None: f"whether {'its' if one else 'their'} output was published cannot be known",
    }[damage.published]
    return f"loses {lost}, which {'is' if one else 'are'} read again; {output}"


def _passed_over_text(passed_over: tuple[str, ...]) -> str:
    if not passed_over:
        return ""
    shown = passed_over[:_PASSED_OVER_SHOWN_MAX]
    more = [f"{len(passed_over) - len(shown)} more"] if len(passed_over) > len(shown) else []
    return f"; not taken: {'; '.join([*shown, *more])}"


@dataclass(frozen=True)
class _Candidate:
    """A snapshot of the job's root, or one that a savepoint holds."""

    snapshot_id: int
    root: Store
    savepoint: str = ""

    def __str__(self) -> str:
        return f"savepoint {self.savepoint} ({self.snapshot_id})" if self.savepoint else str(self.snapshot_id)


def look_for_damage(
    catalog: Catalog, clock: Clock, ids: Ids, on_look: Callable[[str], object] = lambda what: None
) -> Damage:
    """Read the newest snapshot; if it is damaged, other snapshots and savepoints, until one is sound. Write nothing.

    Args:
        on_look: gets the name of the next candidate, and why one was not taken.

    Raises:
        MissingSnapshot: the job has no snapshot. StoreUnavailable: it cannot be read now, which is no damage.
    """
    good: set[str] = set()
    damage: Damage | None = None
    passed_over: list[str] = []
    for candidate in _candidates(catalog):
        on_look(f"reading {candidate}")
        # A savepoint may have different bytes under the same names.
        own_good = good if not candidate.savepoint else set()
        try:
            unfit = _unfit(candidate, catalog, damage.newest if damage is not None else None)
            findings = () if unfit else _read(candidate, own_good, clock, ids)
        except MissingSnapshot:
            continue  # a folder without a manifest: its writer died
        if damage is None:
            damage = Damage(newest=candidate.snapshot_id, where=_where(findings))
            if not damage.where:
                return damage
            continue
        damage = replace(damage, looked_at=damage.looked_at + 1)
        if not unfit and not findings:
            epochs, published = _lost(catalog, damage.newest, candidate)
            return replace(
                damage,
                restorable=candidate.snapshot_id,
                savepoint=candidate.savepoint,
                epochs=epochs,
                published=published,
                passed_over=tuple(passed_over),
            )
        passed_over.append(f"{candidate}: {unfit or f'damaged in {_where(findings)}'}")
        on_look(f"not taken: {passed_over[-1]}")
        if damage.looked_at >= SNAPSHOTS_LOOKED_AT_MAX:
            break
    if damage is None:
        raise MissingSnapshot(f"job {catalog.job!r} in {catalog.root.url} has no snapshot")
    return replace(damage, passed_over=tuple(passed_over))


def _candidates(catalog: Catalog) -> list[_Candidate]:
    """Return the candidates, the newest first; of one snapshot the copy in the root first, then the newest savepoint. A
    savepoint that is newer than the root's newest snapshot (the root was restored from a copy) is no candidate: ids
    only grow."""
    root, job_uid = catalog.root, catalog.job_info().uid
    own = catalog.snapshot_ids()
    saved = [r for r in complete_savepoints(root) if r.job_uid == job_uid and r.snapshot_id <= max(own, default=0)]
    saved.sort(key=lambda record: (record.requested_at_ms, record.name), reverse=True)
    found = [_Candidate(snapshot_id, root) for snapshot_id in own]
    found += [_Candidate(r.snapshot_id, root.child(savepoint_path(r.name)), r.name) for r in saved]
    return sorted(found, key=lambda candidate: candidate.snapshot_id, reverse=True)


def _unfit(candidate: _Candidate, catalog: Catalog, newest: int | None) -> str:
    """Return why a candidate that may be whole is not used; empty if it may be used. Data that cannot be decoded is
    left to `_read`."""
    if newest is None:
        return ""
    try:
        if candidate.savepoint:
            if isinstance(own_restore_point(candidate.savepoint), int):
                return "its name is a number, which a start takes for a snapshot's id; go back to it by its folder"
            refuse_if_claimed(candidate.root)
        manifest = Catalog.of_root(candidate.root, catalog.clock).manifest(candidate.snapshot_id)
    except SnapshotInUse as error:
        return str(error)
    except (CorruptManifest, UnsupportedFormat):
        return ""
    if manifest.drained:
        return "its input was declared to have ended (drained)"
    try:
        is_abandoned = catalog.manifest(newest).abandons(candidate.snapshot_id)
    except (CorruptManifest, UnsupportedFormat):
        is_abandoned = False
    return f"{newest} is not its successor: the job was taken back to an older one" if is_abandoned else ""


def _read(candidate: _Candidate, good: set[str], clock: Clock, ids: Ids) -> tuple[Finding, ...]:
    """Return the damaged objects of a snapshot: all of it is read, except the objects that are known to be good."""
    report = verify_root(
        candidate.root,
        snapshot_ids=[candidate.snapshot_id],
        level="full",
        already=good.__contains__,
        on_good=good.add,
        clock=clock,
        ids=ids,
    )
    if any(finding.kind == "unreachable" for finding in report.findings) or not report.complete:
        raise StoreUnavailable(f"{candidate} in {candidate.root.url} cannot be read now; try again")
    return report.findings


def _where(findings: tuple[Finding, ...]) -> str:
    if not findings:
        return ""
    more = f" and {len(findings) - 1} more places" if len(findings) > 1 else ""
    return f"{findings[0].path} ({findings[0].kind}: {findings[0].whose}){more}"


def _lost(catalog: Catalog, newest: int, target: _Candidate) -> tuple[int | None, bool | None]:
    """Return the number of epochs between two snapshots, and whether their output may be published; None: unknown."""
    epochs: int | None = 0 if target.snapshot_id == newest else None
    published: bool | None = False
    before = _with_outputs(catalog, target)
    # From the target on: the manifest of a savepoint's snapshot shows whether its own output is still to be published.
    for snapshot_id in catalog.snapshot_ids(after=target.snapshot_id - 1):
        try:
            manifest = catalog.manifest(snapshot_id)
        except MissingSnapshot:
            continue
        except (CorruptManifest, UnsupportedFormat):
            published = published or None
            continue
        # A fencing snapshot repeats the outputs of the one below it.
        if any(output.files for output in manifest.outputs) and manifest.outputs != before.outputs:
            published = True
        if snapshot_id == newest:
            epochs = _epoch(manifest) - _epoch(before)
    return epochs, published


def _with_outputs(catalog: Catalog, target: _Candidate) -> Manifest:
    """Return the manifest of a candidate. A savepoint's manifest names no output; the root's own manifest does, if it
    can be read."""
    try:
        return catalog.manifest(target.snapshot_id)
    except (MissingSnapshot, CorruptManifest, UnsupportedFormat):
        return Catalog.of_root(target.root, catalog.clock).manifest(target.snapshot_id)


def _epoch(manifest: Manifest) -> int:
    return manifest.epoch or manifest.snapshot_id  # in manifests of older formats the epoch is the id
