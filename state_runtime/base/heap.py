"""Timing of Python's garbage collection, in the workers and in the driver: never while a checkpoint waits for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collection_paused", "freeze_heap"]

_FREEZING_TASKS = (1, 2, 10)
"""At the first task of a process the libraries are loaded, at the second the modules that the first one imported, and a
few tasks later the objects that any of them keeps."""
_tasks = 0


def freeze_heap() -> None:
    """Exclude the heap of the libraries from the garbage collections that Spark's worker does after each task; called
    at the beginning of a task.

    They took two thirds of an empty task's time (design section 4, "the floor of an epoch"), and still 2 to 10 ms of
    each task when the heap was frozen at the first task only: the first task imports 12,000 objects. Garbage in cycles
    that exists at these moments is never freed, unless Spark's worker has just collected it.
    """
    global _tasks
    _tasks += 1
    if _tasks not in _FREEZING_TASKS:
        return
    if _tasks == 1:
        gc.collect()
        # A shard's rows are hundreds of thousands of tuples at once; a collection after every 700 new ones would find
        # nothing.
        gc.set_threshold(200_000, 20, 100)
    gc.freeze()


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no garbage in cycles until the block ends; for the driver, whose heap is the user's too.

    A collection of the whole heap takes longer than a checkpoint, and stops every thread. Garbage of the block is found
    by the next collection, which Python begins at once if it is due. If collection is switched off, it stays off.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
