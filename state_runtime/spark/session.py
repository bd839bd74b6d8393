"""A Spark session with settings that lower an epoch's floor (its least time); other sessions work too, but slower."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from pyspark.sql import SparkSession

from state_runtime.base.allocator import TASKS_KEEP_FREED_MEMORY
from state_runtime.spark.class_archive import with_archive
from state_runtime.spark.java import require_java
from state_runtime.spark.java_process import log_broken_accumulators, write_no_checksums
from state_runtime.spark.versions import refuse_connect, refuse_connect_settings, refuse_old_version

__all__ = ["RECOMMENDED", "build_session", "session_conf", "session_with"]

RECOMMENDED: Mapping[str, str] = {
    # A TCP loopback socket between JVM and Python costs a delayed acknowledgement (~40 ms) per task.
    "spark.python.unix.domain.socket.enabled": "true",
    # Spark's checkpoint directory is scratch here: no rename protocol, and no checksum files (`write_no_checksums`).
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    # The number of an epoch's tasks must not change: one per shard.
    "spark.sql.adaptive.enabled": "false",
    "spark.shuffle.reduceLocality.enabled": "false",
    # A task waits this long for the executor that has its shard's state: moving the shard costs a restore. Tasks do
    # not wait for a lost executor.
    "spark.locality.wait.process": "30s",
    # A run that begins before its executors are there would give all shards to the first one. Spark waits 30 s at
    # most; a standalone master needs spark.cores.max to know the number of executors.
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    # PySpark asks the JVM for the call site of every column function: 4 ms of an epoch's planning.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # Columns move in larger pieces than Spark's default of 10,000 rows.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "50000",
    # A run shows its own progress; Spark's bar would overwrite it.
    "spark.ui.showConsoleProgress": "false",
    **TASKS_KEEP_FREED_MEMORY,
}


def session_conf(app_name: str, master: str = "local[*]", conf: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return all settings of a session: `RECOMMENDED`, and `conf` over them.

    Also sets variables in this process's environment that Spark reads, if they are not set yet.

    Args:
        master: "" leaves it to the launcher of this process: `spark-submit`.

    Raises:
        InvalidConfiguration: pyspark is too old, or would make a session of Spark Connect.
        MissingJava: no Java 17 or newer.
    """
    refuse_old_version()
    refuse_connect_settings(master, conf or {})
    java = require_java()
    # Tasks must find the packages that this interpreter has.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if master.startswith("local"):
        # Everything is on this machine: no look-up of its public address, and no warning about it.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    own = {key: str(value) for key, value in {**RECOMMENDED, **(conf or {})}.items()}
    own = with_archive(own, java) if master else own  # without a master Java runs already
    return {"spark.app.name": app_name, **({"spark.master": master} if master else {}), **own}


def build_session(app_name: str, master: str = "local[*]", conf: Mapping[str, str] | None = None) -> SparkSession:
    """Start (or get) a session with `RECOMMENDED` settings; `conf` wins over them.

    Raises:
        InvalidConfiguration: pyspark is too old, or would make a session of Spark Connect.
        MissingJava: no Java 17 or newer.
    """
    return session_with(session_conf(app_name, master, conf))


def session_with(settings: Mapping[str, str]) -> SparkSession:
    """Start (or get) a session with all settings of `session_conf`."""
    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    refuse_connect(session, "the session that this process has already")
    session.sparkContext.setLogLevel("ERROR")
    log_broken_accumulators(session.sparkContext)
    write_no_checksums(session.sparkContext)
    return session
