"""When Dagster acts by itself, as `stillstate.yaml` specifies it: cron lines, and `auto`."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError

__all__ = ["Period", "Schedule", "cron_of", "is_cron", "is_due"]

_CRON_RANGES: Final = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_CRON_PART = re.compile(r"(?:\*|(?P<low>\d{1,2})(?:-(?P<high>\d{1,2}))?)(?:/(?P<step>\d{1,2}))?")


def is_cron(line: str) -> bool:
    """Whether a line is five fields of numbers, ranges, lists and steps, each within its bounds.

    Checked here and not by Dagster, so that a bad line is an error with file and line, and the command line need not
    load Dagster.
    """
    cron_fields = line.split()
    return len(cron_fields) == len(_CRON_RANGES) and all(
        _is_cron_part(part, low, high)
        for field, (low, high) in zip(cron_fields, _CRON_RANGES)
        for part in field.split(",")
    )


def _is_cron_part(part: str, low: int, high: int) -> bool:
    match = _CRON_PART.fullmatch(part)
    if match is None or (match["step"] is not None and int(match["step"]) == 0):
        return False
    if match["low"] is None:
        return True
    first = int(match["low"])
    return low <= first <= int(match["high"] or first) <= high


def is_due(line: str, at: tuple[int, int, int, int, int]) -> bool:
    """Whether a cron line means this minute. If both day and weekday are given, one match is enough, as in cron.

    Args:
        line: one that `is_cron` takes.
        at: minute, hour, day, month, weekday (0 is Sunday), in the line's zone.
    """
    fields = line.split()
    minute, hour, day, month, weekday = (_values(field, *ends) for field, ends in zip(fields, _CRON_RANGES))
    weekday = {value % 7 for value in weekday}
    of_month, of_week = at[2] in day, at[4] in weekday
    is_day = of_month or of_week if "*" not in (fields[2], fields[4]) else of_month and of_week
    return at[0] in minute and at[1] in hour and at[3] in month and is_day


def _values(field: str, first: int, last: int) -> set[int]:
    found: set[int] = set()
    for part in field.split(","):
        match = _CRON_PART.fullmatch(part)
        if match is None:
            raise ValueError(f"{part[:20]!r} is no part of a cron line")
        low = first if match["low"] is None else int(match["low"])
        # `5/10` is every tenth from the fifth on.
        high = last if match["low"] is None or (match["step"] and not match["high"]) else int(match["high"] or low)
        found.update(range(low, high + 1, int(match["step"] or 1)))
    return found


Period = Literal["six_hours", "night", "week"]

_DAY_MIN: Final = 24 * 60
_SIX_HOURS_MIN: Final = 6 * 60
_NIGHT: Final = (1, 4)
"""First hour (UTC) and number of hours: nightly work begins in them."""


def _schedule(value: str) -> str:
    if value in ("auto", "off") or is_cron(value):
        return value
    raise PydanticCustomError(
        "schedule",
        "must be `off`, `auto`, or a cron line of five fields, for example `0 3 * * *` for every night at 3:00 UTC",
    )


# YAML 1.1 reads a bare `off` as false.
Schedule = Annotated[
    str,
    BeforeValidator(lambda value: "off" if value is False else value, json_schema_input_type=str | Literal[False]),
    AfterValidator(_schedule),
]


def cron_of(schedule: str, period: Period, job: str) -> str | None:
    """Return the cron line (UTC) of a schedule; None if it is off.

    `auto` is once in a period, at a different time for each job: a hundred jobs do not begin in the same minute.
    """
    if schedule != "auto":
        return None if schedule == "off" else schedule
    number = int.from_bytes(hashlib.sha256(f"{period}:{job}".encode()).digest()[:8], "big")
    if period == "six_hours":
        minute, first = number % 60, number // 60 % (_SIX_HOURS_MIN // 60)
        hours = ",".join(str(hour) for hour in range(first, _DAY_MIN // 60, _SIX_HOURS_MIN // 60))
        return f"{minute} {hours} * * *"
    first, hours_many = _NIGHT
    minute, hour, day = number % 60, first + number // 60 % hours_many, number // (60 * hours_many) % 7
    return f"{minute} {hour} * * {day if period == 'week' else '*'}"
