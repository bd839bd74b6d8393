"""The local version of each shard of an operator, in the form of manifests and tasks; pure.

    "0123456789abcdef" "----------------" "89ab…"        joined, one after the other, in the order of the shards

A manifest holds the joined text; only this file knows the format. It is a hint for quick restarts: a task that opens a
local version checks it, and restores missing state from the primary store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from state_runtime.base.errors import check

__all__ = ["NO_VERSION", "UNKNOWN_VERSIONS", "ShardVersions"]

_CHARS = 16

NO_VERSION = "-" * _CHARS
"""The value for "no local version" in the place of a version id."""


@dataclass(frozen=True)
class ShardVersions:
    """One local version id (`Ids.short`) or `NO_VERSION` for each shard of an operator; a value.

    It is pickled for the tasks of every epoch, so it holds the joined text: 16 bytes a shard.
    """

    _joined: str

    @staticmethod
    def none(parallelism: int) -> ShardVersions:
        """Return versions in which no shard has a local version."""
        return ShardVersions(NO_VERSION * parallelism)

    @staticmethod
    def of(versions: Iterable[str]) -> ShardVersions:
        """Join one id per shard, in the order of the shards."""
        ids = list(versions)
        check(all(len(version) == _CHARS for version in ids), f"a local version's id has {_CHARS} characters")
        return ShardVersions("".join(ids))

    @staticmethod
    def decode(stored: str, parallelism: int) -> ShardVersions:
        """Decode a manifest's text for an operator. If the length is wrong it is ignored: no shard has a version."""
        return ShardVersions(stored) if len(stored) == _CHARS * parallelism else ShardVersions.none(parallelism)

    def encode(self) -> str:
        """Return the text that a manifest stores."""
        return self._joined

    def __len__(self) -> int:
        return len(self._joined) // _CHARS

    def __getitem__(self, shard: int) -> str:
        """Return the version of a shard.

        Raises:
            IndexError: there is no such shard.
        """
        if not 0 <= shard < len(self):
            raise IndexError(f"shard {shard} of {len(self)}")
        return self._joined[shard * _CHARS : (shard + 1) * _CHARS]

    def __iter__(self) -> Iterator[str]:
        return (self._joined[at : at + _CHARS] for at in range(0, len(self._joined), _CHARS))

    def with_shards(self, changed: Mapping[int, str]) -> ShardVersions:
        """Return a copy with other versions of some shards."""
        ids = list(self)
        for shard, version in changed.items():
            ids[shard] = version
        return ShardVersions.of(ids)


UNKNOWN_VERSIONS = ShardVersions("")
"""The value if nothing is known of an operator's shards, not even their number."""
