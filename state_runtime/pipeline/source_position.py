"""The source position: from Spark's own checkpoint directory into the manifest, and back into a fresh directory.

Spark's checkpoint directory is scratch on the driver's disk. Every snapshot holds what the directory says about the
sources. A run that starts from a snapshot primes a fresh directory, so that Spark resumes right after the snapshot's
batch. A source keeps one of two things in `sources/<i>/`:

    a log of seen files     of a file source; it grows with the input. Its new lines go into the changelog
    other small files       a rate source's time of creation, Kafka's first offsets, files of connectors: carried
                            byte for byte

Tried on Spark 4.1.4, 4.2.1 and 4.3.0; the files are described in docs/format.md.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

from state_runtime.base.errors import CorruptData, InvalidData, StillstateError
from state_runtime.base.limits import (
    KIB,
    SMALL_JSON_BYTES_MAX,
    SOURCE_FILES_BYTES_MAX,
    SOURCE_FILES_MAX,
    SOURCE_LOG_BYTES_MAX,
    SOURCE_LOG_TOTAL_BYTES_MAX,
)
from state_runtime.pipeline.source_names import PLAIN, SourceNumbers
from state_runtime.snapshot.manifest import SourceFile, SourcePosition
from state_runtime.spark.java_errors import removed_scratch
from state_runtime.store.paths import check_relative_path

__all__ = [
    "COMPACT_INTERVAL",
    "COMPACT_INTERVAL_CONF",
    "BatchClock",
    "SparkCheckpoint",
    "log_offset_of",
    "same_offsets",
]

_LOG = logging.getLogger(__name__)
_LOG_VERSION = "v1"
# `str.isdigit` accepts digits that `int` refuses, and digits of other scripts.
_NUMBER = re.compile(r"[0-9]{1,19}\Z")
COMPACT_INTERVAL_CONF = "spark.sql.streaming.fileSource.log.compactInterval"
COMPACT_INTERVAL = 10
"""Number of entries after which Spark compacts a log of seen files, unless `COMPACT_INTERVAL_CONF` is set."""
_COMPACT = re.compile(r"([0-9]+)\.compact\Z")
_BLOCK_BYTES = 64 * KIB
# In a line of the log; the path is the path of a URI.
_PATTERN_PATH = re.compile(r'"path":\s*"([^"]*(?:[\[\]{}*?]|%5[BCDbcd]|%7[BDbd]|%3[Ff]|%2[Aa])[^"]*)"')


@dataclass(frozen=True)
class BatchClock:
    """The times that Spark fixed for a batch before it ran."""

    batch_time_ms: int
    watermark_ms: int


class SparkCheckpoint:
    """Spark's checkpoint directory of one run, on the driver's local disk.

    Attributes:
        compact_interval: Spark's setting `COMPACT_INTERVAL_CONF`. Spark computes the names of compacted files from it,
            so a primed log must have them where this interval puts them.
        numbers: of Spark's sources in snapshots. What is read from the directory has these, and so has what it is
            primed with.
    """

    def __init__(self, folder: Path, compact_interval: int = COMPACT_INTERVAL, numbers: SourceNumbers = PLAIN) -> None:
        self.folder = folder
        self.compact_interval = compact_interval
        self.numbers = numbers
        self._warned: set[int] = set()

    def prime(self, position: SourcePosition, logs: Mapping[int, Iterable[str]]) -> None:
        """Write the files from which Spark resumes after `position.batch_id`.

        Args:
            logs: per file source its log of seen files, oldest first; each text is one or more lines.

        Raises:
            CorruptData: the log does not belong to the position. OSError: the disk cannot be written.
        """
        (self.folder / "offsets").mkdir(parents=True)
        (self.folder / "commits").mkdir()
        (self.folder / "metadata").write_text(position.metadata)
        batch = position.batch_id
        if batch > 0:
            (self.folder / "offsets" / str(batch - 1)).write_text(self.numbers.by_place(position.previous_offsets))
        (self.folder / "offsets" / str(batch)).write_text(self.numbers.by_place(position.offsets))
        (self.folder / "commits" / str(batch)).write_text(position.commit)
        for number, texts in logs.items():
            if not self.numbers.is_read(number):
                continue
            folder = self._folder_of(number)
            folder.mkdir(parents=True)
            write_source_log(folder, texts, _log_offset(position.offsets, number), self.compact_interval)
        for file in position.files:
            number_text, _, name = check_relative_path(file.path).partition("/")
            if not self.numbers.is_read(int(number_text)):
                continue
            path = self._folder_of(int(number_text)) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(file.content))

    def clock(self, batch_id: int) -> BatchClock:
        """Return batch time and watermark of a batch that Spark has planned."""
        header = self._offsets(batch_id).split("\n")[1]
        values = json.loads(header)
        return BatchClock(int(values["batchTimestampMs"]), int(values["batchWatermarkMs"]))

    def position(self, batch_id: int) -> SourcePosition:
        """Return the position after a batch, for the manifest. Stillstate decides the batch's commit, so the entry for
        Spark's commit log is made here.

        Raises:
            InvalidData: a source keeps more files or bytes than a snapshot can carry.
        """
        offsets = self._numbered_offsets(batch_id)
        watermark_ms = json.loads(offsets.split("\n")[1])["batchWatermarkMs"]
        sources = self._sources()
        logs = [n for n in sources if is_file_source(_offset(offsets, n), self._folder_of(n))]
        small = self._small_files([n for n in sources if n not in logs], offsets)
        return SourcePosition(
            batch_id=batch_id,
            metadata=_read(self.folder / "metadata"),
            offsets=offsets,
            previous_offsets=self._numbered_offsets(batch_id - 1) if batch_id > 0 else "",
            commit=f'{self._commit_version(batch_id)}\n{{"nextBatchWatermarkMs":{watermark_ms}}}',
            logs=tuple(sorted((*logs, *self.numbers.absent_logs))),
            files=(*small, *self.numbers.absent_files),
            names=self.numbers.names,
            away=self.numbers.away,
        )

    def new_log_lines(self, before: SourcePosition | None, after: SourcePosition) -> dict[int, list[str]]:
        """Return per file source the lines of its log that are new since `before`. It reads only the new lines.

        Raises:
            CorruptData: the log is not as Spark writes it. ScratchRemoved: files of a source are gone.
            InvalidData: a source has seen more files than can be kept, or Spark may have read files of the batch twice.
        """
        if before is not None and (removed := _keeping(before) - _keeping(after)):
            # Without its log a file source reads all its files again after the next restart.
            raise removed_scratch(str(self._folder_of(min(removed))))
        new: dict[int, list[str]] = {}
        for source in after.logs:
            first = _log_offset(before.offsets, source) + 1 if before is not None else 0
            last = _log_offset(after.offsets, source)
            lines: list[str] = []
            for entry in range(first, last + 1):
                lines.extend(self._log_entry(source, entry))
            if lines:
                _refuse_read_twice(lines)
                new[source] = lines
        return new

    def _offsets(self, batch_id: int) -> str:
        return _read(self.folder / "offsets" / str(batch_id))

    def _numbered_offsets(self, batch_id: int) -> str:
        return self.numbers.by_number(self._offsets(batch_id))

    def _folder_of(self, number: int) -> Path:
        """Return Spark's folder of a source that the pipeline reads."""
        return self.folder / "sources" / str(self.numbers.place(number))

    def _commit_version(self, batch_id: int) -> str:
        """Return the version line of this session's commit log; a primed directory must use the same."""
        previous = self.folder / "commits" / str(batch_id - 1)
        return _read(previous).split("\n", 1)[0] if previous.exists() else _LOG_VERSION

    def _sources(self) -> list[int]:
        """Return the numbers of the sources that have a folder in the checkpoint directory."""
        folder = self.folder / "sources"
        if not folder.is_dir():
            return []
        return sorted(self.numbers.number(int(p.name)) for p in folder.iterdir() if _NUMBER.match(p.name))

    def _small_files(self, sources: Iterable[int], offsets: str) -> tuple[SourceFile, ...]:
        found: list[SourceFile] = []
        size = 0
        for source in sources:
            folder = self._folder_of(source)
            for path in sorted(islice(_files_below(folder), SOURCE_FILES_MAX + 1)):
                name = f"{source}/{path.relative_to(folder).as_posix()}"
                try:
                    body = _read_bytes(path, SOURCE_FILES_BYTES_MAX - size)
                    check_relative_path(name)
                except CorruptData as error:
                    raise _cannot_be_carried(source, offsets, name) from error
                size += len(body)
                found.append(SourceFile(name, base64.b64encode(body).decode()))
                if len(found) > SOURCE_FILES_MAX:
                    raise _cannot_be_carried(source, offsets, name)
        return tuple(found)

    def seen_lines(self, place: int, after: int, until: int) -> Iterator[str]:
        """Yield the lines of a file source's log of the entries behind one, up to another that Spark has planned.

        Args:
            place: of the source in Spark's plan.

        Raises:
            CorruptData, StillstateError: the log is not as Spark writes it, or was removed. OSError: it cannot be read.
        """
        folder = self.folder / "sources" / str(place)
        is_there = any((folder / name).exists() for name in (str(after + 1), f"{after + 1}.compact"))
        compacts = [int(found[1]) for path in folder.iterdir() if (found := _COMPACT.match(path.name))]
        newest = max((number for number in compacts if number <= until), default=-1)
        if newest > after and not is_there:  # Spark removes entries some time after they were compacted
            with (folder / f"{newest}.compact").open() as file:
                _check_version(folder, next(file, "").rstrip("\n"))
                yield from (line for line in map(str.rstrip, file) if line and _entry_of(line) > after)
            after = newest
        for entry in range(after + 1, until + 1):
            yield from self._log_entry(self.numbers.number(place), entry)

    def _log_entry(self, source: int, entry: int) -> list[str]:
        folder = self._folder_of(source)
        plain = folder / str(entry)
        if plain.exists():
            return _lines(plain)
        compact = folder / f"{entry}.compact"
        if compact.exists():
            self._check_total(source, compact)
            return _newest_lines(compact, entry)
        raise StillstateError(
            f"Spark's log of seen files has no entry {entry} for source {source} in {folder}; its layout is not the "
            "one of Spark 4.1 to 4.3 (is spark.sql.streaming.fileSource.log.* set?), or a cleaner of temporary files "
            "removed it (set scratch_dir to a folder that none visits)"
        )

    def _check_total(self, source: int, compact: Path) -> None:
        """Refuse a compacted file that is too large: it lists all files ever seen, and each restart writes it."""
        size = compact.stat().st_size
        advice = (
            "Spark reads and writes this whole list whenever it compacts it. Collect the input into fewer, larger "
            "files before the job reads them"
        )
        if size > SOURCE_LOG_TOTAL_BYTES_MAX:
            raise InvalidData(
                f"the names of the files that source {source} has seen take {size:,} bytes, more than the "
                f"{SOURCE_LOG_TOTAL_BYTES_MAX:,} that a job can keep. {advice}"
            )
        if size > SOURCE_LOG_TOTAL_BYTES_MAX // 2 and source not in self._warned:
            self._warned.add(source)
            _LOG.warning(
                "the names of the files that source %d has seen take %d bytes, more than half of the %d that a job can "
                "keep. %s",
                source,
                size,
                SOURCE_LOG_TOTAL_BYTES_MAX,
                advice,
            )


