"""The settings of a Spark session that change what a pipeline computes: read, recorded in manifests, and compared.

Spark records in a checkpoint only the settings of its own state stores and the policy of watermarks. A query that goes
on under another time zone or another ANSI mode computes other values from there on, without a word: state of before and
rows of now no longer fit each other. So a manifest names the values of its run, and a start under others is refused
unless they are accepted.

Pure but for `result_settings`, which asks the session. docs/design/0054-session-settings.md says why each setting is
here, and why others are not.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkException

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.pipeline.spark_settings import TIME_ZONE_CONF

__all__ = ["ALWAYS", "WHERE_SET", "changed_settings", "refuse_other_settings", "result_settings", "same_zone"]

_LOG = logging.getLogger(__name__)

ALWAYS: Final = (
    TIME_ZONE_CONF,
    "spark.sql.timestampType",
    "spark.sql.legacy.timeParserPolicy",
    "spark.sql.ansi.enabled",
    "spark.sql.ansi.doubleQuotedIdentifiers",
    "spark.sql.caseSensitive",
    "spark.sql.decimalOperations.allowPrecisionLoss",
    "spark.sql.mapKeyDedupPolicy",
    "spark.sql.parser.escapedStringLiterals",
    "spark.sql.columnNameOfCorruptRecord",
    "spark.sql.jsonGenerator.ignoreNullFields",
    "spark.sql.streaming.multipleWatermarkPolicy",
)
"""Recorded with the value that counts, whether it was set or is Spark's default."""

WHERE_SET: Final = (
    "spark.sql.execution.pythonUDF.arrow.enabled",
    "spark.sql.execution.pythonUDF.pandas.intToDecimalCoercionEnabled",
    "spark.sql.execution.pythonUDF.pandas.preferIntExtensionDtype",
    "spark.sql.execution.pandas.convertToArrowArraySafely",
    "spark.sql.execution.pandas.structHandlingMode",
)
"""Recorded only if they were set: their defaults differ between the versions of Spark, and the move from one version to
the next is the user's decision already. The same holds for everything that begins with `spark.sql.legacy.`."""

_LEGACY: Final = "spark.sql.legacy."
_NOT_SET: Final = "not set"
_OFFSET = re.compile(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::?([0-5]\d))?\Z")
_AT_ZERO: Final = {"Z", "UTC", "GMT", "UT"}
_HOUR_S, _QUARTER_S = 3600, 900


class _Settings(Protocol):
    def get(self, key: str) -> str | None: ...

    @property
    def getAll(self) -> Mapping[str, str]: ...


def result_settings(settings: _Settings) -> dict[str, str]:
    """Return the settings of a session that change results, with their values.

    Args:
        settings: `SparkSession.conf`. A setting that this version of Spark does not have is left out.
    """
    found: dict[str, str] = {}
    for name in ALWAYS:
        try:
            value = settings.get(name)
        except PySparkException:
            _LOG.debug("this version of Spark has no %s", name)
            continue
        if value is not None:
            found[name] = str(value)
    given = {name: str(value) for name, value in settings.getAll.items()}
    return {**found, **{n: v for n, v in given.items() if n in WHERE_SET or n.startswith(_LEGACY)}}


def changed_settings(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of the settings with another meaning than before, in order.

    A setting of `ALWAYS` that only one of the two has is not known in the other, and is not compared: that version of
    Stillstate did not record it, or that version of Spark does not have it. Any other is not set there.
    """
    return sorted(name for name in before.keys() | now.keys() if not _is_same(name, before.get(name), now.get(name)))


def refuse_other_settings(
    snapshot_id: int, before: Mapping[str, str], now: Mapping[str, str], *, job: str, accept: bool
) -> None:
    """Refuse a start under settings that would make other results of the same rows.

    Args:
        before: of the snapshot to go on from; empty if it recorded none, and then nothing is refused.
        accept: go on under the settings of now; what differs is logged.

    Raises:
        InvalidConfiguration: nothing was written; the message names each setting and both values.
    """
    names = changed_settings(before, now) if before else []
    if not names:
        return
    told = "; ".join(f"{name} was {_shown(before.get(name))} and is {_shown(now.get(name))}" for name in names)
    if accept:
        _LOG.warning(
            "job %r goes on from snapshot %d under other settings of the session, as accepted: %s. State of before and "
            "rows of now may not fit each other: a day, a key or an amount may have two rows",
            job,
            snapshot_id,
            told,
        )
        return
    raise InvalidConfiguration(
        f"job {job!r}: snapshot {snapshot_id} was made under other settings of the Spark session, which change what "
        f"the same rows give: {told}. Nothing was changed. Set them as they were (in stillstate.yaml under spark: "
        "conf:, or where the session is built); or, if state of before and rows of now fit each other, accept them "
        "once with --accept-session-settings (accept_session_settings=True)"
    )


def same_zone(one: str, other: str) -> bool:
    """Return whether two names of time zones give each moment since 1900 the same local time, as UTC and Etc/UTC."""
    one, other = _plain(one), _plain(other)
    if one == other:
        return True
    try:
        return all(np.array_equal(_local(one, moments), _local(other, moments)) for moments in _moments())
    except pa.ArrowInvalid:
        return False  # a name that only Java knows, and not equal as a text


def _is_same(name: str, before: str | None, now: str | None) -> bool:
    if before is None or now is None:
        return name in ALWAYS
    if name == TIME_ZONE_CONF:
        return same_zone(before, now)
    return before.casefold() == now.casefold()  # "True" and "legacy" are what Spark takes "true" and "LEGACY" for


def _shown(value: str | None) -> str:
    return _NOT_SET if value is None else repr(value)


def _plain(zone: str) -> str:
    """Return Java's forms of a fixed offset as the one that Arrow knows: `GMT+2` as `+02:00`."""
    if zone in _AT_ZERO:
        return "+00:00"
    found = _OFFSET.match(zone)
    if found is None:
        return zone
    sign, hours, minutes = found.groups(default="00")
    return "+00:00" if int(hours) == int(minutes) == 0 else f"{sign}{int(hours):02}:{minutes}"


def _moments() -> Iterable[pa.Array]:
    """Yield moments so close to each other that a change of the clocks between two is seen: since 1970 each quarter of
    an hour, before each hour."""
    for first, last, step_s in (("1970", "2038", _QUARTER_S), ("1900", "1970", _HOUR_S)):
        begin, end = (np.datetime64(year, "s").astype("int64") for year in (first, last))
        yield pa.array(np.arange(begin, end, step_s), pa.int64()).cast(pa.timestamp("s", "UTC"))


def _local(zone: str, moments: pa.Array) -> np.ndarray:
    return np.asarray(pc.local_timestamp(moments.cast(pa.timestamp("s", zone))).cast(pa.int64()))
