"""The actor that works for a process, and its access to the outside: clock, source of names, process. One value."""

from __future__ import annotations

from dataclasses import dataclass

from state_runtime.base.clock import Clock
from state_runtime.base.ids import Ids

__all__ = ["Actor"]


@dataclass(frozen=True)
class Actor:
    """The party that reads and writes a store on behalf of a process.

    Attributes:
        clock, ids: the only time and the only randomness that it uses.
        host, pid: its process, as documents in the store name it for people; empty if no document names it.
        process_space: where `pid` is that process only (base/process_space.py); empty if it is not known.
    """

    clock: Clock
    ids: Ids
    host: str = ""
    pid: int = 0
    process_space: str = ""

    @property
    def owner(self) -> str:
        """The process in one word, `host:pid`."""
        return f"{self.host}:{self.pid}"
