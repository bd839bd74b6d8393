"""Start of Spark's Java process in parallel with the driver's imports and preparation."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from pyspark import SparkConf
from pyspark.sql import SparkSession

from state_runtime.base.errors import Unavailable
from state_runtime.spark.java_process import java_launcher, use_java
from state_runtime.spark.session import session_conf, session_with

__all__ = ["JavaStart"]

_LOG = logging.getLogger(__name__)
_START_S_MAX: Final = 300.0


class JavaStart:
    """A session's Java process that is starting. Life cycle: made → `session`, or `undo`.

    Nothing is started if this process has Java already, if `spark-submit` has started it (no master), or if pyspark
    starts it in another way: then the session starts it.

    Args:
        stderr: descriptor for Java's output, hundreds of lines for a driver's one; None: this process's own.

    Raises:
        InvalidConfiguration: pyspark is too old, or would make a session of Spark Connect.
        MissingJava: no Java 17 or newer.
    """

    def __init__(self, app_name: str, master: str, conf: Mapping[str, str], *, stderr: int | None = None) -> None:
        self._gateway: Any = None
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._settings = session_conf(app_name, master, conf)
        launch = java_launcher() if master else None
        if launch is None:
            return
        settings = SparkConf(loadDefaults=False).setAll(list(self._settings.items()))
        # Not in the driver's process group: a signal to the whole group asks the driver to stop, and it needs Java
        # until its last checkpoint. Java ends by itself with the driver, whose pipe it reads.
        options = {"start_new_session": True, **({} if stderr is None else {"stderr": stderr})}
        self._thread = threading.Thread(
            target=self._launch, args=(launch, settings, options), name="stillstate-java", daemon=True
        )
        self._thread.start()

    def _launch(self, launch: Callable[..., Any], settings: SparkConf, options: dict[str, Any]) -> None:
        try:
            self._gateway = launch(settings, options)
        except Exception as error:
            self._failure = error

    def session(self) -> SparkSession:
        """Wait until Java has started, and build the session on it.

        Raises:
            Unavailable: it did not start. Exception: PySpark's own error about it.
        """
        self._arrive()
        return session_with(self._settings)

    def _arrive(self) -> None:
        if self._thread is None:
            return
        self._thread.join(_START_S_MAX)
        if self._thread.is_alive():
            raise Unavailable(f"Spark's Java process did not start within {_START_S_MAX:.0f} s")
        self._thread = None
        if self._failure is not None:
            raise self._failure
        if not use_java(self._gateway):
            self._end()  # a session that was built meanwhile has started another one

    def undo(self) -> None:
        """Let Java end, because the start that needs it failed."""
        if self._thread is None:
            return
        self._thread.join(_START_S_MAX)
        self._thread = None
        if self._gateway is not None:
            self._end()

    def _end(self) -> None:
        try:
            self._gateway.shutdown()
        except Exception:
            _LOG.debug("Java ended by itself", exc_info=True)
        self._gateway.proc.stdin.close()  # Java ends when this closes
