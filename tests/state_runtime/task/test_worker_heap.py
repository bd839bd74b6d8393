"""What Python looks over for garbage in a worker process, told by a process of its own."""

from __future__ import annotations

import subprocess
import sys

_TASKS = """
import gc, weakref
from state_runtime.base.heap import freeze_heap

class Node:
    pass

looked_over = []
for task in range(1, 13):
    freeze_heap()
    if task == 1:
        import pandas, pyarrow.compute, pyarrow.parquet
    if task == 5:
        import sqlite3, xml.dom.minidom, pyarrow.dataset, unittest.mock
    gc.collect()  # as Spark's worker does after each task
    looked_over.append(len(gc.get_objects()))
node = Node()
node.itself, gone = node, weakref.ref(node)
del node
gc.collect()
print(*looked_over, gone() is None)
"""


def test_what_libraries_leave_behind_is_not_looked_over_after_each_task() -> None:
    """Neither what was there before the first task, nor what it imported, nor what one of the next did; and what tasks
    leave in cycles is found as ever."""
    told = subprocess.run([sys.executable, "-c", _TASKS], capture_output=True, text=True, check=True).stdout.split()
    *counts, is_found = told
    looked_over = list(map(int, counts))
    assert looked_over[0] > 5_000, "pandas is there, and is looked over once"
    assert max(looked_over[1:4]) < 1_000
    assert looked_over[4] > 5_000
    assert max(looked_over[9:]) < 1_000
    assert is_found == "True"
