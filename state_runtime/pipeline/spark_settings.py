"""Spark session settings that a job honours, and those that it cannot honour, which it names in a warning at start."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from state_runtime.base.limits import MIB

__all__ = [
    "SHUFFLE_PARTITIONS_CONF",
    "TIME_ZONE_CONF",
    "PieceBounds",
    "SessionSettings",
    "session_settings",
    "shuffles_as_wide_as_the_job",
]

SHUFFLE_PARTITIONS_CONF: Final = "spark.sql.shuffle.partitions"
TIME_ZONE_CONF: Final = "spark.sql.session.timeZone"
_SHUFFLE_PARTITIONS_DEFAULT: Final = "200"

_LOG = logging.getLogger(__name__)

_FRAME_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_FRAME_ROWS_DEFAULT, _UNLIMITED = 10_000, 2**31 - 1
_PIECE_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_PIECE_BYTES_DEFAULT = 64 * MIB
_ENCODING = "spark.sql.streaming.stateStore.encodingFormat"

_NOT_HONOURED = (
    (
        "spark.sql.streaming.noDataMicroBatches.enabled",
        "true",
        "timers and windows that fall due are still run in an epoch of their own, without waiting for rows",
    ),
    (
        _PIECE_BYTES,
        str(_UNLIMITED),
        f"frames and batches are bounded in rows only; set {_FRAME_ROWS} for the frames of pandas processors",
    ),
)
"""Name, the value that requests nothing, and what happens instead."""


class _Settings(Protocol):
    def get(self, key: str, default: str | None = None) -> str | None: ...


class _ChangeableSettings(_Settings, Protocol):
    def set(self, key: str, value: str) -> None: ...

    def unset(self, key: str) -> None: ...


@dataclass(frozen=True)
class SessionSettings:
    """The settings that a pipeline takes from the session.

    Attributes:
        time_zone: the zone in which user code sees timestamps.
        frame_rows_max: rows of one frame of a pandas processor.
        is_avro: whether Spark would store its state as Avro, which refuses columns that cannot be null.
    """

    time_zone: str = ""
    frame_rows_max: int = _FRAME_ROWS_DEFAULT
    is_avro: bool = False


def session_settings(settings: _Settings) -> SessionSettings:
    """Read the settings of a session, and warn of each one that is set but has no effect here."""
    for name, neutral, instead in _NOT_HONOURED:
        value = settings.get(name, neutral) or neutral
        if _bytes_plain(value) != neutral:
            _LOG.warning("%s=%s has no effect on this job: %s", name, value, instead)
    rows_max = int(settings.get(_FRAME_ROWS, str(_FRAME_ROWS_DEFAULT)) or _FRAME_ROWS_DEFAULT)
    return SessionSettings(
        time_zone=settings.get(TIME_ZONE_CONF) or "",  # unset, the machine's zone
        frame_rows_max=rows_max if rows_max > 0 else _UNLIMITED,
        is_avro=(settings.get(_ENCODING, "unsaferow") or "").lower() == "avro",
    )


@dataclass
class PieceBounds:
    """The choice whether the pieces in which Spark hands rows to Python are bounded in bytes as well as in rows.

    Spark 4.3 bounds a piece by 64 MiB. For this it adds up the sizes of all columns' buffers after each row: a fifth of
    its tasks' work for rows of four numbers (docs/design/0037-handover.md). If the rows of the last batch were so
    narrow that a piece with the maximum number of rows takes at most a quarter of that bound, Spark is asked to count
    rows only. The first two batches of a run are bounded in bytes, and so are batches that begin after a batch with
    wider rows. So a piece exceeds Spark's bound only if rows become four times as wide from one batch to the next, and
    only in two batches.

    Life cycle: made with the run → before each batch `ask` → after it `seen`.

    Attributes:
        rows_max: maximum rows of a piece; None: the bounds stay as they are.
    """

    rows_max: int | None
    _by_rows: bool = False
    _is_asked: bool = False

    @staticmethod
    def of(settings: _Settings, *, hands_only_its_own: bool) -> PieceBounds:
        """Make the bounds from the session. A number of bytes other than Spark's default was set on purpose and stays.

        Args:
            hands_only_its_own: see `CompiledPipeline`; the width of other rows is not known.
        """
        rows_max = int(settings.get(_FRAME_ROWS, str(_FRAME_ROWS_DEFAULT)) or _FRAME_ROWS_DEFAULT)
        wanted = settings.get(_PIECE_BYTES, str(_PIECE_BYTES_DEFAULT)) or str(_PIECE_BYTES_DEFAULT)
        is_default = _bytes_plain(wanted) == str(_PIECE_BYTES_DEFAULT)
        return PieceBounds(rows_max if hands_only_its_own and rows_max > 0 and is_default else None)

    def ask(self, settings: _ChangeableSettings) -> None:
        """Set the bound for the next batch, if it differs from that of the last one.

        Args:
            settings: of the session in which Spark runs batches. Spark has already configured this batch's tasks: the
                setting takes effect from the next batch on.
        """
        if self._by_rows == self._is_asked:
            return
        settings.set(_PIECE_BYTES, str(_UNLIMITED if self._by_rows else _PIECE_BYTES_DEFAULT))
        self._is_asked = self._by_rows

    def seen(self, row_bytes: int) -> None:
        """Record the row width of a batch.

        Args:
            row_bytes: bytes per row in memory, of the batch's widest piece; 0: the batch had no rows.
        """
        if self.rows_max is not None and row_bytes > 0:
            self._by_rows = row_bytes * self.rows_max <= _PIECE_BYTES_DEFAULT // 4


@contextmanager
def shuffles_as_wide_as_the_job(settings: _ChangeableSettings, parallelism: int) -> Iterator[None]:
    """While a run lasts, shuffle a user's `transform` into as many partitions as the job has shards, where the session
    has Spark's default: that default is 200 tasks for each epoch's few rows, as adaptive execution is off."""
    explicit = settings.get(SHUFFLE_PARTITIONS_CONF, None)
    if explicit not in (None, _SHUFFLE_PARTITIONS_DEFAULT):
        yield
        return
    settings.set(SHUFFLE_PARTITIONS_CONF, str(parallelism))
    try:
        yield
    finally:
        try:
            if explicit:
                settings.set(SHUFFLE_PARTITIONS_CONF, explicit)
            else:
                settings.unset(SHUFFLE_PARTITIONS_CONF)
        except Exception:
            _LOG.debug("the session has gone, and its settings with it", exc_info=True)


def _bytes_plain(value: str) -> str:
    """Return a value in the form in which it is compared: Spark may add a unit to a number of bytes."""
    return value.lower().removesuffix("b")
