"""Verification of a place: one snapshot, or all of a folder with its savepoints; and the memory of objects that were
found good before."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO

from state_runtime.base.clock import Clock
from state_runtime.base.errors import InvalidConfiguration, StillstateError
from state_runtime.base.ids import Ids
from state_runtime.base.limits import PATH_CHARS_MAX
from state_runtime.base.settings import VerifyLevel
from state_runtime.maintenance.links import Shared, find_links
from state_runtime.maintenance.verify.report import Finding, VerifyProgress, VerifyReport, kind_of_error
from state_runtime.maintenance.verify.roots import verify_root
from state_runtime.snapshot.paths import JOB_FILE, SAVEPOINTS_DIR
from state_runtime.snapshot.savepoint_record import SavepointRecord, read_record, savepoint_names
from state_runtime.store import Store

__all__ = ["FoundGood", "verify_place"]

_LINE_CHARS_MAX = 2 * PATH_CHARS_MAX


def verify_place(
    root: Store,
    *,
    snapshot_id: int | None,
    level: VerifyLevel,
    share: float = 0.1,
    seed: str = "",
    good: FoundGood | None = None,
    parent: Store | None = None,
    progress: Callable[[str, VerifyProgress], None] | None = None,
    threads: int = 8,
    clock: Clock,
    ids: Ids,
) -> VerifyReport:
    """Verify a snapshot, or all snapshots of a folder and of its savepoints. Nothing is written there.

    Args:
        parent: the job root that contains the savepoint's folder; hard links are looked up there.
        good: objects that an earlier verification found good; this one adds to it.
        progress: called with the folder below the root (empty is the root), in this thread.

    Raises:
        MissingSnapshot: there is no snapshot of that id.
        CorruptManifest, UnsupportedFormat: a boundary cannot be read, so the list of snapshots is unknown.
        StoreUnavailable: even listings fail.
    """

    def verify(folder: str, snapshot_ids: list[int] | None) -> VerifyReport:
        prefix = f"{folder}/" if folder else ""
        return verify_root(
            root.child(folder) if folder else root,
            snapshot_ids=snapshot_ids,
            level=level,
            share=share,
            seed=seed,
            already=(lambda path: good.has(prefix + path)) if good is not None else lambda _: False,
            on_good=(lambda path: good.add(prefix + path)) if good is not None else None,
            progress=(lambda now: progress(folder, now)) if progress is not None else None,
            threads=threads,
            clock=clock,
            ids=ids,
        )

    report = verify("", [snapshot_id] if snapshot_id is not None else None)
    if snapshot_id is None and report.complete:
        report = replace(report, shared=_shared(root, parent))
    for name in savepoint_names(root) if snapshot_id is None and report.complete else ():
        folder = f"{SAVEPOINTS_DIR}/{name}"
        try:
            record = read_record(root.child(folder))
        except StillstateError as error:
            report = _with(report, Finding(kind=kind_of_error(error), path=folder, detail=str(error), snapshot_ids=()))
            continue
        if record is None or record.state == "COMPLETED":
            report = _together(report, _complete(verify(folder, None), record, root.child(folder)), folder)
    return report


def _shared(root: Store, parent: Store | None) -> tuple[tuple[str, Shared], ...]:
    if parent is not None:
        name = root.url.rpartition("/")[2]
        found = find_links(parent).of_owner(name)
        return ((name, found),) if found.files else ()
    links = find_links(root)
    owners = [(owner, links.of_owner(owner)) for owner in ("", *savepoint_names(root))]
    return tuple((owner, shared) for owner, shared in owners if shared.files)


def _complete(report: VerifyReport, record: SavepointRecord | None, folder: Store) -> VerifyReport:
    """Check that a COMPLETED savepoint has its snapshot, and the file that makes the folder a root."""
    if record is None:
        return report
    lacks_snapshot = record.snapshot_id not in report.snapshots and not report.findings and report.complete
    if not folder.exists(JOB_FILE):
        report = _with(
            report, Finding(kind="missing", path=JOB_FILE, detail="it is not there", snapshot_ids=(record.snapshot_id,))
        )
    if lacks_snapshot:
        why = "the savepoint is COMPLETED, and its snapshot is not there"
        report = _with(
            report,
            Finding(
                kind="missing", path=f"snapshots/{record.snapshot_id:020d}/manifest.json", detail=why, snapshot_ids=()
            ),
        )
    return report


def _with(report: VerifyReport, finding: Finding) -> VerifyReport:
    return replace(report, findings=(*report.findings, finding))


def _together(first: VerifyReport, second: VerifyReport, folder: str) -> VerifyReport:
    return replace(
        first,
        savepoints=first.savepoints + 1,
        objects=first.objects + second.objects,
        bytes=first.bytes + second.bytes,
        objects_read=first.objects_read + second.objects_read,
        bytes_read=first.bytes_read + second.bytes_read,
        rows=first.rows + second.rows,
        findings=(*first.findings, *(replace(f, path=f"{folder}/{f.path}") for f in second.findings)),
        findings_left_out=first.findings_left_out + second.findings_left_out,
        complete=first.complete and second.complete,
        seconds=first.seconds + second.seconds,
    )


class FoundGood:
    """A local file that remembers the objects that a verification found good, so that an interrupted one can continue.

    One JSON line names the verification; each further line is a path. A line that a crash truncated is skipped. Objects
    never change, so a good one stays good unless the store loses it later. To check that, begin with a new file.
    """

    def __init__(self, file: Path, *, place: str, level: VerifyLevel) -> None:
        """Open the file.

        Raises:
            InvalidConfiguration: the file is of another verification, or cannot be used.
        """
        self._file = file
        self._paths: set[str] = set()
        header = {"stillstate": "verified", "place": place, "level": level}
        try:
            fresh = not file.exists() or file.stat().st_size == 0
            if not fresh:
                self._read(header)
            self._out: IO[str] = file.open("a", encoding="utf-8")
            if fresh:
                self._out.write(json.dumps(header) + "\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfiguration(f"{file} cannot be used: {error}; choose another file") from error

    def _read(self, header: dict[str, str]) -> None:
        with self._file.open(encoding="utf-8") as lines:
            try:
                first = json.loads(lines.readline(_LINE_CHARS_MAX))
            except ValueError:
                first = None
            if first != header:
                raise InvalidConfiguration(
                    f"{self._file} is not of this verification ({header['place']}, {header['level']}); choose another "
                    "file"
                )
            while line := lines.readline(_LINE_CHARS_MAX):
                if line.endswith("\n"):
                    self._paths.add(line.rstrip("\n"))

    def __enter__(self) -> FoundGood:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._out.close()

    def has(self, path: str) -> bool:
        """Whether the object was found good."""
        return path in self._paths

    def add(self, path: str) -> None:
        """Note that the object is good."""
        self._out.write(path + "\n")
        self._out.flush()
