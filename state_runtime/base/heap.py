"""When Python looks for garbage, in the workers and in the driver: never while a checkpoint waits for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collection_paused", "freeze_heap"]

_FREEZING_TASKS = (1, 2, 10)
"""Before the first task of a process the libraries are there, after it what it imports on its way, and a few tasks
later what any of them keeps."""
_tasks = 0


def freeze_heap() -> None:
    """At the beginning of a task: keep the heap that libraries leave behind out of the collections of garbage that
    Spark's worker does after each task.

    Two thirds of an empty task's time were there (design section 4, "the floor of an epoch"), and 2 to 10 ms of each
    task while it was done for the first one alone: what the first task imports is 12,000 objects. Garbage in cycles
    that there is at these moments stays, as far as Spark's worker has not just found it.
    """
    global _tasks
    _tasks += 1
    if _tasks not in _FREEZING_TASKS:
        return
    if _tasks == 1:
        gc.collect()
        # A shard's rows are hundreds of thousands of tuples at once; looking them over after every 700 new ones finds
        # nothing.
        gc.set_threshold(200_000, 20, 100)
    gc.freeze()


@contextmanager
def collection_paused() -> Iterator[None]:
    """In the driver, whose heap is the user's too: no collection of garbage in cycles until the block ends.

    One of the whole heap takes longer than a checkpoint, and stops every thread. What the block leaves is found by the
    next one, which Python begins at once if it is due. Where collection is switched off, it stays so.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
