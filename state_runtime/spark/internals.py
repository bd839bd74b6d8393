"""The only access to internals of pyspark and Spark, and the fallback for each.

Each use is an `Internal`. If a version of pyspark or Spark has other internals, a public way is used, or a loss is
logged. `spark/probes.py` tries all of them when a run begins; `docs/spark-internals.md` lists them. A refused internal
stays refused for the rest of the process, which has one pyspark and one Spark.

No other module uses pyspark names that begin with an underscore: tests/test_tidy.py.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from typing import Any, Final, TypeVar

import pyspark
from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark.errors import PySparkException

__all__ = ["INTERNALS", "Internal", "Internals", "given", "private", "private_of"]

_LOG = logging.getLogger(__name__)
_CALLING: Final = "An error occurred while calling"

Answer = TypeVar("Answer")


class Internal(Enum):
    """A use of an internal; its value says what happens without it."""

    PLANS = "the plan of a stream is read from what DataFrame.explain prints"
    OPTIMIZED_PLANS = "all columns of the source are read"
    REBUILT_PLANS = "Spark's own watermark stays in the plan of the stream"
    WATERMARK_TRACKER = "a watermark that Spark alone can observe is refused"
    JOB_COUNT = "each transform is taken for one that runs a Spark job"
    PREPARED_FRAMES = "epochs take longer: each is planned in more calls of Spark's Java than need be"
    QUERY_PLANS = "plain queries are refused; pipelines that are written in steps go on"
    REBOUND_PLANS = "epochs take longer: each is planned from the start"
    SOURCE_OPTIONS = "cleanSource and path patterns are not noticed: leave cleanSource off beside a checkpoint interval"
    PATH_PATTERNS = "a source path that no file fits is not warned of, and of a folder it is not told how much waits"
    JAVA_EXCEPTIONS = "causes of Spark's errors are read from their text"
    JAVA_LOG = "warnings of Spark's Java are not collected"
    JAVA_START = "Spark's Java starts when the session is built, not beside the driver's own start"
    JAVA_END = "no archive of Java's classes can be made, so drivers start slower"
    CHECKSUM_FILES = "Spark writes a checksum file beside each local file"
    ACCUMULATOR_SERVER = "pyspark prints a traceback when Spark's Java process ends first"
    ARROW_TYPES = "types of Arrow and Spark are matched by a table of the common ones"


class Internals:
    """The uses that were refused in this process. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused: set[Internal] = set()
        self._probed: set[Internal] = set()

    def is_refused(self, internal: Internal) -> bool:
        """Return whether to use the public way."""
        return internal in self._refused

    def refuse(self, internal: Internal, error: Exception) -> None:
        """Use the public way from now on, and log this once. A Java that has ended proves nothing about its version."""
        if _is_of_ended_java(error):
            return
        with self._lock:
            if internal in self._refused:
                return
            self._refused.add(internal)
        _LOG.warning(
            "%s: Spark %s is made in another way inside than those that Stillstate knows (%s: %s). See "
            "docs/spark-internals.md",
            internal.value,
            pyspark.__version__,
            type(error).__name__,
            (str(error).splitlines() or [""])[0],
        )

    def begin_probe(self, internal: Internal) -> bool:
        """Return whether the use is still untried; then the caller tries it."""
        with self._lock:
            is_new = internal not in self._probed
            self._probed.add(internal)
            return is_new


INTERNALS: Final = Internals()
"""The instance of this process."""


def given(internal: Internal, inner: Callable[[], Answer], public: Callable[[], Answer]) -> Answer:
    """Return the result of the inner way; that of the public way if the inner one is refused, now or earlier.

    A Java exception, and the error of a Java that has ended, are no refusal: they are raised.
    """
    if not INTERNALS.is_refused(internal):
        try:
            return inner()
        except (AttributeError, TypeError, ImportError, Py4JError) as error:
            if not _is_refusal(error):
                raise
            INTERNALS.refuse(internal, error)
    return public()


def _is_refusal(error: Exception) -> bool:
    """Return whether an error says that an internal is missing, rather than that its call failed: pyspark refuses a
    value with its own error, which may be a TypeError as well."""
    return not isinstance(error, (Py4JJavaError, PySparkException)) and not _is_of_ended_java(error)


def _is_of_ended_java(error: Exception) -> bool:
    if type(error) is Py4JError:
        # An interrupted call, where Java's own refusals come with its trace; or an object of an ended Java.
        is_call = str(error).startswith(_CALLING) and "Trace:" not in str(error)
        return is_call or "Target Object ID does not exist" in str(error)
    return isinstance(error, Py4JNetworkError)


_read: Final = getattr
"""A test replaces it to refuse all internals."""


def private(owner: object, name: str) -> Any:
    """Return an attribute that pyspark marks as private.

    Raises:
        AttributeError: this version has none.
    """
    return _read(owner, name)


def private_of(module: str, name: str) -> Any:
    """Return an undocumented member of a pyspark module.

    Raises:
        ImportError, AttributeError: this version has none.
    """
    return private(import_module(module), name)