def _keeping(position: SourcePosition) -> set[int]:
    """Return the numbers of the sources that have a log or files in a position."""
    return {*position.logs, *(int(file.path.partition("/")[0]) for file in position.files)}


def _refuse_read_twice(lines: list[str]) -> None:
    """Refuse a batch of several files if the name of one is a pattern.

    Spark expands the names of a batch, so a file is read for its own name and for each pattern that matches it.

    Raises:
        InvalidData: names the file and the remedy.
    """
    found = _PATTERN_PATH.search("\n".join(lines)) if len(lines) > 1 else None
    if found is not None:
        raise InvalidData(
            f"the input file {unquote(found[1])} has one of the characters [ ] {{ }} * ? \\ in its path, and came in a "
            f"batch of {len(lines)} files. Spark takes such a name for a pattern, and may have read files of the batch "
            "more than once. Nothing of the batch was committed. Start the job with the source's option "
            "maxFilesPerTrigger=1, with which each file is a batch of its own, or rename the file"
        )


def write_source_log(folder: Path, texts: Iterable[str], last: int, interval: int) -> None:
    """Write a file source's log as Spark lays it out: up to the newest multiple of the interval one compacted file,
    then one file per entry.

    Old lines are copied as they are; only texts with entries after the compacted file are parsed.

    Args:
        texts: the log, oldest first; each text is one or more lines.
        last: number of the newest entry; -1 if the log is empty.

    Raises:
        CorruptData: it has lines beyond `last`, or more than a log can have. OSError: the disk cannot be written.
    """
    compacted = (last + 1) // interval * interval - 1
    newer: dict[int, list[str]] = {entry: [] for entry in range(compacted + 1, last + 1)}
    with (folder / ".compacting").open("wb") as file:
        file.write(_LOG_VERSION.encode())
        size = 0
        for text in texts:
            body, size = text.encode(), size + len(text)
            if size > SOURCE_LOG_TOTAL_BYTES_MAX + SOURCE_LOG_BYTES_MAX:
                raise CorruptData(f"the log of seen files for {folder} has more than {size:,} bytes")
            if body and _entry_of(text.rpartition("\n")[2]) > compacted:
                body = _sorted_out(text, newer, compacted)
            if body:
                file.write(b"\n" + body)
    if compacted < 0:
        (folder / ".compacting").unlink()
    else:
        (folder / ".compacting").rename(folder / f"{compacted}.compact")
    for entry, lines in newer.items():
        (folder / str(entry)).write_text("\n".join([_LOG_VERSION, *lines]))


