"""The source position: out of Spark's own checkpoint directory into the manifest, and back into a fresh directory.

Spark's checkpoint directory is scratch on the driver's disk. What it says about the sources (offsets, and for file
sources the log of seen files) is in every snapshot; a run that starts from a snapshot primes a fresh directory, so that
Spark resumes right after the snapshot's batch. Tried on Spark 4.3.0; the files are described in docs/format.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from state_runtime.base.errors import CorruptData, StillstateError
from state_runtime.base.limits import SMALL_JSON_BYTES_MAX, SOURCE_LOG_BYTES_MAX
from state_runtime.snapshot.manifest import SourcePosition

__all__ = ["BatchClock", "SparkCheckpoint", "same_offsets"]

_LOG_VERSION = "v1"
# Spark writes a compacted log of seen files every 10 entries (spark.sql.streaming.fileSource.log.compactInterval).
_COMPACT_INTERVAL = 10
# `str.isdigit` takes digits that `int` refuses, and digits of other scripts.
_NUMBER = re.compile(r"[0-9]{1,19}\Z")
_COMPACT = re.compile(r"([0-9]+)\.compact\Z")


@dataclass(frozen=True)
class BatchClock:
    """The times that Spark fixed for a batch before it ran."""

    batch_time_ms: int
    watermark_ms: int


class SparkCheckpoint:
    """Spark's checkpoint directory of one run, on the driver's local disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prime(self, position: SourcePosition, logs: dict[int, list[str]]) -> None:
        """Write the files from which Spark resumes after `position.batch_id`.

        Args:
            logs: per file source the lines of its log of seen files.
        """
        (self.folder / "offsets").mkdir(parents=True)
        (self.folder / "commits").mkdir()
        (self.folder / "metadata").write_text(position.metadata)
        batch = position.batch_id
        if batch > 0:
            (self.folder / "offsets" / str(batch - 1)).write_text(position.previous_offsets)
        (self.folder / "offsets" / str(batch)).write_text(position.offsets)
        (self.folder / "commits" / str(batch)).write_text(position.commit)
        for index, lines in logs.items():
            folder = self.folder / "sources" / str(index)
            folder.mkdir(parents=True)
            for name, body in plan_source_log(lines).items():
                (folder / name).write_text(body)

    def clock(self, batch_id: int) -> BatchClock:
        """Batch time and watermark of a batch that Spark has planned."""
        header = self._offsets(batch_id).split("\n")[1]
        values = json.loads(header)
        return BatchClock(int(values["batchTimestampMs"]), int(values["batchWatermarkMs"]))

    def position(self, batch_id: int) -> SourcePosition:
        """The position after a batch, to be stored in the manifest; the batch's commit is ours, so it is written
        here."""
        offsets = self._offsets(batch_id)
        watermark_ms = json.loads(offsets.split("\n")[1])["batchWatermarkMs"]
        return SourcePosition(
            batch_id=batch_id,
            metadata=_read(self.folder / "metadata"),
            offsets=offsets,
            previous_offsets=self._offsets(batch_id - 1) if batch_id > 0 else "",
            commit=f'{self._commit_version(batch_id)}\n{{"nextBatchWatermarkMs":{watermark_ms}}}',
            logs=self._logged_sources(),
        )

    def new_log_lines(self, before: SourcePosition | None, after: SourcePosition) -> dict[int, list[str]]:
        """Per file source, the lines of its log that are new since `before`."""
        new: dict[int, list[str]] = {}
        for source in after.logs:
            first = _log_offset(before.offsets, source) + 1 if before is not None else 0
            last = _log_offset(after.offsets, source)
            lines: list[str] = []
            for entry in range(first, last + 1):
                lines.extend(self._log_entry(source, entry))
            if lines:
                new[source] = lines
        return new

    def _offsets(self, batch_id: int) -> str:
        return _read(self.folder / "offsets" / str(batch_id))

    def _commit_version(self, batch_id: int) -> str:
        """The version line of this session's commit log; a primed directory must use the same."""
        previous = self.folder / "commits" / str(batch_id - 1)
        return _read(previous).split("\n", 1)[0] if previous.exists() else _LOG_VERSION

    def _logged_sources(self) -> tuple[int, ...]:
        folder = self.folder / "sources"
        if not folder.is_dir():
            return ()
        found = (
            int(p.name) for p in folder.iterdir() if _NUMBER.match(p.name) and any(_is_log(f.name) for f in p.iterdir())
        )
        return tuple(sorted(found))

    def _log_entry(self, source: int, entry: int) -> list[str]:
        folder = self.folder / "sources" / str(source)
        plain = folder / str(entry)
        if plain.exists():
            return _lines(plain)
        compact = folder / f"{entry}.compact"
        if compact.exists():
            return [line for line in _lines(compact) if json.loads(line).get("batchId") == entry]
        raise StillstateError(
            f"Spark's log of seen files has no entry {entry} for source {source} in {folder}; "
            "its layout changed (is spark.sql.streaming.fileSource.log.* set?)"
        )


def plan_source_log(lines: Sequence[str]) -> dict[str, str]:
    """Files of a file source's log that hold `lines`; pure.

    Up to the newest multiple of the compaction interval one compacted file, then one file per entry, as Spark has them.
    """
    by_entry: dict[int, list[str]] = {}
    for line in lines:
        by_entry.setdefault(int(json.loads(line)["batchId"]), []).append(line)
    if not by_entry:
        return {}
    last = max(by_entry)
    compacted = (last + 1) // _COMPACT_INTERVAL * _COMPACT_INTERVAL - 1
    files: dict[str, str] = {}
    if compacted >= 0:
        old = [line for entry in sorted(by_entry) if entry <= compacted for line in by_entry[entry]]
        files[f"{compacted}.compact"] = "\n".join([_LOG_VERSION, *old])
    for entry in range(compacted + 1, last + 1):
        files[str(entry)] = "\n".join([_LOG_VERSION, *by_entry.get(entry, [])])
    return files


def same_offsets(left: str, right: str) -> bool:
    """Whether two texts of an offsets file describe the same input; times and settings may differ."""
    return left.split("\n")[2:] == right.split("\n")[2:]


def _log_offset(offsets: str, source: int) -> int:
    line = offsets.split("\n")[2 + source]
    value = json.loads(line) if line != "-" else None
    return int(value["logOffset"]) if isinstance(value, dict) and "logOffset" in value else -1


def _is_log(name: str) -> bool:
    return _NUMBER.match(name) is not None or _COMPACT.match(name) is not None


def _lines(path: Path) -> list[str]:
    text = _read(path, SOURCE_LOG_BYTES_MAX)
    version, _, rest = text.partition("\n")
    if version != _LOG_VERSION:
        raise CorruptData(f"{path} has version {version!r}; this version of Stillstate knows {_LOG_VERSION}")
    return [line for line in rest.split("\n") if line]


def _read(path: Path, bytes_max: int = SMALL_JSON_BYTES_MAX * 16) -> str:
    with path.open("rb") as file:
        body = file.read(bytes_max + 1)
    if len(body) > bytes_max:
        raise CorruptData(f"{path} is larger than {bytes_max:,} bytes")
    return body.decode()
