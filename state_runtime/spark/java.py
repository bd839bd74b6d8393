"""Find a Java that Spark 4 runs on, or say how to get one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from state_runtime.base.errors import MissingJava

__all__ = ["JAVA_VERSION_MIN", "java_version", "require_java"]

JAVA_VERSION_MIN = 17
_HOW = (
    "Spark 4 needs Java 17 or newer. Install it (Debian, Ubuntu: `apt-get install openjdk-17-jre-headless`; "
    "macOS: `brew install openjdk@17`; Fedora: `dnf install java-17-openjdk-headless`) or point JAVA_HOME to one"
)


def require_java() -> Path:
    """Return the java command that Spark will use.

    Raises:
        MissingJava: none, or too old; the message holds the command that installs one.
    """
    home = os.environ.get("JAVA_HOME")
    command = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if command is None or not Path(command).exists():
        where = f"JAVA_HOME={home} has no bin/java" if home else "there is no java on PATH and JAVA_HOME is not set"
        raise MissingJava(f"no Java: {where}. {_HOW}")
    try:
        printed = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=60, check=True).stderr
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingJava(f"{command} does not run: {error}. {_HOW}") from error
    version = java_version(printed)
    if version < JAVA_VERSION_MIN:
        raise MissingJava(f"{command} is Java {version}. {_HOW}")
    return Path(command)


def java_version(printed: str) -> int:
    """Return the major version in the output of `java -version`; 8 for "1.8.0"; 0 if it has none."""
    match = re.search(r'version "(\d+)(?:\.(\d+))?', printed)
    if match is None:
        return 0
    major = int(match.group(1))
    return int(match.group(2) or 0) if major == 1 else major


def main() -> int:
    """`python -m state_runtime.spark.java`: print the Java that Spark will use, or how to get one."""
    try:
        print(f"Java: {require_java()}")
    except MissingJava as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
