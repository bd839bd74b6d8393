"""A mover as a process of its own, which kills itself before one of its writes: `move_process.py SOURCE TARGET OPTIONS WRITES`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from state_runtime.base.actor import Actor
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.maintenance.move.execute import execute_move
from state_runtime.maintenance.move.plan import plan_move
from state_runtime.store import FsspecStore, LocalStore, open_store


def die_before(write: int) -> None:
    """SIGKILL: no handler runs, threads stop in the middle of what they do."""
    counting, count = threading.Lock(), 0

    def counted(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            with counting:
                count += 1
                if count > write:
                    os.kill(os.getpid(), signal.SIGKILL)
            return method(*args, **kwargs)

        return call

    for kind in (LocalStore, FsspecStore):
        for name in ("create", "put", "put_file", "copy_from", "delete"):
            setattr(kind, name, counted(getattr(kind, name)))


def main() -> None:
    source_url, target_url, options, writes = sys.argv[1:]
    source, target = (
        open_store(url, json.loads(options) if "://" in url else None) for url in (source_url, target_url)
    )
    die_before(int(writes))
    plan = plan_move(source, target, mode="move", snapshot_id=None, clock=SYSTEM_CLOCK)
    execute_move(source, target, plan, actor=Actor(SYSTEM_CLOCK, SYSTEM_IDS, "here", os.getpid()), threads=4)


if __name__ == "__main__":
    main()
