"""The versions of Spark that jobs run on, and the refusal of what no job runs on: older ones, and Spark Connect.

The range is here; setup.cfg repeats it for pip (tests/state_runtime/spark/test_versions.py compares them). What of a
version's internals is used is found by trying, and not by its number (spark/internals.py).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Final

import pyspark
from pyspark.sql import SparkSession

from state_runtime.base.errors import InvalidConfiguration

__all__ = [
    "NEWEST",
    "OLDEST",
    "check_session",
    "refuse_connect",
    "refuse_connect_settings",
    "refuse_old_version",
    "requirement",
]

_LOG = logging.getLogger(__name__)

OLDEST: Final = (4, 1)
NEWEST: Final = (4, 3)
"""The newest version that the tests ran with. Newer ones are tried, with a warning."""

_CONNECT: Final = "pyspark.sql.connect."


def requirement() -> str:
    """Return the range as pip takes it."""
    return f"pyspark>={_text(OLDEST)},<{NEWEST[0]}.{NEWEST[1] + 1}"


def check_session(spark: SparkSession) -> None:
    """Check the session that a job is given, before anything else is done with it. Warn if its Spark is newer than any
    that was tested, or if it is not the one that this Python has the package of.

    Raises:
        InvalidConfiguration: it is one of Spark Connect, or its Spark is too old.
    """
    refuse_connect(spark, "the session")
    here, there = pyspark.__version__, str(spark.version)
    refuse_old_version(here)
    refuse_old_version(there)
    if _minor(here) != _minor(there):
        _LOG.warning(
            "this Python has pyspark %s, and the session's Java runs Spark %s: Spark does not promise that the two "
            "work together. Install the pyspark of that Spark: pip install 'pyspark==%s'",
            here,
            there,
            there,
        )
    if (_minor(there) or NEWEST) > NEWEST:
        _LOG.warning(
            "Spark %s is newer than %s, the newest one that Stillstate is tested with. The job runs: each use of "
            "Spark's inside is tried first, and if it is not there, a warning says what happens without it. If "
            "something is wrong, go back: pip install '%s'",
            there,
            _text(NEWEST),
            requirement(),
        )


def refuse_old_version(installed: str = pyspark.__version__) -> None:
    """Refuse a version that jobs do not run on.

    Raises:
        InvalidConfiguration: it is older than the oldest one.
    """
    version = _minor(installed)
    if version is not None and version < OLDEST:
        raise InvalidConfiguration(
            f"Spark {installed} is installed, and jobs run on Spark {_text(OLDEST)} to {_text(NEWEST)}: pip install "
            f"'{requirement()}' (on a cluster, take one of these versions there as well), and start the job again"
        )


def refuse_connect(given: object, what: str) -> None:
    """Refuse a session, or a DataFrame of one, of Spark Connect.

    Args:
        what: it is, for the message.

    Raises:
        InvalidConfiguration: it is one.
    """
    if any(each.__module__.startswith(_CONNECT) for each in type(given).__mro__):
        raise _of_connect(f"{what} is one of Spark Connect")


def refuse_connect_settings(master: str, conf: Mapping[str, object]) -> None:
    """Refuse settings, and variables of this process, with which pyspark would make a session of Spark Connect.

    Raises:
        InvalidConfiguration: they ask for one.
    """
    mode = str(conf.get("spark.api.mode", os.environ.get("SPARK_API_MODE", "")))
    asks = {
        f"master {master}": master.startswith("sc://"),
        "the setting spark.remote": "spark.remote" in conf,
        "the variable SPARK_REMOTE": "SPARK_REMOTE" in os.environ,
        "spark.api.mode (or SPARK_API_MODE) = connect": mode.lower() == "connect",
    }
    found = next((name for name, is_asked in asks.items() if is_asked), None)
    if found is not None:
        raise _of_connect(f"{found} asks for a session of Spark Connect")


def _of_connect(found: str) -> InvalidConfiguration:
    return InvalidConfiguration(
        f"{found}, which shows a job neither the plans nor the Java process that its epochs are made with; use a "
        'session of this process, as build_session("name", "local[*]") makes it (a cluster: with its master, or under '
        "spark-submit)"
    )


def _minor(version: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version; None if it does not begin with them."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return None if match is None else (int(match[1]), int(match[2]))


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
