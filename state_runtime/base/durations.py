"""Durations as people write them; pure. One parser, two spellings.

The command line takes the short spelling (`90s`, `1.5h`), pipelines take Spark's (`1 hour 30 minutes`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Final

from state_runtime.base.errors import InvalidConfiguration, InvalidPipeline

__all__ = ["parse_duration_s", "parse_duration_us"]

_US: Final = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}
# A century: a longer duration is a mistake, and times plus durations stay far from the ends of a long.
DURATION_US_MAX: Final = 36_525 * _US["day"]


@dataclass(frozen=True)
class _Spelling:
    """One way to write durations.

    Attributes:
        part: matches a number and its unit; the groups are sign, digits, digits of the fraction, unit.
        units_us: microseconds by unit, in lower case.
        fractions_of: units whose number may have a fraction.
    """

    part: re.Pattern[str]
    units_us: Mapping[str, int]
    fractions_of: frozenset[str]


_SHORT_US: Final = {
    "s": _US["second"],
    "m": _US["minute"],
    "min": _US["minute"],
    "h": _US["hour"],
    "d": _US["day"],
    "w": _US["week"],
    "y": 365 * _US["day"],
}
_SHORT: Final = _Spelling(
    part=re.compile(r"()([0-9]{1,18})(?:\.([0-9]{1,18}))?([a-z]+)\Z"),
    units_us=MappingProxyType(_SHORT_US),
    fractions_of=frozenset(_SHORT_US),
)
_SPARK: Final = _Spelling(
    part=re.compile(r"\s*([+-]?)(\d{1,18})(?:\.(\d{1,6}))?\s+([a-z]+)(?!\S)", re.IGNORECASE),
    units_us=MappingProxyType(_US | {f"{name}s": us for name, us in _US.items()}),
    fractions_of=frozenset({"second", "seconds"}),
)


def parse_duration_s(text: str) -> float:
    """Parse `90s`, `15min`, `6h`, `7d`, `2w`, `1y` to seconds.

    Raises:
        InvalidConfiguration: the text is not a duration of this spelling.
    """
    try:
        return float(_total_us(text, _SHORT) / _US["second"])
    except _Refused as error:
        raise InvalidConfiguration(
            f"{text[:40]!r} is not a duration; write for example 90s, 15min, 6h, 7d, 2w or 1y"
        ) from error


def parse_duration_us(text: str) -> int:
    """Parse a duration to microseconds: weeks, days, hours, minutes, seconds (1.5 too), milliseconds, microseconds.

    Raises:
        InvalidPipeline: any other text, also months and years, whose length is not fixed.
    """
    where = f"the duration {text!r}"
    rest = re.sub(r"^\s*interval\s", "", text, flags=re.IGNORECASE).strip() if isinstance(text, str) else ""
    try:
        total = int(_total_us(rest, _SPARK))
    except _Refused as error:
        raise InvalidPipeline(f"{where} {error}") from error
    if abs(total) > DURATION_US_MAX:
        raise InvalidPipeline(f"{where} is longer than a century")
    return total


class _Refused(Exception):
    """The text is not a duration; the message follows the words "the duration …"."""


def _total_us(text: str, spelling: _Spelling) -> Fraction:
    """Return the sum of all parts of a text."""
    if not text:
        raise _Refused('is empty; write a number and a unit, as in "10 seconds"')
    total, at = Fraction(0), 0
    while at < len(text):
        part = spelling.part.match(text, at)
        if part is None:
            raise _Refused('is not understood; write numbers and units, as in "1 hour 30 minutes"')
        sign, whole, fraction, name = part.groups()
        unit = name.lower()
        if unit not in spelling.units_us:
            known = ", ".join(f"{unit}s" for unit in _US)
            raise _Refused(f"has the unit {name!r}; there are {known}")
        if fraction and unit not in spelling.fractions_of:
            raise _Refused("has a fraction that is not of seconds; write a whole number, or take a smaller unit")
        number = int(whole) + Fraction(int(fraction or "0"), 10 ** len(fraction or ""))
        total += (-number if sign == "-" else number) * spelling.units_us[unit]
        at = part.end()
    return total
