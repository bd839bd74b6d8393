"""Which files of a folder Spark's own file source takes, told without Spark; only where that is certain.

Spark lists a folder's files; if they lie in folders such as `day=2026-01-02` also those below, and else no others.
Names that begin with `_` or `.` are hidden. What is not so plain (patterns, filters, mixed folders, the log of a sink
of Spark's) is not told of.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

__all__ = ["NAMES_MAX", "Listed", "kept_ms_of", "listed", "local_folder"]

NAMES_MAX: Final = 100_000
"""Names in one listing: half a second of a core on a local disk."""
_KEPT_MS: Final = 7 * 86_400_000
"""Spark's default of `maxFileAge`: older than the newest that it has read, by so much, is never read."""
_UNSURE: Final = frozenset(
    {
        "recursivefilelookup",
        "pathglobfilter",
        "modifiedbefore",
        "modifiedafter",
        "filenameonly",
        "basepath",
        "maxfileage",
    }
)
"""Options by which Spark takes other files."""
_PATTERN: Final = frozenset("[]{}*?\\")
_SINK_LOG: Final = "_spark_metadata"


@dataclass(frozen=True, slots=True)
class Listed:
    """A file that Spark takes."""

    bytes: int
    modified_ms: int


def local_folder(options: Mapping[str, str], scheme_of: Callable[[str], str | None]) -> str | None:
    """Return the folder that a file source reads, if it is one of this machine's and is listed as this module says.

    Args:
        options: of the source, with keys in lower case.
        scheme_of: returns the scheme of the file system that a path without one is of; None: unknown.
    """
    path = options.get("path", "")
    parts = urlsplit(path)
    if not path or parts.scheme not in ("", "file") or parts.netloc or _UNSURE & options.keys():
        return None
    if _PATTERN & set(path) or options.get("cleansource", "off").lower() != "off":
        return None
    if not parts.scheme and scheme_of(path) != "file":
        return None
    return os.path.abspath(unquote(parts.path) if parts.scheme else path)


def kept_ms_of(options: Mapping[str, str]) -> int | None:
    """Return by how much a file may be older than the newest one that was read; None: by any time."""
    is_limited = "maxfilespertrigger" in options or "maxbytespertrigger" in options
    return None if is_limited and options.get("latestfirst", "false").lower() == "true" else _KEPT_MS


def listed(folder: str, names_max: int = NAMES_MAX) -> dict[str, Listed] | None:
    """List the files of a folder by their names below it; None: too many names, or it is not certain which Spark takes.

    Raises:
        OSError: it cannot be listed.
    """
    found: dict[str, Listed] = {}
    for count, (name, entry) in enumerate(_walk(folder), 1):
        is_summary = name.rpartition("/")[2].startswith(("_metadata", "_common_metadata"))
        if count > names_max or name == _SINK_LOG or is_summary or not _is_text(name):
            return None
        if entry is not None:
            found[name] = entry
    inside = {name.rpartition("/")[0] for name in found} - {""}
    parts = [part for path in inside for part in path.split("/")]
    if not any("=" in part for part in parts):
        return {name: file for name, file in found.items() if "/" not in name}
    if not all(0 < part.find("=") < len(part) - 1 for part in parts) or len({path.count("/") for path in inside}) > 1:
        return None
    return found


def _is_text(name: str) -> bool:
    """Return whether a name is one that Java writes as Python does."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _walk(folder: str, below: str = "") -> Iterator[tuple[str, Listed | None]]:
    """Yield the names in a folder and below, each file with its size and time, without the hidden ones."""
    with os.scandir(os.path.join(folder, below)) as entries:
        for entry in entries:
            name = f"{below}/{entry.name}" if below else entry.name
            if name == _SINK_LOG or not _is_hidden(entry.name):
                try:
                    is_folder, status = entry.is_dir(), entry.stat()
                except FileNotFoundError:
                    continue
                if is_folder:
                    yield name, None
                    if name != _SINK_LOG:
                        yield from _walk(folder, name)
                else:
                    yield name, Listed(status.st_size, status.st_mtime_ns // 1_000_000)


def _is_hidden(name: str) -> bool:
    is_hidden = (name.startswith("_") and "=" not in name) or name.startswith(".") or name.endswith("._COPYING_")
    return is_hidden and not name.startswith(("_metadata", "_common_metadata"))
