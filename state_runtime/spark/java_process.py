"""Spark's Java process and its one-time setup: its connection, its end, its local files, pyspark's own thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from pyspark import SparkContext
from pyspark.sql import SparkSession

from state_runtime.base.errors import Unavailable
from state_runtime.spark.internals import Internal, given, private, private_of
from state_runtime.spark.jvm import java_context

__all__ = [
    "end_java",
    "java_launcher",
    "log_broken_accumulators",
    "use_java",
    "write_no_checksums",
]

_LOG = logging.getLogger(__name__)


def java_launcher() -> Callable[..., Any] | None:
    """Return a function that starts Spark's Java (settings, options of its process) and returns the connection; None if
    this process has one already, or if the session must start it."""

    def launcher() -> Callable[..., Any] | None:
        launch: Callable[..., Any] = private_of("pyspark.java_gateway", "launch_gateway")
        return launch if private(SparkContext, "_gateway") is None else None

    return given(Internal.JAVA_START, launcher, lambda: None)


def use_java(gateway: Any) -> bool:
    """Let sessions of this process use a Java process, unless they have one; return whether they use this one."""

    def use() -> bool:
        private(SparkContext, "_ensure_initialized")(gateway=gateway)
        return private(SparkContext, "_gateway") is gateway

    return given(Internal.JAVA_START, use, lambda: False)


def end_java(spark: SparkSession, wait_s: float = 300.0) -> None:
    """Stop a session and Spark's Java process, and wait until it has ended: it may still have to write a file.

    Raises:
        subprocess.TimeoutExpired: it has not ended by then. Unavailable: this pyspark does not release it.
    """

    def end() -> None:
        gateway = private(spark.sparkContext, "_gateway")
        spark.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()  # Java ends when this closes
        gateway.proc.wait(wait_s)

    def refuse() -> None:
        raise Unavailable(
            "this version of pyspark does not show Spark's Java process, so nothing can wait for its last deed. "
            "Drivers start without an archive of its classes, slower"
        )

    given(Internal.JAVA_END, end, refuse)


def write_no_checksums(context: SparkContext) -> None:
    """Write no `.crc` file beside local files of the driver's JVM: one write instead of two, for scratch files.

    It is set on the file system object that Hadoop shares with all users. Another class of file system would have the
    same effect, but would break code that needs this class, such as Spark's own stateful operators.
    """

    def write_none() -> None:
        files = private(context, "_jvm").org.apache.hadoop.fs.FileSystem
        files.getLocal(java_context(context).hadoopConfiguration()).setWriteChecksum(False)

    given(Internal.CHECKSUM_FILES, write_none, lambda: None)


def log_broken_accumulators(context: SparkContext) -> None:
    """Log broken connections for accumulators: PySpark's thread would print twenty lines of traceback when Spark's Java
    process ends, which say no more than Stillstate's own error."""

    def log_them() -> None:
        private(context, "_accumulatorServer").handle_error = lambda request, address: _LOG.info(
            "the connection for Spark's accumulators broke", exc_info=True
        )

    given(Internal.ACCUMULATOR_SERVER, log_them, lambda: None)
