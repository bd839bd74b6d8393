"""Where Flink lies, and the command lines of its processes.

The PyPI package `apache-flink-libraries` carries Flink's jars but not its scripts, so what the scripts would do is done
here: the class path, and the sizes of memory, which Flink's own calculator prints.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["VERSION", "Distribution", "FlinkMissing", "found_distribution", "memory_of"]

VERSION = "2.3.0"
_ROOT = Path(__file__).resolve().parents[2]
_MAIN = {
    "jobmanager": "org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint",
    "taskmanager": "org.apache.flink.runtime.taskexecutor.TaskManagerRunner",
    "gateway": "org.apache.flink.table.gateway.SqlGateway",
}
_CALCULATOR = "org.apache.flink.runtime.util.bash.BashJavaUtils"
_QUESTION = {"jobmanager": "GET_JM_RESOURCE_PARAMS", "taskmanager": "GET_TM_RESOURCE_PARAMS"}
# As in the configuration file that Flink's own archive comes with.
_OPENED = (
    *("lang", "net", "io", "nio", "lang.reflect", "text", "time", "util", "util.concurrent"),
    *("util.concurrent.atomic", "util.concurrent.locks"),
)
_OPENS = [f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in _OPENED] + [
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED"
]


class FlinkMissing(RuntimeError):
    """Flink's jars are not where they should be; the message says what puts them there."""


@dataclass(frozen=True)
class Distribution:
    """Flink's jars.

    Attributes:
        package: folder of the installed package, with `lib`, `opt` and `bin`.
        extra: jars that the package does not have: Parquet, the SQL gateway, Hadoop's client.
    """

    package: Path
    extra: tuple[Path, ...]

    @property
    def classpath(self) -> str:
        """All jars of a process, in an order that does not depend on the disk."""
        return ":".join(str(jar) for jar in (*sorted((self.package / "lib").glob("*.jar")), *self.extra))

    def command(self, role: str, conf: Path, log4j: Path) -> list[str]:
        """The command line of a process: `jobmanager`, `taskmanager` or `gateway`."""
        java = [str(shutil.which("java")), *_OPENS, f"-Dlog4j.configurationFile={log4j}"]
        if role == "gateway":
            # It finds its configuration by the environment.
            return [*java, "-Xmx512m", "-cp", self.classpath, _MAIN[role]]
        jvm, dynamic = memory_of(self._calculated(role, conf))
        return [*java, *jvm, "-cp", self.classpath, _MAIN[role], "--configDir", str(conf), *dynamic]

    def _calculated(self, role: str, conf: Path) -> str:
        jars = [self.package / "bin" / "bash-java-utils.jar", *sorted((self.package / "lib").glob("flink-dist-*.jar"))]
        command = [str(shutil.which("java")), "-cp", ":".join(map(str, jars)), _CALCULATOR, _QUESTION[role]]
        done = subprocess.run(
            [*command, "--configDir", str(conf)], capture_output=True, text=True, check=False, timeout=60
        )
        if done.returncode:
            raise FlinkMissing(f"Flink cannot tell the memory of its {role}: {done.stderr.strip()}")
        return done.stdout


def memory_of(printed: str) -> tuple[list[str], list[str]]:
    """What the calculator printed: the JVM's arguments, and the process's own.

    Raises:
        FlinkMissing: it printed something else.
    """
    found: Sequence[str] = re.findall(r"^BASH_JAVA_UTILS_EXEC_RESULT:(.*)$", printed, re.MULTILINE)
    if len(found) != 2:
        raise FlinkMissing(f"Flink's calculator printed {len(found)} results, not two: is it Flink {VERSION}?")
    return found[0].split(), found[1].split()


def found_distribution(folder: Path = _ROOT / ".venv-flink") -> Distribution:
    """The distribution in an environment that `make bench-flink` made.

    Raises:
        FlinkMissing: it is not there, or not whole.
    """
    import pyspark

    packages = [path for path in folder.glob("lib/python*/site-packages/pyflink") if (path / "lib").is_dir()]
    # Flink's Parquet format needs Hadoop's classes; PySpark has them.
    hadoop = sorted(Path(pyspark.__file__).parent.glob("jars/hadoop-client-*.jar"))
    extra = (*sorted(folder.glob("jars/*.jar")), *hadoop)
    if not packages or len(extra) < 4:
        raise FlinkMissing(f"Flink {VERSION} is not in {folder}; `make bench-flink` puts it there")
    if not shutil.which("java"):
        raise FlinkMissing("there is no java on the path; `make java` says what is missing")
    return Distribution(packages[0], extra)
