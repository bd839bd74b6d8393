"""The priority of background work."""

from __future__ import annotations

import logging
import os
import sys
import threading

__all__ = ["give_way"]

_LOG = logging.getLogger(__name__)
_NICE = 10


def give_way() -> None:
    """Let the epochs' tasks have the processors before this thread and the threads that it will start.

    On Linux each thread has its own priority; elsewhere nothing is done.
    """
    if sys.platform == "linux":
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        except OSError:
            _LOG.debug("the priority of folding could not be lowered", exc_info=True)