def _sorted_out(text: str, newer: dict[int, list[str]], compacted: int) -> bytes:
    """Put the lines of newer entries into `newer`, and return the others, for the compacted file."""
    old = []
    for line in text.split("\n"):
        entry = _entry_of(line)
        if entry <= compacted:
            old.append(line)
        elif entry in newer:
            newer[entry].append(line)
        else:
            raise CorruptData(
                f"the log of seen files has entry {entry}, and the position of its source ends before it: "
                "they are not of one snapshot"
            )
    return "\n".join(old).encode()


def is_file_source(offset: Any, folder: Path) -> bool:
    """Return whether a source is a file source: its offset is an entry's number and its folder holds a log of files.

    A Kafka topic may be called `logOffset`, and a connector may number its own files, so neither test is enough alone.

    Args:
        offset: the source's offset, parsed; None if it has none yet.
        folder: `sources/<i>` of Spark's checkpoint directory.
    """
    if log_offset_of(offset) is None:
        return False
    names = [p.name for p in folder.iterdir() if p.name.isdigit() or _COMPACT.match(p.name)]
    if not names:
        return False
    with (folder / max(names, key=lambda name: int(name.partition(".")[0]))).open("rb") as file:
        head = file.read(_BLOCK_BYTES).decode(errors="replace")
    version, _, rest = head.partition("\n")
    # An unknown version is refused where the log is read; to ignore the log would read all files again.
    return version != _LOG_VERSION or not rest or rest.startswith('{"path":')


