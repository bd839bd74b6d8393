"""The section `launcher` of a job: how its driver process is started, on this machine or through `spark-submit`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from state_runtime.base.settings import SettingsGroup
from stillstate.orchestration.config.sections import ConfValue

__all__ = ["LauncherSpec", "contradictions", "secret_values", "with_absolute_paths"]

LIST_MAX: Final = 1000
"""Files that a submission ships, and arguments that it adds: far more than a person writes."""

_SAID_BY: Final = {
    "--master": "launcher.master",
    "--deploy-mode": "launcher.deploy_mode",
    "--conf": "launcher.conf, which is not on the command line",
    "-c": "launcher.conf, which is not on the command line",
    "--properties-file": "launcher.conf",
    "--extra-properties-file": "launcher.conf",
    "--load-spark-defaults": "nothing: Spark's defaults are loaded anyway",
    "--py-files": "launcher.py_files",
    "--archives": "launcher.archives",
    "--files": "launcher.files",
}
_NOT_A_START: Final = frozenset({"--class", "--name", "--kill", "--status", "--supervise", "--help", "-h", "--version"})
_CONF_SAID_BY: Final = {
    "spark.master": "launcher.master",
    "spark.submit.deployMode": "launcher.deploy_mode",
    "spark.submit.pyFiles": "launcher.py_files",
    "spark.archives": "launcher.archives",
    "spark.files": "launcher.files",
}
_SECRET_KEY = re.compile(r"(?i)secret|password|token|access[.]?key|credential")
"""Spark's own `spark.redaction.regex`, and one more word."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_ONLY_LOCAL: Final = ("restarts", "standby", "prepare")
_ONLY_SUBMITTED: Final = (
    "master",
    "deploy_mode",
    "conf",
    "py_files",
    "archives",
    "files",
    "submit_args",
    "spark_submit",
)


def _submit_argument(value: str) -> str:
    name = value.split("=", 1)[0]
    if name in _SAID_BY:
        raise PydanticCustomError("said_elsewhere", "{name} is said by {key}", {"name": name, "key": _SAID_BY[name]})
    if name in _NOT_A_START:
        raise PydanticCustomError("not_ours", "{name} does not go with a driver that Stillstate starts", {"name": name})
    return value


def _conf_key(value: str) -> str:
    if value in _CONF_SAID_BY:
        raise PydanticCustomError(
            "said_elsewhere", "{name} is said by {key}", {"name": value, "key": _CONF_SAID_BY[value]}
        )
    return value


Shipped = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^,\x00-\x1f]+$")]
"""A path or URL; Spark separates several by commas."""


