"""Who acts, and what it may ask of the outside: its clock, its source of names, its process. One value, handed on."""

from __future__ import annotations

from dataclasses import dataclass

from state_runtime.base.clock import Clock
from state_runtime.base.ids import Ids

__all__ = ["Actor"]


@dataclass(frozen=True)
class Actor:
    """Whoever reads and writes a store on behalf of a process.

    Attributes:
        clock, ids: the only time and the only randomness that it uses.
        host, pid: its process, as documents in the store name it for people; empty where none of them does.
    """

    clock: Clock
    ids: Ids
    host: str = ""
    pid: int = 0

    @property
    def owner(self) -> str:
        """The process in one word, `host:pid`."""
        return f"{self.host}:{self.pid}"
