"""When Python looks for garbage, in the workers and in the driver: never while a checkpoint waits for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collection_paused", "freeze_heap_once"]

_FROZEN = False


def freeze_heap_once() -> None:
    """In a worker: keep the heap that pyarrow and pandas leave behind out of the collections that Spark's worker does
    per task.

    Two thirds of an empty task's time were there (design section 4, "the floor of an epoch").
    """
    global _FROZEN
    if not _FROZEN:
        gc.collect()
        gc.freeze()
        # A shard's rows are hundreds of thousands of tuples at once; looking them over after every 700 new ones finds
        # nothing. Spark's worker collects after each task.
        gc.set_threshold(200_000, 20, 100)
        _FROZEN = True


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
