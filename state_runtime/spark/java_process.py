"""Spark's Java process and what is set in it once: its connection, its end, its local files, pyspark's own thread."""

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
    """Starts Spark's Java (settings, options of its process) and gives the connection; None if this process has one
    already, or where the session is to start it."""

    def launcher() -> Callable[..., Any] | None:
        launch: Callable[..., Any] = private_of("pyspark.java_gateway", "launch_gateway")
        return launch if private(SparkContext, "_gateway") is None else None

    return given(Internal.JAVA_START, launcher, lambda: None)


def use_java(gateway: Any) -> bool:
    """Let sessions of this process use a Java process, unless they have one; says whether it is this one."""

    def use() -> bool:
        private(SparkContext, "_ensure_initialized")(gateway=gateway)
        return private(SparkContext, "_gateway") is gateway

    return given(Internal.JAVA_START, use, lambda: False)


def end_java(spark: SparkSession, wait_s: float = 300.0) -> None:
    """Stop a session and Spark's Java process, and wait until that has ended: it may have something to write.

    Raises:
        subprocess.TimeoutExpired: it has not ended by then. Unavailable: this pyspark does not let go of it.
    """

    def end() -> None:
        gateway = private(spark.sparkContext, "_gateway")
        spark.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()  # what Java waits for
        gateway.proc.wait(wait_s)

    def refuse() -> None:
        raise Unavailable(
            "this version of pyspark does not show Spark's Java process, so nothing can wait for its last deed. "
            "Drivers start without an archive of its classes, slower"
        )

    given(Internal.JAVA_END, end, refuse)


def write_no_checksums(context: SparkContext) -> None:
    """Local files of the driver's JVM get no `.crc` file beside them: two writes instead of one, for scratch.

    Said to the file system that Hadoop hands to everybody. Another class of file system would do the same, and break
    what wants this one: Spark's own stateful operators do.
    """

    def write_none() -> None:
        files = private(context, "_jvm").org.apache.hadoop.fs.FileSystem
        files.getLocal(java_context(context).hadoopConfiguration()).setWriteChecksum(False)

    given(Internal.CHECKSUM_FILES, write_none, lambda: None)


def log_broken_accumulators(context: SparkContext) -> None:
    """PySpark's thread that waits for accumulators prints twenty lines of traceback when Spark's Java process goes: it
    says nothing that our own error does not, and belongs into the log."""

    def log_them() -> None:
        private(context, "_accumulatorServer").handle_error = lambda request, address: _LOG.info(
            "the connection for Spark's accumulators broke", exc_info=True
        )

    given(Internal.ACCUMULATOR_SERVER, log_them, lambda: None)
