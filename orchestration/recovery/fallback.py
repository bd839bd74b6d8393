"""What a recovery does about a newest snapshot that is damaged: which older one could be restored, what that loses, and
whether the job's policy allows it.

Looking is done by the recovery run, never by a sensor: each object of the newest snapshot is read once, then what older
ones have besides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from state_runtime.base.clock import Clock
from state_runtime.base.errors import CorruptManifest, MissingSnapshot, StoreUnavailable, UnsupportedFormat
from state_runtime.base.ids import Ids
from state_runtime.maintenance.verify.report import Finding
from state_runtime.maintenance.verify.roots import verify_root
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest

__all__ = ["Damage", "Fallback", "FallbackPolicy", "decide_fallback", "look_for_damage"]

FallbackPolicy = Literal["never", "same_output", "older"]

SNAPSHOTS_LOOKED_AT_MAX: Final = 50


@dataclass(frozen=True, kw_only=True)
class Damage:
    """What was found.

    Attributes:
        newest: id of the newest snapshot.
        where: what of it is damaged; empty if it is sound.
        restorable: the newest sound one below it; None if none was found.
        looked_at: how many snapshots.
        epochs: that going back to it loses; None if the newest manifest cannot be read.
        published: whether output of them may have been published; None if that cannot be known.
    """

    newest: int
    where: str = ""
    restorable: int | None = None
    looked_at: int = 1
    epochs: int | None = None
    published: bool | None = None


@dataclass(frozen=True)
class Fallback:
    """`snapshot_id` is the snapshot to go back to; None: the newest one is sound, or (`is_refused`) a person decides.
    `explained` is for people."""

    snapshot_id: int | None
    explained: str
    is_refused: bool = False


def decide_fallback(damage: Damage, policy: FallbackPolicy, launch: str) -> Fallback:
    """What the policy says to do about a damage; pure.

    Args:
        launch: what a person launches to recover the job, in words.
    """
    if not damage.where:
        return Fallback(None, f"newest {damage.newest} is sound: each object was read and is what was written")
    said = f"newest {damage.newest} damaged in {damage.where}"
    if damage.restorable is None:
        return Fallback(
            None,
            f"{said}; none of the {damage.looked_at} newest snapshots can be restored. Go back to a savepoint or a "
            "copy: `stillstate rollback`",
            is_refused=True,
        )
    lost = "an unknown number of epochs" if damage.epochs is None else f"{damage.epochs} epochs"
    output = {
        True: "their output was published, and comes again",
        False: "nothing of them was published",
        None: "whether their output was published cannot be known",
    }[damage.published]
    said = f"{said}; {damage.restorable} restorable; loses {lost}, which are read again; {output}"
    if policy == "older" or (policy == "same_output" and damage.published is False):
        return Fallback(damage.restorable, f"{said}. recovery.fallback is {policy}: going back")
    return Fallback(
        None,
        f"{said}. recovery.fallback is {policy}: a person decides. To go back, launch {launch} with "
        f"from_snapshot: {damage.restorable}",
        is_refused=True,
    )


def look_for_damage(
    catalog: Catalog, clock: Clock, ids: Ids, on_look: Callable[[int], object] = lambda snapshot_id: None
) -> Damage:
    """Read the newest snapshot; if it is damaged, older ones, until one is sound. Nothing is written.

    Raises:
        MissingSnapshot: there is none. StoreUnavailable: it cannot be read now, which is no damage.
    """
    good: set[str] = set()
    newest, where = 0, ""
    looked_at = 0
    for snapshot_id in reversed(catalog.snapshot_ids()):
        on_look(snapshot_id)
        try:
            report = verify_root(
                catalog.root,
                snapshot_ids=[snapshot_id],
                level="full",
                already=good.__contains__,
                on_good=good.add,
                clock=clock,
                ids=ids,
            )
        except MissingSnapshot:
            continue  # a folder without a manifest: its writer died
        if any(finding.kind == "unreachable" for finding in report.findings) or not report.complete:
            raise StoreUnavailable(f"snapshot {snapshot_id} in {catalog.root.url} cannot be read now; try again")
        looked_at += 1
        if not newest:
            newest, where = snapshot_id, _where(report.findings)
            if not where:
                return Damage(newest=newest)
        elif not report.findings:
            epochs, published = _lost(catalog, newest, snapshot_id)
            return Damage(
                newest=newest,
                where=where,
                restorable=snapshot_id,
                looked_at=looked_at,
                epochs=epochs,
                published=published,
            )
        if looked_at >= SNAPSHOTS_LOOKED_AT_MAX:
            break
    if not newest:
        raise MissingSnapshot(f"job {catalog.job!r} in {catalog.root.url} has no snapshot")
    return Damage(newest=newest, where=where, looked_at=looked_at)


def _where(findings: tuple[Finding, ...]) -> str:
    if not findings:
        return ""
    more = f" and {len(findings) - 1} more places" if len(findings) > 1 else ""
    return f"{findings[0].path} ({findings[0].kind}: {findings[0].whose}){more}"


def _lost(catalog: Catalog, newest: int, target: int) -> tuple[int | None, bool | None]:
    """Epochs between two snapshots, and whether output of them may be published; None for what cannot be known."""
    epochs: int | None = None
    published: bool | None = False
    before = catalog.manifest(target)
    for snapshot_id in catalog.snapshot_ids(after=target):
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


def _epoch(manifest: Manifest) -> int:
    return manifest.epoch or manifest.snapshot_id  # of manifests of older formats it is the id
