"""What an executor is, for code that runs inside Spark tasks."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["executor_id"]


def executor_id() -> str:
    """A name of the executor that runs this task, unique to its process; "" outside of one.

    Spark tells Python workers neither the executor's id nor its host, but the folder of its block manager, which is its
    own.
    """
    first = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    return Path(first).name.removeprefix("blockmgr-") if first else ""
