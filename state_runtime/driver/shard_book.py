"""What a driver knows of every shard between epochs: local versions, and what is due; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from state_runtime.task.shard_access import NO_VERSION

__all__ = ["ShardStep", "Shards"]

_VERSION_CHARS = len(NO_VERSION)


@dataclass(frozen=True)
class ShardStep:
    """One shard after an epoch, as its task acknowledged it.

    Attributes:
        changed: whether the driver now holds changes of it that no segment has: also those that the task uploaded,
            because only a segment leads to them.
    """

    operator: str
    shard: int
    version: str
    next_due_ms: int | None
    changed: bool


@dataclass(frozen=True)
class Shards:
    """Per operator uid one value for each shard.

    Attributes:
        versions: local version ids, 16 characters each, joined; of the head.
        committed: the same at the newest checkpoint.
        trusted: "1" where this run wrote or verified the version.
        pending: "1" where the driver's memory holds changes, or the only way to changes, that no segment has.
        next_due: lower bound of what is due next (ms); None where nothing is.
        unvisited: shards that the next epoch must visit although no row comes and nothing is due.
    """

    versions: Mapping[str, str]
    committed: Mapping[str, str]
    trusted: Mapping[str, str]
    pending: Mapping[str, str]
    next_due: Mapping[str, tuple[int | None, ...]]
    unvisited: Mapping[str, frozenset[int]]

    @staticmethod
    def at_start(
        parallelism: int, known: Mapping[str, str], next_due_ms: Mapping[str, int | None], operators: Iterable[str]
    ) -> Shards:
        """At the start of a run.

        Args:
            known: local versions that a manifest names and that may serve; those of another length are left out.
            next_due_ms: per operator the earliest of all shards: which one it was shows when they are visited.
        """
        none = NO_VERSION * parallelism
        uids = list(operators)
        versions = {uid: known[uid] if len(known.get(uid, "")) == len(none) else none for uid in uids}
        zeros = dict.fromkeys(uids, "0" * parallelism)
        due = {uid: (next_due_ms.get(uid),) * parallelism for uid in uids}
        return Shards(versions, versions, zeros, zeros, due, {})

    def after(self, steps: Iterable[ShardStep]) -> Shards:
        """After an epoch. A shard that was not visited keeps what it had."""
        versions = {uid: _split(joined) for uid, joined in self.versions.items()}
        trusted = {uid: list(flags) for uid, flags in self.trusted.items()}
        pending = {uid: list(flags) for uid, flags in self.pending.items()}
        next_due = {uid: list(times) for uid, times in self.next_due.items()}
        unvisited = dict(self.unvisited)
        for step in steps:
            versions[step.operator][step.shard] = step.version
            trusted[step.operator][step.shard] = "1"
            next_due[step.operator][step.shard] = step.next_due_ms
            if step.changed:
                pending[step.operator][step.shard] = "1"
            unvisited[step.operator] = unvisited.get(step.operator, frozenset()) - {step.shard}
        return replace(
            self,
            versions=_joined(versions),
            trusted=_joined(trusted),
            pending=_joined(pending),
            next_due={uid: tuple(times) for uid, times in next_due.items()},
            unvisited=unvisited,
        )

    def flushed(self) -> Shards:
        """After everything that the driver held was written to the primary store."""
        return replace(self, pending={uid: "0" * len(flags) for uid, flags in self.pending.items()})

    def checkpointed(self) -> Shards:
        """After a manifest that names the versions."""
        return replace(self.flushed(), committed=self.versions)

    def visiting(self, shards: Mapping[str, frozenset[int]]) -> Shards:
        """With more shards that the next epoch must visit."""
        uids = {*self.unvisited, *shards}
        return replace(
            self,
            unvisited={uid: self.unvisited.get(uid, frozenset()) | shards.get(uid, frozenset()) for uid in uids},
        )

    def due(self, operator: str, now_ms: int) -> list[int]:
        """The shards in which something is due."""
        return [
            shard for shard, due_ms in enumerate(self.next_due[operator]) if due_ms is not None and due_ms <= now_ms
        ]

    def earliest_due_ms(self, operator: str) -> int | None:
        """Of all shards; None if nothing is due in any."""
        return min((due for due in self.next_due[operator] if due is not None), default=None)

    @property
    def any_pending(self) -> bool:
        """Whether the driver's memory holds changes of any shard."""
        return any("1" in flags for flags in self.pending.values())

    @property
    def any_stranded(self) -> bool:
        """Whether a shard's changes are in the driver's memory and nowhere else: its local version could not be
        written."""
        return any(
            flag == "1" and version == NO_VERSION
            for uid, flags in self.pending.items()
            for flag, version in zip(flags, _split(self.versions[uid]), strict=True)
        )


def _split(joined: str) -> list[str]:
    return [joined[i : i + _VERSION_CHARS] for i in range(0, len(joined), _VERSION_CHARS)]


def _joined(parts: Mapping[str, Iterable[str]]) -> dict[str, str]:
    return {uid: "".join(values) for uid, values in parts.items()}
