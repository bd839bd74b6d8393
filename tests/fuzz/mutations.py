"""Damage: to bytes, and to the structure inside of valid documents, so that it comes past their digests.

Every choice goes through `Choose`, which hypothesis or atheris stand behind: they shrink, and learn from coverage.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

Choose = Callable[[int], int]
"""A number from 0 up to, without, the given one."""

MUTATIONS_MAX = 3
_DEEP: Any = []
for _ in range(150):
    _DEEP = [_DEEP]
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 10**30, -(10**19), 1.5, 1e308,
    "", "x", "0" * 20, "../x", "/x", "a//b", "s3://other/x", "x" * 2000, "\x00", "ä", "\ud83d", "count", "`n` int", "`n`", "<<<<<", "array<" * 50,
    [], {}, [[]], [1, 2], {"a": 1}, _DEEP, ["x"] * 500,
)  # fmt: skip
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF_FFFF, 0xFFFF_FFFF, (1 << 63) - 1, (1 << 64) - 1)


def damaged_bytes(data: bytes, choose: Choose) -> bytes:
    """A few changes of the kind that disks, networks and people make."""
    body = bytearray(data)
    for _ in range(1 + choose(MUTATIONS_MAX)):
        at = choose(len(body) + 1)
        length = 1 + choose(64)
        operation = choose(7)
        if operation == 0 and at < len(body):
            body[at] ^= 1 << choose(8)
        elif operation == 1:
            del body[at:]
        elif operation == 2:
            del body[at : at + length]
        elif operation == 3:
            body[at:at] = body[at : at + length]
        elif operation == 4:
            body[at : at + length] = bytes(length)
        elif operation == 5:
            width = (1, 2, 4, 8)[choose(4)]
            extreme = EXTREMES[choose(len(EXTREMES))] & ((1 << 8 * width) - 1)
            body[at : at + width] = extreme.to_bytes(width, ("big", "little")[choose(2)])
        else:
            other = choose(len(body) + 1)
            body[at : at + length] = body[other : other + length]
    return bytes(body)


def damaged_value(value: Any, choose: Choose) -> Any:
    """A JSON value of which a few places hold something else, are missing, or are there twice."""
    value = copy.deepcopy(value)
    for _ in range(1 + choose(MUTATIONS_MAX)):
        places = _places(value)
        if not places:
            return copy.deepcopy(HOSTILE[choose(len(HOSTILE))])
        holder, key = places[choose(len(places))]
        operation = choose(4)
        if operation == 0:
            del holder[key]
        elif operation == 1 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif operation == 1:
            holder[f"{key}x"] = holder[key]
        elif operation == 2:
            other, other_key = places[choose(len(places))]
            holder[key] = copy.deepcopy(other[other_key])
        else:
            holder[key] = copy.deepcopy(HOSTILE[choose(len(HOSTILE))])
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(found) < 5000:
        here = waiting.pop()
        for key in list(here) if isinstance(here, dict) else range(len(here)) if isinstance(here, list) else ():
            found.append((here, key))
            waiting.append(here[key])
    return found


def json_bytes(value: Any) -> bytes:
    """As a writer would, but of anything."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("utf-8", "surrogatepass")
