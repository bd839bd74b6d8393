"""The driver's index of every shard between two epochs: its local version, and its due work; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from state_runtime.snapshot.shard_versions import NO_VERSION, ShardVersions

__all__ = ["ShardIndex", "ShardStep"]


@dataclass(frozen=True)
class ShardStep:
    """One shard after an epoch, as its task acknowledged it.

    Attributes:
        changed: whether the driver now holds changes of it that no segment has. These include changes that the task
            uploaded, because only a segment references them.
    """

    operator: str
    shard: int
    version: str
    next_due_ms: int | None
    changed: bool


@dataclass(frozen=True)
class ShardIndex:
    """Per operator uid one value for each shard, as of the head.

    Life cycle: `at_start` of a run → (`after` an epoch | `flushed` | `checkpointed`)*; each makes a new value.

    Attributes:
        versions: local versions.
        committed: the same at the newest checkpoint.
        trusted: the shards whose version this run wrote or verified.
        pending: the shards with changes that no segment has: the driver's memory holds them, or their only references.
        next_due: lower bound of the next due time (ms); None if nothing is due later.
        unvisited: shards that the next epoch must visit even if no row comes and nothing is due.
    """

    versions: Mapping[str, ShardVersions]
    committed: Mapping[str, ShardVersions]
    trusted: Mapping[str, frozenset[int]]
    pending: Mapping[str, frozenset[int]]
    next_due: Mapping[str, tuple[int | None, ...]]
    unvisited: Mapping[str, frozenset[int]]

    @staticmethod
    def at_start(
        parallelism: int, known: Mapping[str, str], next_due_ms: Mapping[str, int | None], operators: Iterable[str]
    ) -> ShardIndex:
        """Return the index at the start of a run.

        Args:
            known: usable local versions that a manifest names, as it stores them.
            next_due_ms: per operator the earliest of all shards; visits show which shard it was.
        """
        uids = list(operators)
        versions = {uid: ShardVersions.decode(known.get(uid, ""), parallelism) for uid in uids}
        return ShardIndex(
            versions=versions,
            committed=versions,
            trusted=_nowhere(uids),
            pending=_nowhere(uids),
            next_due={uid: (next_due_ms.get(uid),) * parallelism for uid in uids},
            unvisited={},
        )

    def after(self, steps: Iterable[ShardStep]) -> ShardIndex:
        """Return the index after an epoch. A shard that was not visited stays as it was."""
        visited: dict[str, dict[int, ShardStep]] = {}
        for step in steps:
            visited.setdefault(step.operator, {})[step.shard] = step
        versions, trusted, pending = dict(self.versions), dict(self.trusted), dict(self.pending)
        next_due, unvisited = dict(self.next_due), dict(self.unvisited)
        for uid, by_shard in visited.items():
            versions[uid] = versions[uid].with_shards({shard: s.version for shard, s in by_shard.items()})
            trusted[uid] = trusted[uid].union(by_shard)
            pending[uid] = pending[uid].union(shard for shard, s in by_shard.items() if s.changed)
            due = list(next_due[uid])
            for shard, s in by_shard.items():
                due[shard] = s.next_due_ms
            next_due[uid] = tuple(due)
            unvisited[uid] = unvisited.get(uid, frozenset()).difference(by_shard)
        return replace(
            self, versions=versions, trusted=trusted, pending=pending, next_due=next_due, unvisited=unvisited
        )

    def flushed(self) -> ShardIndex:
        """Return the index after all changes that the driver held were written to the primary store."""
        return replace(self, pending=_nowhere(self.pending))

    def checkpointed(self) -> ShardIndex:
        """Return the index after a manifest that names the versions."""
        return replace(self.flushed(), committed=self.versions)

    def visiting(self, shards: Mapping[str, frozenset[int]]) -> ShardIndex:
        """Return the index with more shards that the next epoch must visit."""
        uids = {*self.unvisited, *shards}
        return replace(
            self,
            unvisited={uid: self.unvisited.get(uid, frozenset()) | shards.get(uid, frozenset()) for uid in uids},
        )

    def due(self, operator: str, now_ms: int) -> list[int]:
        """Return the shards with due work."""
        return [
            shard for shard, due_ms in enumerate(self.next_due[operator]) if due_ms is not None and due_ms <= now_ms
        ]

    def earliest_due_ms(self, operator: str) -> int | None:
        """Return the earliest due time of all shards; None if nothing is due in any."""
        return min((due for due in self.next_due[operator] if due is not None), default=None)

    @property
    def any_stranded(self) -> bool:
        """Whether a shard's changes are only in the driver's memory, because its local version could not be written."""
        return any(self.versions[uid][shard] == NO_VERSION for uid, shards in self.pending.items() for shard in shards)

    @property
    def shard_count(self) -> int:
        """Number of shards of all operators together."""
        return sum(map(len, self.versions.values()))


def _nowhere(operators: Iterable[str]) -> dict[str, frozenset[int]]:
    return dict.fromkeys(operators, frozenset())
