"""Spark's suites, from the archive that every pyspark package carries for its workers (`pyspark/python/lib/pyspark.zip`)."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

import pyspark
import pyspark.sql

__all__ = ["suite_module"]

_ROOM = "pyspark.sql.tests.pandas.streaming"


def suite_module(name: str) -> ModuleType:
    """A module of Spark's tests. STILLSTATE_SPARK_SUITE names another folder or archive with a package `pyspark`.

    Raises:
        ModuleNotFoundError: there are no such tests.
    """
    given = os.environ.get("STILLSTATE_SPARK_SUITE")
    source = Path(given) if given else Path(pyspark.__file__).parent / "python" / "lib" / "pyspark.zip"
    folder = str(source / "pyspark" / "sql")
    if folder not in pyspark.sql.__path__:
        pyspark.sql.__path__.append(folder)
    return importlib.import_module(f"{_ROOM}.{name}")
