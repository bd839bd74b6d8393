"""Drivers that `spark-submit` starts: on this machine (client mode), or in a cluster (cluster mode).

A driver in the cluster is known by its heartbeat only: this host cannot tell whether its process lives, its log belongs
to the cluster, and a request on the store stops it. A driver of this machine is seen like a local one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.ids import SYSTEM_IDS, Ids
from state_runtime.base.process_space import is_our_space
from state_runtime.snapshot.term_files import RunStatus
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.config.start_options import StartOptions
from stillstate.orchestration.launchers.log_files import private_file, redacted
from stillstate.orchestration.launchers.port import LastWords, Launched
from stillstate.orchestration.launchers.processes import is_over, process_of
from stillstate.orchestration.launchers.submit_command import (
    CONF_SUFFIX,
    properties_text,
    submit_command,
    submit_properties,
)
from stillstate.orchestration.launchers.through_store import TERMINATE_WAIT_S, StoreLauncher

__all__ = ["SparkSubmitLauncher", "find_spark_submit"]

SUBMIT_CLASS: Final = "org.apache.spark.deploy.SparkSubmit"


class SparkSubmitLauncher(StoreLauncher):
    """Implements `Launcher` with `spark-submit`.

    Args:
        config: the configuration file; a driver in the cluster gets it by `--files`.
        program: `spark-submit`; None: found when it is needed.
        python: runs a driver of this machine.
    """

    def __init__(
        self,
        config: Path,
        job: JobSpec,
        *,
        program: str | None = None,
        python: str = sys.executable,
        clock: Clock = SYSTEM_CLOCK,
        ids: Ids = SYSTEM_IDS,
        host: str | None = None,
        poll: Callable[[float], object] | None = None,
    ) -> None:
        super().__init__(config, job, clock=clock, ids=ids, host=host, poll=poll)
        self._program = program
        self._python = python

    def _launch(self, options: StartOptions, cause: str, before: int) -> Launched:
        program = self._program or find_spark_submit(self._job)
        in_cluster = self._job.launcher.drives_elsewhere
        with self._properties() as properties_file:
            command = submit_command(
                self._job,
                self._config,
                program=program,
                properties_file=properties_file,
                cause=redacted(self._job, cause),
                options=[*options.always(), *options.once()],
            )
            # The program is a script, which uses the SPARK_HOME that it is in only if the variable is not set.
            environment = {**self._environment(), "SPARK_HOME": str(Path(program).resolve().parents[1])}
            begun = self._begin(command, environment, before, leaves=in_cluster)

            def is_ours(status: RunStatus) -> bool:
                # In the cluster its process is unknown here. Of two starts at the same time one is refused.
                return in_cluster or (status.host == self._host and _is_of_session(status.pid, begun.process.pid))

            return self._wait_until_running(begun, is_ours)

    def last_words(self, status: RunStatus) -> LastWords | None:
        words = super().last_words(status)
        if words is not None and self._is_here(status) and status.message:
            # The driver ended, but its Spark goes on logging: show the driver's own message, not only Spark's.
            return LastWords(words.log, f"  {redacted(self._job, status.message)}\n{words.text}")
        return words

    def _is_here(self, status: RunStatus) -> bool:
        # A container of the cluster may have this host's name, and separate processes.
        is_of_host = status.host == self._host and is_our_space(status.process_space)
        return is_of_host and not self._job.launcher.drives_elsewhere

    def _end_beside(self, status: RunStatus) -> str:
        """End Java too: it ends by itself after its Python, unless it hangs, and then it would keep its executors."""
        process = process_of(status, self._job.name)
        java = None if process is None else _submission_of(process)
        if process is None or java is None:
            return ""
        with suppress(psutil.NoSuchProcess):
            java.kill()
        psutil.wait_procs([java], timeout=TERMINATE_WAIT_S)
        return " and its spark-submit"

    @contextmanager
    def _properties(self) -> Iterator[Path]:
        """Yield the settings in a file that only this user can read, until the driver runs or has failed to."""
        path = private_file(self._job, self._clock, self._ids, CONF_SUFFIX)
        try:
            path.write_text(properties_text(submit_properties(self._job, self._python)), encoding="utf-8")
            yield path
        finally:
            path.unlink(missing_ok=True)


def find_spark_submit(job: JobSpec) -> str:
    """Find the program: as configured, of $SPARK_HOME, or of PySpark in this environment.

    Raises:
        InvalidConfiguration: it was not found.
    """
    if job.launcher.spark_submit:
        found = [Path(job.launcher.spark_submit)]
    elif home := os.environ.get("SPARK_HOME"):
        found = [Path(home) / "bin" / "spark-submit"]
    else:
        pyspark = importlib.util.find_spec("pyspark")  # found, not imported: that takes a second
        places = [] if pyspark is None else pyspark.submodule_search_locations or []
        found = [Path(place) / "bin" / "spark-submit" for place in places]
    for program in found:
        if os.access(program, os.X_OK) and program.is_file():
            return str(program)
    looked = ", ".join(map(str, found)) or "no $SPARK_HOME, and no pyspark in this environment"
    raise InvalidConfiguration(
        f"job {job.name!r}: there is no spark-submit ({looked}); name it with launcher.spark_submit, set SPARK_HOME, "
        "or install pyspark beside Stillstate"
    )


def _is_of_session(pid: int, leader: int) -> bool:
    """Whether a process belongs to the session that a start began: `spark-submit` starts the driver below itself."""
    try:
        return os.getsid(pid) == leader
    except (ProcessLookupError, PermissionError):
        return False


def _submission_of(process: psutil.Process) -> psutil.Process | None:
    """Return the `spark-submit` above a driver, if it lives."""
    try:
        parent = process.parent()
        if parent is None or is_over(parent) or SUBMIT_CLASS not in parent.cmdline():
            return None
    except psutil.Error:
        return None
    return parent