class LauncherSpec(SettingsGroup):
    """How a driver process is started."""

    kind: Literal["local", "spark-submit"] = "local"
    """What starts the driver: `local` starts it on this machine, `spark-submit` hands it to a cluster."""
    restarts: int = Field(default=3, ge=0, le=50)
    """`local`: how often in a row, without a new checkpoint, a process beside the driver starts it again in place when
    it dies, before Dagster does. 0: there is no such process."""
    standby: bool | Literal["auto"] = "auto"
    """`local`: a second driver process stands by, with Java and Spark's session ready, and replaces one that dies: most
    of a restart is done by then. It takes the memory of an idle driver. `auto`: if half of the machine's memory, and 4
    GiB, are free behind the driver's first checkpoint."""
    prepare: bool = True
    """`local`: behind a job's first checkpoint, the process beside the driver makes the host's drivers start faster, as
    `stillstate prepare` does, if that was not done yet and memory is left: once, for about a minute, with low
    priority."""
    log_dir: str = Field(default="logs", min_length=1)
    """Folder for log files of drivers of this machine, and of submissions."""
    start_timeout_s: float = Field(default=120.0, gt=0, le=3600)
    """A driver that does not run by then is ended, if it is on this machine. Raise it for a cluster in which drivers
    wait in a queue."""
    stop_timeout_s: float = Field(default=120.0, gt=0, le=86_400)
    """How long `stillstate stop` waits for the end of the epoch."""
    master: str = Field(default="", max_length=4096)
    """`spark-submit`: the cluster's master: `spark://…`, `yarn`, `k8s://https://…`."""
    deploy_mode: Literal["client", "cluster"] = "client"
    """`spark-submit`: `client` runs the driver on this machine, `cluster` (YARN, Kubernetes; never run) in the
    cluster."""
    conf: dict[Annotated[str, AfterValidator(_conf_key)], ConfValue] = Field(default={}, repr=False)
    """`spark-submit`: Spark settings over `spark.conf`. They go through a file that only this user can read, not onto
    the command line."""
    py_files: list[Shipped] = Field(default=[], max_length=LIST_MAX)
    """`spark-submit`: Python files and zip files that are shipped to the driver and its executors and imported from."""
    archives: list[Shipped] = Field(default=[], max_length=LIST_MAX)
    """`spark-submit`: archives that are shipped and unpacked, `env.tar.gz#env` as `env`."""
    files: list[Shipped] = Field(default=[], max_length=LIST_MAX)
    """`spark-submit`: other files that are shipped."""
    submit_args: list[Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_submit_argument)]] = Field(
        default=[], max_length=LIST_MAX
    )
    """`spark-submit`: more of its arguments, such as `--queue`."""
    spark_submit: str = Field(default="", max_length=4096)
    """The program. Empty: that of `$SPARK_HOME`, else of PySpark in this environment."""

    @property
    def drives_elsewhere(self) -> bool:
        """Whether the driver is a process of the cluster."""
        return self.kind == "spark-submit" and self.deploy_mode == "cluster"


def contradictions(launcher: LauncherSpec) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield values that are valid alone but not together: the key, and the problem."""
    given = launcher.model_fields_set
    foreign = _ONLY_SUBMITTED if launcher.kind == "local" else _ONLY_LOCAL
    for key in foreign:
        if key in given:
            other = "spark-submit" if launcher.kind == "local" else "local"
            yield (key,), f"is of `kind: {other}`; this launcher is of `kind: {launcher.kind}`"
    if launcher.standby is True and not launcher.restarts:
        yield ("standby",), "needs `restarts`: the process beside the driver, which calls the one that stands by"
    if launcher.kind == "local":
        return
    if not launcher.master:
        yield (
            ("master",),
            "`kind: spark-submit` needs the master, for example spark://host:7077, yarn or k8s://https://…",
        )
    elif launcher.deploy_mode == "cluster" and launcher.master.startswith("spark://"):
        yield (
            ("deploy_mode",),
            "a standalone cluster does not run Python drivers, Spark refuses them; use `client`, or YARN or Kubernetes",
        )
    elif launcher.deploy_mode == "cluster" and not launcher.master.startswith(("yarn", "k8s://")):
        yield ("deploy_mode",), f"`cluster` needs a master yarn or k8s://…; it is {launcher.master}"


def with_absolute_paths(launcher: LauncherSpec, folder: Path) -> LauncherSpec:
    """Return the section with paths below the folder of its file; also default paths."""
    return launcher.model_copy(
        update={
            "log_dir": _absolute(launcher.log_dir, folder),
            "spark_submit": _absolute(launcher.spark_submit, folder) if launcher.spark_submit else "",
            **{key: _all_absolute(getattr(launcher, key), folder) for key in ("py_files", "archives", "files")},
        }
    )


def _all_absolute(paths: list[str], folder: Path) -> list[str]:
    return [_absolute(path, folder) for path in paths]


def _absolute(path: str, folder: Path) -> str:
    # `local:/opt/…` is a place in the image, `env.tar.gz#env` has a name after the path: both are kept.
    return path if _SCHEME.match(path) else os.path.normpath(folder / Path(path).expanduser())


def secret_values(conf: Mapping[str, str]) -> list[str]:
    """Return the values of secret Spark settings, by the names that Spark itself hides."""
    return [value for key, value in conf.items() if _SECRET_KEY.search(key)]
