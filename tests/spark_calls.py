"""The calls of pyspark and Spark that are not public, as the code of `state_runtime/spark` makes them."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import py4j.protocol
import pyspark
import pyspark.accumulators
import pyspark.sql
from pyspark.sql import types
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle, TimerValues

FOLDER = Path(__file__).resolve().parent.parent / "state_runtime" / "spark"
_JAVA = re.compile(r"[a-z]+[A-Z]\w*|[A-Z]\w*")
_PUBLIC = (
    pyspark.SparkContext,
    pyspark.SparkConf,
    pyspark.sql.DataFrame,
    pyspark.sql.SparkSession,
    pyspark.sql.SparkSession.builder,
    pyspark.sql.Observation,
    pyspark.sql.functions,
    py4j.protocol.Py4JJavaError,
    StatefulProcessorHandle,
    TimerValues,
    types,
    types.StructType,
    types.StructField,
    types.ArrayType(types.LongType()),
    types.MapType(types.LongType(), types.LongType()),
    logging.getLogger(),
)
_PUBLIC_NAMES = frozenset(name for owner in _PUBLIC for name in dir(owner)) | {
    "mapPartitions",
    *dir(pyspark),
    *dir(pyspark.sql),
}


def is_private(name: str) -> bool:
    """Whether a name is written as Java's are, and is none of pyspark's public ones."""
    return _JAVA.fullmatch(name) is not None and name not in _PUBLIC_NAMES


def is_of(value: ast.AST, names: set[str]) -> bool:
    """Whether an attribute is looked up in what has one of these names."""
    return isinstance(value, ast.Name) and value.id in names


def calls_in(tree: ast.AST) -> Iterator[str]:
    """What goes through `private` and `private_of`, and each method and class of Java's that is told by its name: written
    as Java writes them, and not as pyspark's own public ones are."""
    imported = {
        a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("private", "private_of", "object_of", "contains"):
                yield from (a.value for a in node.args[1:] if isinstance(a, ast.Constant) and isinstance(a.value, str))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and not is_of(node.value, imported | {"self"}):
            yield node.attr


def calls() -> set[str]:
    """Those of the whole folder."""
    return {name for file in FOLDER.glob("*.py") for name in calls_in(ast.parse(file.read_text()))}
