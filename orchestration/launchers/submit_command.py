"""The command line and the properties of `spark-submit`; pure.

Spark settings may hold passwords, and every user of the machine can read command lines: so settings go through a
separate file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from stillstate.orchestration.config.spec import JobSpec

__all__ = ["APPLICATION", "CONF_SUFFIX", "driver_conf", "properties_text", "submit_command", "submit_properties"]

APPLICATION: Final = Path(__file__).resolve().parents[1] / "submitted.py"
CONF_SUFFIX: Final = ".conf"

_IN_CLUSTER: Final[Mapping[str, str]] = {
    # The submission is done once the cluster has the driver; the driver's heartbeat reports its health.
    "spark.yarn.submit.waitAppCompletion": "false",
    "spark.kubernetes.submission.waitAppCompletion": "false",
    # Restarts are decided in one place, which knows of attempts, pauses and causes.
    "spark.yarn.maxAppAttempts": "1",
}


def driver_conf(job: JobSpec) -> dict[str, str]:
    """Return the Spark settings of the job's own driver, wherever it runs."""
    return {**job.spark.conf, **job.launcher.conf}


def submit_properties(job: JobSpec, python: str) -> dict[str, str]:
    """Return all Spark settings of a submission.

    Args:
        python: the interpreter of this environment, which runs a driver of this machine.
    """
    if job.launcher.deploy_mode == "cluster":
        return {**_IN_CLUSTER, **driver_conf(job)}
    # `spark.pyspark.python` may be one in an archive, which only executors unpack.
    return {"spark.pyspark.driver.python": python, **driver_conf(job)}


def submit_command(
    job: JobSpec, config: Path, *, program: str, properties_file: Path, cause: str, options: Sequence[str]
) -> list[str]:
    """Return the command line.

    Args:
        program: `spark-submit`.
        options: of `stillstate run`.
    """
    launcher = job.launcher
    in_cluster = launcher.deploy_mode == "cluster"
    # The file is shipped with a driver that runs elsewhere, into its working folder.
    files = [*([str(config)] if in_cluster else []), *launcher.files]
    return [
        program,
        *("--master", launcher.master, "--deploy-mode", launcher.deploy_mode, "--name", job.name),
        *("--properties-file", str(properties_file), "--load-spark-defaults"),
        *_shipped("--py-files", launcher.py_files),
        *_shipped("--archives", launcher.archives),
        *_shipped("--files", files),
        *launcher.submit_args,
        str(APPLICATION),
        *(("--cause", cause) if cause else ()),
        *("run", job.name, "--config", config.name if in_cluster else str(config), "--log-file", "-"),
        *options,
    ]


def properties_text(properties: Mapping[str, str]) -> str:
    """Return the text for Java's `Properties`: one setting a line, with any characters."""
    return "".join(f"{_escaped(key, key=True)}={_escaped(value)}\n" for key, value in sorted(properties.items()))


def _shipped(option: str, paths: Sequence[str]) -> tuple[str, ...]:
    return (option, ",".join(paths)) if paths else ()


def _escaped(text: str, *, key: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    if key:
        for sign in " :=#!":
            text = text.replace(sign, f"\\{sign}")
    return text
