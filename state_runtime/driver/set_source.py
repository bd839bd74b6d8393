"""A new start position for one source of a stopped job, with its state kept.

    plan      reads only: the newest snapshot, and what Kafka has; refuses an impossible move
    execute   a term is claimed and a fencing snapshot committed: the content of the newest snapshot, with another
              position of this source and nothing else changed

The fencing snapshot is one object that is created if absent: a crash leaves the old position or the new one. The plan
is of one snapshot: if a run has made another one since, the move is refused, and nothing of that run is undone.
Snapshots of before have the old position: `stillstate rollback` takes the move back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from state_runtime.base.actor import Actor
from state_runtime.base.errors import CorruptData, InvalidConfiguration, MissingSnapshot
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.claim import refuse_if_claimed
from state_runtime.snapshot.fencing import open_run, refuse_if_live
from state_runtime.snapshot.handover import refuse_if_handed_over
from state_runtime.snapshot.lineage import check_belongs
from state_runtime.snapshot.manifest import Manifest, SourcePosition
from state_runtime.snapshot.term_files import write_stopped
from state_runtime.sources.kafka_offsets import Positions, positions_in
from state_runtime.sources.kafka_seek import Seek

__all__ = ["SetSourcePlan", "execute_set_source", "plan_set_source"]

_HEADER_LINES = 2


@dataclass(frozen=True, kw_only=True)
class SetSourcePlan:
    """A move of one source.

    Attributes:
        source: as the user named it.
        number: of the source, the index of its line.
        newest: the snapshot that the plan is made for.
    """

    source: str
    number: int
    newest: Manifest
    seek: Seek

    @property
    def target(self) -> Manifest:
        """The content of the snapshot to be made."""
        position = self.newest.source
        if position is None:
            raise CorruptData(f"snapshot {self.newest.snapshot_id} has no position of a source")
        # Another content under the same id: the committer gives it an id of its own.
        return replace(self.newest, commit_id="", source=_moved(position, self.number, self.seek.new))


def plan_set_source(catalog: Catalog, source: str, find: Callable[[Positions], Seek]) -> SetSourcePlan:
    """Plan a move; only reads.

    Args:
        source: the name of a source in the job's pipeline, or its topics, separated by commas.
        find: returns the new position beside the old one.

    Raises:
        JobNotFound, MissingSnapshot: there is nothing to go on from. JobAlreadyRunning: a run seems alive.
        SnapshotInUse: another job claims the root, or it is being moved.
        InvalidConfiguration: the snapshot has no such source, or its position is none of Kafka's.
        the errors of `find`.
    """
    root, info = catalog.root, catalog.job_info()
    refuse_if_claimed(root)
    refuse_if_handed_over(root)
    refuse_if_live(catalog, catalog.clock)
    newest = catalog.latest()
    if newest is None or newest.source is None:
        raise MissingSnapshot(
            f"job {catalog.job!r} in {root.url} has read nothing yet: where it begins is said in its code "
            "(sources.kafka(…, starting=…))"
        )
    check_belongs(newest, info, root.url, own=True)
    number, old = _find(newest.source, source, catalog.job)
    return SetSourcePlan(source=source, number=number, newest=newest, seek=find(old))


def execute_set_source(catalog: Catalog, plan: SetSourcePlan, actor: Actor) -> Manifest:
    """Commit the new position. Atomic: the newest snapshot is the one of before, or the fencing snapshot that is
    returned.

    Raises:
        InvalidConfiguration: the job has gone on since the plan was made; nothing was changed.
        JobAlreadyRunning, Fenced: see `open_run`. StoreUnavailable, OutcomeUnknown: plan it again.
    """
    refuse_if_live(catalog, catalog.clock)
    target = plan.target
    opened = open_run(
        catalog,
        catalog.job_info(),
        target,
        actor=actor,
        back_to=target,
        decide=partial(_refuse_if_gone_on, catalog, plan),
    )
    done = f"source {plan.source} was given another position"
    write_stopped(catalog.root, opened.term, opened.last.snapshot_id, done, actor.clock)
    return opened.last


def _refuse_if_gone_on(catalog: Catalog, plan: SetSourcePlan, content: Manifest | None) -> None:
    """Refuse a move whose snapshot is not the newest any more; `content` has the newest one's id."""
    if content is None or content.snapshot_id != plan.newest.snapshot_id:
        raise InvalidConfiguration(
            f"job {catalog.job!r} has gone on since the plan was made for snapshot {plan.newest.snapshot_id}: plan it "
            "again. Nothing was changed"
        )


def _find(position: SourcePosition, source: str, job: str) -> tuple[int, Positions]:
    """Return the number of a source, and its position."""
    lines = position.offsets.split("\n")[_HEADER_LINES:]
    names = position.names or ("",) * len(lines)
    known = [(number, name, positions_in([line])) for number, (name, line) in enumerate(zip(names, lines, strict=True))]
    found = [(number, at) for number, name, at in known if source in (name, *map(_topics, at))]
    if not found:
        told = "; ".join(
            f"{name or 'without a name'} ({', '.join(map(_topics, at)) or 'not Kafka'})" for _, name, at in known
        )
        raise InvalidConfiguration(f"job {job!r} has no source {source!r} in its newest snapshot, which has: {told}")
    if len(found) > 1:
        raise InvalidConfiguration(
            f"job {job!r} has {len(found)} streams under {source!r}; which of them is meant cannot be told. Give each "
            "a read() and a name of its own"
        )
    number, at = found[0]
    if not at:
        raise InvalidConfiguration(
            f"source {source!r} of job {job!r} has no position in topics of Kafka: only that of sources.kafka can be "
            "set"
        )
    return number, at[0]


def _topics(position: Positions) -> str:
    return ",".join(sorted({topic for topic, _ in position.next}))


def _moved(position: SourcePosition, number: int, new: Positions) -> SourcePosition:
    """Return a position with another line for one source; all other text stays as Spark wrote it."""
    lines: Sequence[str] = position.offsets.split("\n")
    at = _HEADER_LINES + number
    return replace(position, offsets="\n".join([*lines[:at], json.dumps(new.to_json()), *lines[at + 1 :]]))
