"""The checkpoint directory of a native Spark query: its position, and whether it can be imported; this module needs no
Spark.

    metadata        the query's id
    offsets/<n>     batch n was planned: clocks, settings, and one line per source
    commits/<n>     batch n is done, and the watermark of the next one
    sources/<i>/    per file source the log of files that it has seen; small files of other sources

They are only read. Spark has no lock that says whether a query runs, so they are checked again at the end
(`check_unmoved`).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from state_runtime.base.errors import CorruptData, InvalidData, MissingSnapshot
from state_runtime.base.limits import (
    SMALL_JSON_BYTES_MAX,
    SOURCE_FILES_BYTES_MAX,
    SOURCE_FILES_MAX,
    SOURCE_LOG_BYTES_MAX,
)
from state_runtime.pipeline.source_position import log_offset_of
from state_runtime.pipeline.watermark import POLICY_SETTING, Clocks, Policy, policy_of
from state_runtime.snapshot.manifest import SourceFile, SourcePosition, TimeEntry
from state_runtime.store import Store
from state_runtime.store.paths import check_relative_path

__all__ = ["NativeCheckpoint", "check_unmoved", "read_checkpoint"]

_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_PROVIDERS = ("RocksDBStateStoreProvider", "HDFSBackedStateStoreProvider")
_VERSION = "v1"
_COMPACT = re.compile(r"([0-9]+)\.compact\Z")
_ENTRY_BYTES_MAX = 16 * SMALL_JSON_BYTES_MAX  # a line of Kafka offsets has about 20 bytes a partition


@dataclass(frozen=True)
class NativeCheckpoint:
    """The position of a stopped query.

    Attributes:
        query_id: Spark's own, which runs here keep.
        batch_id: newest committed batch.
        batch_time_ms, watermark_ms: the clocks of that batch.
        next_watermark_ms: of the batch after it; 0 if no event time was seen.
        policy: how it combines several watermarks.
        sources: number of sources of the query.
        seen_files: per file source the lines of its log, oldest first.
    """

    query_id: str
    batch_id: int
    batch_time_ms: int
    watermark_ms: int
    next_watermark_ms: int
    policy: Policy
    sources: int
    position: SourcePosition
    seen_files: Mapping[int, tuple[str, ...]]

    def time(self, clocks: Clocks) -> TimeEntry:
        """Return the clocks of the snapshot: those of a job that had run the same batches.

        Spark does not keep the highest event time, only the watermark that follows from it; with several columns each
        gets that of the slowest (or, by the policy, fastest) one, as after a restart of Spark's own query.

        Args:
            clocks: what moves those of the job.
        """

        def seen(watermark_ms: int) -> dict[str, int]:
            return {c.name: watermark_ms + c.delay_ms for c in clocks.columns} if watermark_ms > 0 else {}

        # Those of the batch follow from its watermark: behind a join they are held back.
        of_batch = clocks.advanced(TimeEntry(self.batch_time_ms, 0, seen(self.watermark_ms)), self.batch_time_ms)
        return replace(of_batch, watermark_ms=self.watermark_ms, event_time_ms=seen(self.next_watermark_ms))


def read_checkpoint(root: Store) -> NativeCheckpoint:
    """Read the position of a query, and refuse a checkpoint that cannot be imported.

    Raises:
        MissingSnapshot: no batch was ever committed here; or it is no checkpoint at all.
        InvalidData: a batch is under way, the state is kept by an unknown provider, or the logs have an unknown
            version.
        CorruptData: a log entry is missing or cannot be read.
    """
    where = root.url
    planned, committed = _newest(root, "offsets"), _newest(root, "commits")
    if not root.exists("metadata") or committed < 0:
        raise MissingSnapshot(
            f"{where} is no checkpoint of a Spark query that has finished a batch (no metadata or no commits). "
            "Give the folder that the query has as its checkpointLocation"
        )
    if planned > committed:
        raise InvalidData(
            f"batch {planned} of the query in {where} was planned and is not committed (the newest commit is "
            f"{committed}): the query still runs, or was killed in the batch. Let it finish: start it once more with "
            "Trigger.AvailableNow and wait for its end"
        )
    if planned < committed:
        raise CorruptData(f"{where} has commits/{committed} without offsets/{committed}; the checkpoint is damaged")
    offsets = _text(root, f"offsets/{committed}")
    header, sources = _offsets(offsets, f"{where}/offsets/{committed}")
    _check_provider(header, where)
    previous = _text(root, f"offsets/{committed - 1}") if committed > 0 else ""
    seen = _seen_files(root, sources)
    next_watermark_ms = _commit(root, committed)
    watermark_ms = int(header["batchWatermarkMs"])
    metadata = _text(root, "metadata")
    position = SourcePosition(
        batch_id=committed,
        metadata=metadata,
        offsets=offsets,
        previous_offsets=previous,
        # As a run here writes it: without the names of state files, which are not imported.
        commit=f'{_VERSION}\n{{"nextBatchWatermarkMs":{watermark_ms}}}',
        logs=tuple(sorted(seen)),
        files=_small_files(root, len(sources), seen),
    )
    return NativeCheckpoint(
        query_id=str(_json(metadata, f"{where}/metadata").get("id", "")),
        batch_id=committed,
        batch_time_ms=int(header["batchTimestampMs"]),
        watermark_ms=watermark_ms,
        next_watermark_ms=next_watermark_ms,
        policy=policy_of(_conf(header).get(POLICY_SETTING, "min")),
        sources=len(sources),
        position=position,
        seen_files=seen,
    )


def check_unmoved(root: Store, found: NativeCheckpoint) -> None:
    """Check that the query has not continued since.

    Raises:
        InvalidData: it has.
    """
    planned, committed = _newest(root, "offsets"), _newest(root, "commits")
    if (planned, committed) != (found.batch_id, found.batch_id):
        raise InvalidData(
            f"the query in {root.url} went on to batch {max(planned, committed)} while its state was read at batch "
            f"{found.batch_id}; nothing was published. Stop the query, and import again"
        )


def _newest(root: Store, folder: str) -> int:
    return max((int(name) for name in root.list_names(folder) if name.isascii() and name.isdigit()), default=-1)


def _text(root: Store, path: str, bytes_max: int = _ENTRY_BYTES_MAX) -> str:
    try:
        return root.read(path, bytes_max).decode()
    except FileNotFoundError as error:
        raise CorruptData(
            f"{root.url} has no {path}; the checkpoint is damaged or files were deleted from it"
        ) from error
    except UnicodeDecodeError as error:
        raise CorruptData(f"{root.url}/{path} is not text: {error}") from error


def _json(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{where} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CorruptData(f"{where} is not a JSON object")
    return value


def _offsets(text: str, where: str) -> tuple[dict[str, Any], list[str]]:
    """Return the header of an entry of the offset log, and its lines, one per source."""
    version, _, rest = text.partition("\n")
    if version != _VERSION:
        raise InvalidData(
            f"{where} has version {version[:20]!r} of Spark's offset log; this version of Stillstate knows {_VERSION} "
            "(spark.sql.streaming.offsetLog.formatVersion = 1, Spark's default)"
        )
    header_line, *sources = rest.split("\n")
    header = _json(header_line, where)
    if not isinstance(header.get("batchTimestampMs"), int) or not isinstance(header.get("batchWatermarkMs"), int):
        raise CorruptData(f"{where} does not say when its batch was; the checkpoint is damaged")
    return header, sources


def _conf(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings that a query keeps over restarts."""
    conf = header.get("conf")
    return conf if isinstance(conf, dict) else {}


