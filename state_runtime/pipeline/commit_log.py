"""The commit log of a Parquet sink: which files each epoch of each writer has published. Entries are created once.

    _stillstate/commits/<job>-<uid>-<sink>/<epoch>.json

An entry says that its files were published, whatever has become of them since: they belong to their readers.
"""

from __future__ import annotations

import logging
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

from state_runtime.base.errors import CorruptData, MissingFile, UnsupportedFormat
from state_runtime.base.limits import MANIFEST_BYTES_MAX
from state_runtime.snapshot.document import decode_document, encode_document
from state_runtime.snapshot.manifest import StagedFile, StagedOutput
from state_runtime.store import Created, Store

__all__ = [
    "COMMITS_DIR",
    "SinkCommit",
    "is_logged",
    "log_epoch",
    "logged_files",
    "newest_epoch",
    "newest_files",
    "stager_of",
]

COMMITS_DIR: Final = "_stillstate/commits"
_AT_A_TIME: Final = 16
"""Entries that are read in parallel."""
_STAGERS_MAX: Final = 64
"""Jobs publishing in one folder that are looked at when another one begins to."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SinkCommit:
    """One entry of the log."""

    job: str
    sink: str
    epoch: int
    files: tuple[StagedFile, ...]


def log_epoch(store: Store, sink: str, output: StagedOutput) -> None:
    """Record that an epoch's output was published. Idempotent.

    Raises:
        MissingFile: the log has other files for the epoch.
    """
    entry = encode_document("sink-commit", SinkCommit(_stager(output), sink, output.epoch, output.files))
    if store.create(_entry_path(output), entry) is Created.LOST:
        # The entry may also hold the same files but be written by another version of Stillstate.
        is_logged(store, sink, output)


def logged_files(store: Store, stager: str, epoch: int) -> tuple[StagedFile, ...]:
    """Return the files that one epoch of one identity has published; none without an entry.

    Raises:
        CorruptManifest, UnsupportedFormat: it cannot be read.
    """
    path = f"{COMMITS_DIR}/{stager}/{epoch:020d}.json"
    try:
        data = store.read(path, MANIFEST_BYTES_MAX)
    except FileNotFoundError:
        return ()
    return decode_document("sink-commit", SinkCommit, data, f"{store.url}/{path}").files


def newest_epoch(store: Store, stager: str) -> int:
    """Return the highest epoch that the commit log has of one identity; 0 if it has none."""
    stems = (name.removesuffix(".json") for name in store.list_names(f"{COMMITS_DIR}/{stager}"))
    return max((int(stem) for stem in stems if len(stem) == 20 and stem.isascii() and stem.isdigit()), default=0)


def newest_files(store: Store, known: Set[str]) -> list[StagedFile]:
    """Return a file of the newest epoch of each identity that has published in a folder, without the known ones."""
    stagers = [name for name in store.list_names(COMMITS_DIR) if name not in known][:_STAGERS_MAX]
    with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="outputs") as pool:
        found = list(pool.map(partial(_newest_file, store), stagers))
    return [file for file in found if file is not None]


def _newest_file(store: Store, stager: str) -> StagedFile | None:
    epoch = newest_epoch(store, stager)
    try:
        files = logged_files(store, stager, epoch) if epoch else ()
    except (CorruptData, UnsupportedFormat) as error:
        # The file is of another job or another version: no reason for this job not to start.
        _LOG.info("what %s has published in %s is not looked at: %s", stager, store.url, error)
        return None
    return files[0] if files else None


def _stager(output: StagedOutput) -> str:
    """Return the identity under which output was staged. Its entry in the commit log has that name: after a claim or a
    rename another job publishes it, and the first one may have begun to."""
    return stager_of(output.files[0])


def stager_of(file: StagedFile) -> str:
    """Return the identity under which a file was staged."""
    return file.staged.rsplit("/", 3)[-3]


def _entry_path(output: StagedOutput) -> str:
    return f"{COMMITS_DIR}/{_stager(output)}/{output.epoch:020d}.json"


def is_logged(store: Store, sink: str, output: StagedOutput) -> bool:
    """Return whether the commit log says that output was published, even if its files are gone by now.

    Raises:
        MissingFile: it has other files for that epoch. CorruptManifest, UnsupportedFormat: it cannot be read.
    """
    files = logged_files(store, _stager(output), output.epoch)
    if files and files != output.files:
        raise MissingFile(
            f"sink {sink!r}: {_entry_path(output)} in {store.url} was written with other files for epoch "
            f"{output.epoch}; two jobs with one identity write here. Give each job an output folder of its own"
        )
    return bool(files)
