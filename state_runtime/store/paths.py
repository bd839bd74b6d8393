"""Paths of objects: relative to the store's root, and nothing else; pure."""

from __future__ import annotations

import re

from state_runtime.base.errors import CorruptData
from state_runtime.base.limits import PATH_CHARS_MAX

__all__ = ["check_relative_path"]

_VALUE = r"(?:[A-Za-z0-9_.\-\u0080-\U0010ffff]|%[0-9A-F]{2})+"
_SEGMENT = re.compile(rf"(?:[A-Za-z0-9._=-]+|{_VALUE}={_VALUE})\Z")
"""Characters beyond ASCII and `%` codes only in folders named by a value: `town=Köln` (pipeline/partitions.py)."""


def check_relative_path(path: str) -> str:
    """Return `path` if it is a plain relative path below the job root; any other path is hostile or damaged.

    Raises:
        CorruptData: absolute, with a scheme, with `.` or `..`, with empty parts, too long, or with characters that
            Stillstate never writes. Nothing is opened before this check.
    """
    parts = path.split("/")
    if len(path) > PATH_CHARS_MAX or not path or any(p in ("", ".", "..") or not _SEGMENT.match(p) for p in parts):
        raise CorruptData(
            f"path {path[:120]!r} is not a plain relative path; it was not opened. "
            "The file that names it was altered: restore it from a copy of the job root"
        )
    return path