def same_offsets(left: str, right: str) -> bool:
    """Return whether two texts of an offsets file describe the same input; times and settings may differ."""
    return left.split("\n")[2:] == right.split("\n")[2:]


def _offset(offsets: str, source: int) -> Any:
    """Return the parsed offset of a source; None if it has none yet, or it is not JSON."""
    lines = offsets.split("\n")[2:]
    if source >= len(lines) or lines[source] == "-":
        return None
    try:
        return json.loads(lines[source])
    except ValueError:
        return None


def log_offset_of(offset: Any) -> int | None:
    """Return the log's newest entry if this can be a file source's offset; for a Kafka topic the value is an object."""
    if isinstance(offset, dict) and list(offset) == ["logOffset"] and type(offset["logOffset"]) is int:
        return int(offset["logOffset"])
    return None


def _log_offset(offsets: str, source: int) -> int:
    """Return the newest entry in the log of a file source; -1 before the first one."""
    entry = log_offset_of(_offset(offsets, source))
    return -1 if entry is None else entry


def _entry_of(line: str) -> int:
    try:
        return int(json.loads(line)["batchId"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptData(f"a line in the log of seen files is not one of Spark's: {type(error).__name__}") from error


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files of a source, without the hidden ones that Hadoop's file systems add (checksums, unfinished
    writes)."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            yield path


def _cannot_be_carried(source: int, offsets: str, name: str) -> InvalidData:
    shown = (offsets.split("\n")[2:] or [""])[source : source + 1]
    return InvalidData(
        f"source {source} (its offset is {shown[0][:80] if shown else 'unknown'!r}) keeps files of its own in Spark's "
        f"checkpoint directory that a snapshot cannot carry: more than {SOURCE_FILES_MAX} files or "
        f"{SOURCE_FILES_BYTES_MAX:,} bytes, or a name with other than plain characters (sources/{name[:80]}). No "
        "snapshot was made. Read the data with another source of Spark"
    )


def _newest_lines(compact: Path, entry: int) -> list[str]:
    """Return the lines of the newest entry in a compacted file, which is read from its end."""
    with compact.open("rb") as file:
        _check_version(compact, file.read(len(_LOG_VERSION) + 1).decode(errors="replace").rstrip("\n"))
        newest: list[str] = []
        for line in _lines_backwards(file):
            if _entry_of(line) != entry:
                break
            newest.append(line)
    return newest[::-1]


def _lines_backwards(file: BinaryIO) -> Iterator[str]:
    """Yield the lines of a file from the last to the second; the first one is the version."""
    at, rest, taken = file.seek(0, os.SEEK_END), b"", 0
    while at > 0:
        step = min(at, _BLOCK_BYTES)
        at -= step
        file.seek(at)
        taken += step
        if taken > SOURCE_LOG_BYTES_MAX:
            raise CorruptData(f"one entry in the log of seen files has more than {SOURCE_LOG_BYTES_MAX:,} bytes")
        rest, *lines = (file.read(step) + rest).split(b"\n")
        yield from (line.decode() for line in reversed(lines) if line)


def _lines(path: Path) -> list[str]:
    version, _, rest = _read(path, SOURCE_LOG_BYTES_MAX).partition("\n")
    _check_version(path, version)
    return [line for line in rest.split("\n") if line]


def _check_version(path: Path, version: str) -> None:
    if version != _LOG_VERSION:
        raise CorruptData(f"{path} has version {version!r}; this version of Stillstate knows {_LOG_VERSION}")


def _read(path: Path, bytes_max: int = SMALL_JSON_BYTES_MAX * 16) -> str:
    return _read_bytes(path, bytes_max).decode()


def _read_bytes(path: Path, bytes_max: int) -> bytes:
    with path.open("rb") as file:
        body = file.read(bytes_max + 1)
    if len(body) > bytes_max:
        raise CorruptData(f"{path} is larger than {bytes_max:,} bytes")
    return body
