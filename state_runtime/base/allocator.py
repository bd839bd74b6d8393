"""The allocator of the processes that handle state: their environment, because it is read when a process starts.

Arrow's own allocator and the C library's return large blocks to the kernel as soon as they are free, and the kernel
fills every page of the next one with zeros. A task frees and takes the same tens of MiB in each epoch: that was a fifth
of its CPU time, and half of a fold's (docs/design/0009-materialization.md). With these settings the C library keeps
freed memory, up to a bound. C libraries other than glibc ignore glibc's names. Sources: mallopt(3), M_TRIM_THRESHOLD
and M_MMAP_THRESHOLD; Arrow's documentation, "Environment Variables", ARROW_DEFAULT_MEMORY_POOL.
"""

from __future__ import annotations

from collections.abc import Mapping

from state_runtime.base.limits import MIB

__all__ = ["KEEPS_FREED_MEMORY", "TASKS_KEEP_FREED_MEMORY"]

KEEPS_FREED_MEMORY: Mapping[str, str] = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_TRIM_THRESHOLD_": str(64 * MIB),  # free memory at the end of a heap, at most
    "MALLOC_MMAP_THRESHOLD_": str(32 * MIB),  # larger blocks are returned at once
}
"""Environment of a process that keeps tens of MiB of freed memory for its next epoch."""

TASKS_KEEP_FREED_MEMORY: Mapping[str, str] = {
    f"spark.executorEnv.{name}": value for name, value in KEEPS_FREED_MEMORY.items()
}
"""The same for the Python processes of tasks, as settings of a Spark session."""
