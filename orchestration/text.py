"""Numbers, sizes and places formatted for people; pure."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from state_runtime.base.clock import time_text

__all__ = ["age_text", "bytes_text", "count_text", "counted_text", "duration_text", "redacted_location", "time_text"]


def count_text(value: float) -> str:
    """`12,345`; small fractions keep one digit."""
    return f"{value:,.1f}" if isinstance(value, float) and 0 < abs(value) < 10 else f"{value:,.0f}"


def counted_text(count: int, noun: str) -> str:
    """`1 job`, `2,000 jobs`"""
    return f"{count_text(count)} {noun}" + ("" if count == 1 else "s")


def bytes_text(value: int) -> str:
    """`1.2 MiB`"""
    size = float(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{value} B"


def duration_text(seconds: float) -> str:
    """`3.2 s`, `4 min 5 s`, `2 h 3 min`, `5 d 2 h`"""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for size, unit, smaller_size, smaller in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller_size} {smaller}"
    return f"{whole} s"


def age_text(seconds: float) -> str:
    """`9 s`, `4 min`, `2 h`, `5 d`: for a column; the seconds are shown elsewhere."""
    whole = int(seconds)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if whole >= size:
            return f"{whole // size} {unit}"
    return f"{whole} s"


def redacted_location(url: str) -> str:
    """Return a store location without user, password and parameters: a second safeguard, since the schema refuses
    them."""
    if "://" not in url:
        return url
    parts = urlsplit(url)
    host = (parts.hostname or "") + (f":{parts.port}" if parts.port else "")
    return urlunsplit((parts.scheme, host, parts.path, "", ""))
