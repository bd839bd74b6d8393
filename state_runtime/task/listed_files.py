"""With the changelog off: what the driver's listing says of each shard, as tasks are told it; pure.

Tasks of one stage share one function, and with it whatever it holds: were the listing in it, every task would be sent
the files of all shards. So it is broadcast, once for each executor, and packed so that a task unpacks its own shard's
entry and no other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from state_runtime.snapshot.shard_files import ShardFiles

__all__ = ["ListedFiles"]


@dataclass(frozen=True)
class ListedFiles:
    """Of one operator, per shard, which objects on the primary store hold which files."""

    _packed: Mapping[int, str]

    @staticmethod
    def of(shards: Iterable[ShardFiles]) -> ListedFiles:
        """The listing's entries of one operator. Small files, which lie in the listing itself, are left out."""
        return ListedFiles({s.shard: json.dumps({f.digest: f.path for f in s.files if f.path}) for s in shards})

    def paths(self, shard: int) -> Mapping[str, str] | None:
        """Paths of objects by the digest of what they hold; None if the listing has no entry of the shard."""
        packed = self._packed.get(shard)
        if packed is None:
            return None
        paths: dict[str, str] = json.loads(packed)
        return paths
