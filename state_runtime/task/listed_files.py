"""With the changelog off: the entries of the driver's listing for each shard, as tasks get them; pure.

Tasks of one stage share one function, with all that it holds: with the listing in it, every task would get the files of
all shards. So the listing is broadcast, once for each executor, and packed so that a task unpacks only its own shard's
entry.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from state_runtime.snapshot.shard_files import ShardFiles

__all__ = ["ListedFiles"]


@dataclass(frozen=True)
class ListedFiles:
    """The objects on the primary store that hold the files of one operator, per shard."""

    _packed: Mapping[int, str]

    @staticmethod
    def of(shards: Iterable[ShardFiles]) -> ListedFiles:
        """Pack the listing's entries of one operator, without small files, which are stored in the listing itself."""
        return ListedFiles({s.shard: json.dumps({f.digest: f.path for f in s.files if f.path}) for s in shards})

    def paths(self, shard: int) -> Mapping[str, str] | None:
        """Return paths of objects by the digest of their content; None if the listing has no entry of the shard."""
        packed = self._packed.get(shard)
        if packed is None:
            return None
        paths: dict[str, str] = json.loads(packed)
        return paths