def _check_provider(header: Mapping[str, Any], where: str) -> None:
    provider = str(_conf(header).get(_PROVIDER, ""))
    if not provider.endswith(_PROVIDERS):
        raise InvalidData(
            f"the query in {where} keeps its state with {provider.rpartition('.')[2] or 'an unknown provider'}; only "
            f"{' and '.join(_PROVIDERS)} can be imported"
        )


def _commit(root: Store, batch_id: int) -> int:
    path = f"commits/{batch_id}"
    version, _, body = _text(root, path).partition("\n")
    if version not in ("v1", "v2"):
        raise InvalidData(f"{root.url}/{path} has version {version[:20]!r} of Spark's commit log, which is not known")
    value = _json(body, f"{root.url}/{path}").get("nextBatchWatermarkMs", 0)
    return int(value) if isinstance(value, int) else 0


# --- logs of seen files ------------------------------------------------------------------------------------------


def _seen_files(root: Store, sources: list[str]) -> dict[int, tuple[str, ...]]:
    """Return per file source the lines of its log up to its offset; other sources have none."""
    found: dict[int, tuple[str, ...]] = {}
    for index, line in enumerate(sources):
        names = root.list_names(f"sources/{index}")
        if not any((name.isascii() and name.isdigit()) or _COMPACT.match(name) for name in names):
            continue
        offset = _log_offset(line, f"{root.url}: the offset of source {index}")
        if offset is None:
            continue  # a source of another kind, which keeps its own files there
        found[index] = tuple(_log_lines(root, index, names, offset))
    return found


