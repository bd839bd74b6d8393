"""The identity of an executor, for code that runs inside Spark tasks."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["executor_id"]


def executor_id() -> str:
    """Return a name of the executor that runs this task, unique to its process; "" outside of an executor.

    Spark does not tell Python workers the executor's id or host, but the folder of its block manager, which no other
    executor has.
    """
    first = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    return Path(first).name.removeprefix("blockmgr-") if first else ""
