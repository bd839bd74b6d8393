"""Which files of a Parquet sink's folder become one; pure.

Only files of closed epochs are taken: the sink's commit log has them as published for a while, and has a newer epoch of
the same writer. The newest epoch of each writer stays as it is, so that a start finds the columns of what is there, and
nothing that is staged or pending is touched. A group is of one writer, one folder, and neighbouring epochs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from state_runtime.pipeline.commit_log import COMMITS_DIR
from state_runtime.store import StoredObject

__all__ = ["CompactionPlan", "DataFile", "Folder", "Group", "compacted_name", "plan_compaction"]

_FULL: Final = 0.75
"""A file with this share of the target is large enough."""
_INPUTS_MAX: Final = 1_000
"""Files of a group: while they are removed readers see their rows twice."""
_WRITTEN = re.compile(r"part-(?P<writer>.+)-(?P<epoch>[0-9]{20})-[0-9]{5}-[^/]+\.parquet\Z")
_COMPACTED = re.compile(
    r"part-(?P<writer>.+)-(?P<first>[0-9]{20})-(?P<last>[0-9]{20})-c(?P<number>[0-9]{20})\.parquet\Z"
)
_ENTRY = re.compile(rf"{COMMITS_DIR}/(?P<writer>[^/]+)/(?P<epoch>[0-9]{{20}})\.json\Z")
_HIDDEN = ("_", ".")


@dataclass(frozen=True, order=True)
class DataFile:
    """A file that readers see.

    Attributes:
        first_epoch, last_epoch: of its rows; equal for a file that a task wrote.
        compaction: the number of the one that wrote it; 0 for a file that a task wrote.
    """

    first_epoch: int
    last_epoch: int
    path: str
    bytes: int
    compaction: int = 0


@dataclass(frozen=True)
class Group:
    """Files that become one, in the order of their rows."""

    folder: str
    writer: str
    files: tuple[DataFile, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files)

    @property
    def first_epoch(self) -> int:
        """The first epoch of the rows."""
        return self.files[0].first_epoch

    @property
    def last_epoch(self) -> int:
        """The last epoch of the rows."""
        return max(file.last_epoch for file in self.files)


@dataclass(frozen=True)
class Folder:
    """What a listing of an output folder shows.

    Attributes:
        files: by writer, those of its folders that readers see.
        logged: by writer and epoch, when the commit log got the entry.
    """

    files: Mapping[str, tuple[DataFile, ...]]
    logged: Mapping[str, Mapping[int, int]]

    @staticmethod
    def of(objects: Iterable[StoredObject]) -> Folder:
        """Sort the objects of a listing. Files with names that no task gives are left out."""
        files: defaultdict[str, list[DataFile]] = defaultdict(list)
        logged: defaultdict[str, dict[int, int]] = defaultdict(dict)
        for found in objects:
            entry = _ENTRY.match(found.path)
            if entry is not None:
                logged[entry["writer"]][int(entry["epoch"])] = found.modified_ms
                continue
            if any(part.startswith(_HIDDEN) for part in found.path.split("/")):
                continue
            name = found.path.rpartition("/")[2]
            if (match := _COMPACTED.match(name)) is not None:
                ends = int(match["first"]), int(match["last"])
                file = DataFile(*ends, found.path, found.bytes, int(match["number"]))
            elif (match := _WRITTEN.match(name)) is not None:
                file = DataFile(int(match["epoch"]), int(match["epoch"]), found.path, found.bytes)
            else:
                continue
            files[match["writer"]].append(file)
        return Folder({writer: tuple(sorted(of)) for writer, of in files.items()}, dict(logged))


@dataclass(frozen=True, kw_only=True)
class CompactionPlan:
    """What a compaction would do.

    Attributes:
        known: the newest compaction of the folder when it was listed.
        files, bytes: that readers see of the chosen writers, before.
        open_files: of them, files whose epochs are not closed: the newest one, young ones, and those without an entry.
    """

    known: int
    groups: tuple[Group, ...]
    files: int
    bytes: int
    open_files: int

    @property
    def inputs(self) -> int:
        """Files that would be rewritten."""
        return sum(len(group.files) for group in self.groups)

    @property
    def input_bytes(self) -> int:
        """Bytes of the files that would be rewritten."""
        return sum(group.bytes for group in self.groups)

    @property
    def files_after(self) -> int:
        """Files that readers would see then."""
        return self.files - self.inputs + len(self.groups)


def plan_compaction(
    folder: Folder, *, known: int, writers: Iterable[str] | None, target_bytes: int, logged_before_ms: int
) -> CompactionPlan:
    """Return which files become one.

    Args:
        writers: whose files; None is everybody's.
        target_bytes: of a new file, at most.
        logged_before_ms: epochs whose entry is younger are left alone.
    """
    chosen = folder.files if writers is None else {writer: folder.files.get(writer, ()) for writer in writers}
    groups: list[Group] = []
    open_files = 0
    for writer, files in sorted(chosen.items()):
        closed = _closed(folder.logged.get(writer, {}), logged_before_ms)
        # The file of a compaction that has not ended must stay: it alone shows that its inputs may go.
        usable = [f for f in files if (f.compaction <= known if f.compaction else f.first_epoch in closed)]
        open_files += len(files) - len(usable)
        by_folder: defaultdict[str, list[DataFile]] = defaultdict(list)
        for file in usable:
            by_folder[file.path.rpartition("/")[0]].append(file)
        for place, inside in sorted(by_folder.items()):
            groups += (Group(place, writer, of) for of in _packed(inside, target_bytes))
    return CompactionPlan(
        known=known,
        groups=tuple(groups),
        files=sum(map(len, chosen.values())),
        bytes=sum(file.bytes for files in chosen.values() for file in files),
        open_files=open_files,
    )


def compacted_name(group: Group, number: int) -> str:
    """Return the path of the file that a compaction puts in the place of a group."""
    name = f"part-{group.writer}-{group.first_epoch:020d}-{group.last_epoch:020d}-c{number:020d}.parquet"
    return f"{group.folder}/{name}" if group.folder else name


def _closed(logged: Mapping[int, int], logged_before_ms: int) -> set[int]:
    newest = max(logged, default=0)
    return {epoch for epoch, at_ms in logged.items() if epoch < newest and at_ms <= logged_before_ms}


def _packed(files: Iterable[DataFile], target_bytes: int) -> Iterator[tuple[DataFile, ...]]:
    """Yield runs of neighbours that fit into one file. A large file ends a run."""
    run: list[DataFile] = []
    for file in files:
        is_full = file.bytes >= _FULL * target_bytes
        if run and (is_full or len(run) == _INPUTS_MAX or sum(f.bytes for f in run) + file.bytes > target_bytes):
            yield from _worth_it(run)
            run = []
        if not is_full:
            run.append(file)
    yield from _worth_it(run)


def _worth_it(run: list[DataFile]) -> Iterator[tuple[DataFile, ...]]:
    """Yield a run if it makes one file of several. Its first file may be the last compaction's, which is written again
    only if at least as many bytes are new: else each night would write all of it for a few rows."""
    if run and run[0].compaction and run[0].bytes > sum(file.bytes for file in run[1:]):
        run = run[1:]
    if len(run) > 1:
        yield tuple(run)