def _log_offset(line: str, where: str) -> int | None:
    """Return the newest entry that a file source has read, -1 if none; None for a source of another kind."""
    if line == "-":
        return -1
    try:
        return log_offset_of(json.loads(line))
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{where} cannot be read: {error}") from error


def _small_files(root: Store, sources: int, seen: Mapping[int, Any]) -> tuple[SourceFile, ...]:
    """Return the files of sources of other kinds: a rate source's time of creation, Kafka's first offsets."""
    found: list[SourceFile] = []
    size = 0
    others = [index for index in range(sources) if index not in seen]
    for listed in (o for index in others for o in islice(root.list_objects(f"sources/{index}"), SOURCE_FILES_MAX + 1)):
        if listed.path.rpartition("/")[2].startswith("."):
            continue  # a checksum, or an unfinished write
        body = root.read(listed.path, SOURCE_FILES_BYTES_MAX)
        size += len(body)
        path = check_relative_path(listed.path.removeprefix("sources/"))
        found.append(SourceFile(path, base64.b64encode(body).decode()))
    if size > SOURCE_FILES_BYTES_MAX or len(found) > SOURCE_FILES_MAX:
        raise InvalidData(
            f"the sources of the query in {root.url} keep {len(found)} files with {size:,} bytes below sources/, more "
            "than a snapshot can carry; begin the job without the import"
        )
    return tuple(sorted(found, key=lambda file: file.path))


def _log_lines(root: Store, source: int, names: list[str], last: int) -> list[str]:
    """Return the log of one source: the newest compacted file, then the entries after it."""
    compacted = max((int(m[1]) for n in names if (m := _COMPACT.match(n)) and int(m[1]) <= last), default=-1)
    lines = _entry(root, source, f"{compacted}.compact") if compacted >= 0 else []
    for entry in range(compacted + 1, last + 1):
        if str(entry) not in names:
            raise CorruptData(
                f"{root.url}/sources/{source} has no entry {entry} of the log of seen files, whose last is {last}; "
                "without it files would be read twice"
            )
        lines += _entry(root, source, str(entry))
    return lines


def _entry(root: Store, source: int, name: str) -> list[str]:
    path = f"sources/{source}/{name}"
    text = _text(root, path, SOURCE_LOG_BYTES_MAX)
    version, _, rest = text.partition("\n")
    if version != _VERSION:
        raise InvalidData(f"{root.url}/{path} has version {version[:20]!r}, which is not known")
    return [line for line in rest.split("\n") if line]
