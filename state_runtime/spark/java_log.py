"""Warnings of Spark's Java while a run reads, in Stillstate's log: bounded, each kind at its 1st, 10th, 100th … time.

`build_session` sets Spark's log level to ERROR, because Java warns in hundreds of lines where a driver needs one. But a
source that skips rows (`failOnDataLoss=false`), and the client of a broker that went away, only warn. So a run collects
the warnings of the driver's Java in memory and logs them through Python's logging; Java's own output does not change.
Rows that a source reports as skipped are counted.

Warnings of executors on other hosts are in their own logs, and are not counted.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from state_runtime.spark.internals import Internal, given
from state_runtime.spark.java_errors import shown
from state_runtime.spark.jvm import classes

__all__ = ["JavaWarnings", "WarningBook"]

_LOG = logging.getLogger(__name__)
_RECORD, _FIELD = "\x1e", "\x1f"
_PATTERN: Final = f"{_RECORD}%c{_FIELD}%m%ex{{none}}"
_NUMBERS = itertools.count(1)
KINDS_MAX: Final = 200
TAKEN_CHARS_MAX: Final = 1_000_000
# Java's buffer between two reads, about a second apart: enough for a source's warnings, and bounded against floods.
_RATE_PER_S, _BURST_MAX = 20.0, 500
_OTHERS: Final = "other kinds of warnings"

# For a CSV file without a header Spark shows the first of its rows as the header.
_ROW_SHOWN = re.compile(r" Header: .*")
_VARIES = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27,}|-?\d+")
# Numbers of Spark's structured logging come as `MDC[key=OFFSET, value=10]` where its texts were joined wrongly.
_NUMBER = r"(?:MDC\[key=\w+, value=)?(\d+)\]?"
_SKIPPED = re.compile(rf"records in\s*\[{_NUMBER},\s*{_NUMBER}[\])]|starts from {_NUMBER} instead of 0")

# A listed file that was removed before its batch was planned, or read; one that is damaged.
_FILE_SKIPPED = re.compile(
    r"^The directory .* was not found\. Was it deleted|^Skipped (?:missing file|the rest of the content in the corrupt)"
)


class WarningBook:
    """The warnings so far and how often each came. For any thread.

    Args:
        take: returns Java's warnings since the last call.
    """

    def __init__(self, take: Callable[[], str]) -> None:
        self._take = take
        self._lock = threading.Lock()
        self._seen: Counter[tuple[str, str]] = Counter()
        self._skipped = self._skipped_files = 0
        self._untold = 0

    def look(self) -> None:
        """Log new warnings."""
        with self._lock:
            for record in self._take().split(_RECORD)[1:]:
                logger, _, message = record.partition(_FIELD)
                self._hear(logger.rpartition(".")[2], " ".join(message.split()))

    def skipped_rows(self) -> int:
        """Return how many rows sources have reported as skipped since the last call."""
        self.look()
        with self._lock:
            untold, self._untold = self._untold, 0
        return untold

    def _hear(self, logger: str, message: str) -> None:
        rows = sum(_rows_of(*match.groups()) for match in _SKIPPED.finditer(message))
        self._skipped += rows
        self._untold += rows
        is_file = _FILE_SKIPPED.search(message) is not None
        self._skipped_files += is_file
        text = shown(_ROW_SHOWN.sub("", message))
        kind = (logger, _VARIES.sub("#", text))
        if kind not in self._seen and len(self._seen) >= KINDS_MAX:
            kind = (_OTHERS, "")
        self._seen[kind] += 1
        times = self._seen[kind]
        if not _is_told(times):
            return
        again = "" if times == 1 else f" ({times:,} times by now)"
        skipped = f"; {self._skipped:,} rows that are gone were passed over by now" if rows else ""
        if is_file:
            skipped = f"; rows of this file were passed over, as of {self._skipped_files:,} files by now"
        _LOG.warning("%s warns%s: %s%s", logger, again, text, skipped)


def _rows_of(first: str | None, end: str | None, before: str | None) -> int:
    return int(before) if before is not None else max(0, int(end or 0) - int(first or 0))


def _is_told(times: int) -> bool:
    """Return whether to log at this count: the first time, the tenth, the hundredth …"""
    return str(times).strip("0") == "1"


class JavaWarnings:
    """Collects the warnings of the driver's Java. Life cycle: `begin` → `take`* → `end`.

    Spark's log4j writes them to a buffer in Java's memory, with a bounded rate. Its printed output follows the
    session's log level as before. With another logging library nothing is collected, which is logged.
    """

    def __init__(self, writer: Any = None, undo: Callable[[], None] = lambda: None) -> None:
        self._writer = writer
        self._undo = undo

    @staticmethod
    def begin(spark: SparkSession) -> JavaWarnings:
        """Begin to collect. Never fails."""
        try:
            return given(Internal.JAVA_LOG, lambda: _collecting(spark), JavaWarnings)
        except Py4JError as error:
            _LOG.info("warnings of Spark's Java are not collected: %s", str(error).partition("\n")[0])
            return JavaWarnings()

    def take(self) -> str:
        """Return the text collected since the last call. Never fails: Java may have ended."""
        if self._writer is None:
            return ""
        try:
            buffer = self._writer.getBuffer()
            length = min(int(buffer.length()), TAKEN_CHARS_MAX)
            if not length:
                return ""
            text = str(buffer.substring(0, length))
            buffer.delete(0, length)
        except (Py4JError, OSError) as error:
            _LOG.debug("warnings of Spark's Java cannot be read: %s", error)
            return ""
        return text

    def end(self) -> None:
        """Restore Spark's logging. Never fails."""
        try:
            self._undo()
        except (Py4JError, OSError) as error:
            _LOG.debug("Spark's logging went with its Java: %s", error)
        self._writer, self._undo = None, lambda: None


def _collecting(spark: SparkSession) -> JavaWarnings:
    jvm = classes(spark)
    log4j = jvm.org.apache.logging.log4j
    warn, core = log4j.Level.WARN, log4j.core
    context = log4j.LogManager.getContext(False)
    config = context.getConfiguration()
    root, writer = config.getRootLogger(), jvm.java.io.StringWriter()
    name = f"stillstate-warnings-{next(_NUMBERS)}"  # log4j identifies appenders by it; two runs may share a session
    layout = core.layout.PatternLayout.newBuilder().withConfiguration(config).withPattern(_PATTERN).build()
    bounds = core.filter.BurstFilter.newBuilder().setLevel(warn).setRate(_RATE_PER_S).setMaxBurst(_BURST_MAX).build()
    ours = core.appender.WriterAppender.createAppender(layout, bounds, writer, name, False, True)
    ours.start()
    before = root.getLevel()
    # A level that lets warnings through prints them already; else the printing appenders keep the session's level.
    silent = {} if warn.isMoreSpecificThan(before) else dict(root.getAppenders())

    def set_printing(level: Any) -> None:
        for printing, appender in silent.items():
            root.removeAppender(printing)
            root.addAppender(appender, level, None)

    def undo() -> None:
        root.removeAppender(name)
        if silent and root.getLevel().equals(warn):
            root.setLevel(before)
        set_printing(None)
        context.updateLoggers()

    root.addAppender(ours, warn, None)
    if silent:
        set_printing(before)
        root.setLevel(warn)
    context.updateLoggers()
    return JavaWarnings(writer, undo)
