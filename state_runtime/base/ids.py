"""The only place that reads randomness."""

from __future__ import annotations

import uuid
from typing import Protocol

__all__ = ["SYSTEM_IDS", "Ids", "SystemIds"]


class Ids(Protocol):
    """Source of unique names."""

    def uid(self) -> str:
        """Return 32 hexadecimal characters, unique everywhere (job, run, commit, object names)."""
        ...

    def short(self) -> str:
        """Return 16 hexadecimal characters (64 bits): unique within one shard of one operator (local versions)."""
        ...


class SystemIds:
    """Random ids."""

    def uid(self) -> str:
        return uuid.uuid4().hex

    def short(self) -> str:
        return uuid.uuid4().hex[:16]


SYSTEM_IDS = SystemIds()
