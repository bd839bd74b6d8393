"""The priority of work that nobody waits for."""

from __future__ import annotations

import logging
import os
import sys
import threading

__all__ = ["give_way"]

_LOG = logging.getLogger(__name__)
_NICE = 10


def give_way() -> None:
    """Let the epochs' tasks have the processors before this thread and those that it will start.

    On Linux a thread has a priority of its own; elsewhere nothing is done.
    """
    if sys.platform == "linux":
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        except OSError:
            _LOG.debug("the priority of folding could not be lowered", exc_info=True)
