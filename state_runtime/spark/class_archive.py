"""An archive of the classes that Spark's Java loads at a start, so that the next start maps them instead of reading and
checking some 20,000 of them again: Java's application class-data sharing (JEP 310, JEP 350).

It belongs to this host, this user, one Java, one set of jars and one class path. Its name has a key of these, and the
digest of its bytes. Java checks Java, jars and class path once more, and starts without an archive that does not fit.
`orchestration/running/prepare.py` makes it.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyspark
import xxhash

from state_runtime.state.sealed_files import check_private_folder

__all__ = [
    "JAVA_OPTIONS",
    "archive_folder",
    "archive_key",
    "archive_name",
    "archives_of",
    "find_archive",
    "with_archive",
]

JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_OF_THE_CLASS_PATH: Final = ("SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_DIST_CLASSPATH")
_OWN_CHOICE: Final = ("-Xshare", "-XX:SharedArchiveFile", "-XX:ArchiveClassesAtExit")


def archive_folder() -> Path:
    """Return the folder of this user's archives: `stillstate/java` of the user's cache folder (XDG Base Directory)."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "stillstate" / "java"


def archive_key(java: Path) -> str:
    """Return the key of an archive: a Java, and this environment's Spark and class path; 32 hexadecimal digits.

    Args:
        java: its command.

    Raises:
        OSError: there is no Spark here.
    """
    home = java.resolve().parent.parent
    jars = _spark_home() / "jars"
    of_jars = [(j.name, j.stat().st_size, j.stat().st_mtime_ns) for j in sorted(jars.iterdir())]
    release = home / "release"
    known = (
        str(home),
        release.read_text(errors="replace") if release.exists() else str(java.resolve().stat().st_mtime_ns),
        str(jars.resolve()),
        of_jars,
        [os.environ.get(name, "") for name in _OF_THE_CLASS_PATH],
    )
    return hashlib.sha256(repr(known).encode()).hexdigest()[:32]


def _spark_home() -> Path:
    """Return where pyspark finds Spark: `SPARK_HOME`, or beside pyspark, in `spark-distribution` for another Hadoop."""
    if chosen := os.environ.get("SPARK_HOME"):
        return Path(chosen)
    beside = Path(pyspark.__file__).parent
    return next((home for home in (beside / "spark-distribution", beside) if (home / "jars").is_dir()), beside)


def archive_name(key: str, archive: Path) -> str:
    """Return the name under which an archive is trusted: its key, and the XXH3-128 of its bytes."""
    return f"{key}-{_check_of(archive)}.jsa"


def find_archive(key: str) -> Path | None:
    """Return the archive of this key that is intact, and that only this user can have written.

    Java maps the file without a check: a truncated one ends the process. So all of it is read here (0.1 s for 190 MB).
    """
    folder = archive_folder()
    try:
        check_private_folder(folder)
    except (OSError, ValueError):
        return None
    return next((found for found in archives_of(folder, key) if _is_intact(found, key)), None)


def archives_of(folder: Path, key: str) -> list[Path]:
    """Return all files whose names say that they are archives of a key."""
    return sorted(folder.glob(f"{key}-*.jsa"))


def _is_intact(archive: Path, key: str) -> bool:
    try:
        status = archive.lstat()
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
        return is_own and archive.name == archive_name(key, archive)
    except (OSError, ValueError):  # gone by now, empty, unreadable
        return False


def _check_of(archive: Path) -> str:
    with pa.memory_map(str(archive)) as mapped:
        return xxhash.xxh3_128_hexdigest(mapped.read_buffer())


def with_archive(conf: Mapping[str, str], java: Path) -> dict[str, str]:
    """Return a session's settings with the archive, if there is one; the caller's own choice of an archive is kept."""
    own = conf.get(JAVA_OPTIONS, "")
    if any(option in own for option in _OWN_CHOICE):
        return dict(conf)
    try:
        archive = find_archive(archive_key(java))
    except (OSError, RuntimeError):  # no Spark here, or no home: Java starts as it always did
        return dict(conf)
    if archive is None:
        return dict(conf)
    # An archive that does not fit is useless and harmless: Java must not log it.
    options = f"-Xshare:auto {shlex.quote(f'-XX:SharedArchiveFile={archive}')} -Xlog:cds*=off"
    return {**conf, JAVA_OPTIONS: f"{own} {options}".strip()}
