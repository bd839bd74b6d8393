"""The log of files that a source has seen, on the store: streamed, one bounded object after the other.

It grows with the input for as long as the job lives, so it is never all in memory: readers get texts of one or more
lines, and writers cut their lines into objects that a reader accepts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from state_runtime.base.limits import SOURCE_LOG_PART_BYTES_MAX

__all__ = ["cut_lines", "joined_texts", "source_log_path"]


def source_log_path(snapshot_id: int, writer: str, number: int, source: int) -> str:
    """Return the path of a file of the log.

    Args:
        number: counts the files of one source that a writer writes for one snapshot.
    """
    unique = f"{snapshot_id:020d}-{writer}" + (f"-{number}" if number else "")
    return f"tables/_sources/{unique}/source-{source}.log"


def joined_texts(texts: Iterable[str], bytes_max: int = SOURCE_LOG_PART_BYTES_MAX) -> Iterator[bytes]:
    """Yield the bodies of the files that hold these texts, in order.

    A body is larger than `bytes_max` only if it is a single text.

    Args:
        texts: one or more lines each.
    """
    gathered: list[bytes] = []
    size = 0
    for text in texts:
        body = text.encode()
        if gathered and size + len(body) + 1 > bytes_max:
            yield b"\n".join(gathered)
            gathered, size = [], 0
        gathered.append(body)
        size += len(body) + 1
    if gathered:
        yield b"\n".join(gathered)


def cut_lines(lines: Iterable[str], bytes_max: int = SOURCE_LOG_PART_BYTES_MAX) -> Iterator[list[str]]:
    """Yield the lines in order, in groups of about `bytes_max` bytes at most."""
    group: list[str] = []
    size = 0
    for line in lines:
        # A character has at most four bytes; counting them is cheaper than encoding each line.
        if group and size + 4 * len(line) > bytes_max:
            yield group
            group, size = [], 0
        group.append(line)
        size += len(line.encode()) + 1
    if group:
        yield group
