"""Ownership of the local copies on a host: they follow the job, and not the place of its root.

    <local dir>/state/<root id>-<job uid>/place.json    where the root was, and which run used the copies last

A root that was moved or renamed, or that is reached by another URL (a bucket, and the same bucket mounted), has another
root id. Its first run there takes over the folder of the earlier place, by one rename. Two live copies of a root (`cp`)
have the same job uid. So a root takes the folder over only if its own history has the run that used it last, and if no
other living root is seen at the earlier place. A new job of the same name and place has another uid, so it never uses
the copies of the deleted one.

Copies on the host for roots of the same store that are gone (deleted, moved, renamed, claimed) are removed a day after
their last write. This module does not decide the content of a copy: every reader verifies it (restore/shard.py), and
without a copy the primary store is used. So the worst cost of a mistake here is a restore from the primary
(invariant 5), and it cannot change a store at all (invariant 4).
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from state_runtime.base.clock import Clock
from state_runtime.base.errors import StillstateError
from state_runtime.base.ids import Ids
from state_runtime.base.limits import SMALL_JSON_BYTES_MAX
from state_runtime.snapshot.catalog import read_job_info
from state_runtime.snapshot.document import decode_document
from state_runtime.snapshot.paths import term_path
from state_runtime.snapshot.term_files import Term
from state_runtime.state.sealed_files import make_own_folder, open_new_private, read_without_links
from state_runtime.store import Store

__all__ = ["HostedRoot", "settle_in"]

_LOG = logging.getLogger(__name__)

OpenRoot = Callable[[str], Store]

GONE_AFTER_S = 86_400.0
"""A root may be moved today and started tomorrow: its copies are kept for it until then."""
_LOOKED_EVERY_S = 3_600.0
_LOOKED_AT_MAX = 32
_NAME = re.compile(r"[0-9a-f]{16}-([0-9A-Za-z]+)\Z")
_PLACE = "place.json"
_GONE = ".gone-"


@dataclass(frozen=True)
class HostedRoot:
    """A job root, as one of its runs sees it.

    Attributes:
        uid: of the job.
        term, run_uid: of the run.
        folder: of its local copies on this host.
    """

    root: Store
    uid: str
    term: int
    run_uid: str
    folder: Path


@dataclass(frozen=True)
class _Place:
    url: str
    term: int
    run_uid: str


def settle_in(mine: HostedRoot, open_root: OpenRoot, clock: Clock, ids: Ids) -> None:
    """Take over the job's folder on this host from another place of its root. Remove folders of roots that are gone.

    Never raises: local copies only save time.

    Args:
        open_root: opens another root with this job's storage options, by its URL.
    """
    try:
        if not mine.folder.exists():
            _take_over(mine, open_root)
        place = _Place(mine.root.url, mine.term, mine.run_uid)
        if _read_place(mine.folder) != place:
            _write_place(mine.folder, place, ids)
        if _is_time_to_look(mine.folder.parent, clock):
            _remove_gone(mine, open_root, clock)
    except (OSError, StillstateError):
        _LOG.info("local copies in %s were left as they are", mine.folder.parent, exc_info=True)


# --- taking over ---------------------------------------------------------------------------------------------------


def _take_over(mine: HostedRoot, open_root: OpenRoot) -> None:
    others = [(folder, place) for folder, uid, place in _hosted(mine.folder.parent) if uid == mine.uid]
    for folder, place in sorted(others, key=lambda other: other[1].term, reverse=True):
        if _has_run(mine.root, place.term, place.run_uid) and not _lives_elsewhere(mine, place, open_root):
            # One of several processes on this host renames the folder; the others find it renamed.
            os.rename(folder, mine.folder)
            _LOG.info("local copies of the root that lay in %s serve the one in %s", place.url, mine.root.url)
            return


def _has_run(root: Store, term: int, run_uid: str) -> bool:
    """Return whether a run is in the history of a root."""
    path = term_path(term)
    try:
        body = root.read(path, SMALL_JSON_BYTES_MAX)
    except FileNotFoundError:
        return False
    return decode_document("term", Term, body, f"{root.url}/{path}").run_uid == run_uid


def _lives_elsewhere(mine: HostedRoot, place: _Place, open_root: OpenRoot) -> bool:
    """Return whether another root of the job is seen at a place. The same root, reached by two URLs, has this very run.
    A place that this job's storage options cannot open counts as not seen."""
    if _scheme(place.url) != _scheme(mine.root.url):
        return False
    try:
        there = open_root(place.url)
        info = read_job_info(there)
        return info is not None and info.uid == mine.uid and not _has_run(there, mine.term, mine.run_uid)
    except (OSError, StillstateError) as error:
        _LOG.info("%s cannot be looked at: %s", place.url, error)
        return False


def _scheme(url: str) -> str:
    scheme, separator, _ = url.partition("://")
    return scheme if separator else ""


# --- copies of roots that are gone ---------------------------------------------------------------------------------


def _remove_gone(mine: HostedRoot, open_root: OpenRoot, clock: Clock) -> None:
    state = mine.folder.parent
    for left in state.glob(f"{_GONE}*"):
        shutil.rmtree(left, ignore_errors=True)  # left by a process that was killed
    store_url = mine.root.url.rpartition("/")[0]
    found = [
        (folder, uid, place)
        for folder, uid, place in _hosted(state)
        if folder != mine.folder
        and place.url.rpartition("/")[0] == store_url
        and clock.now_ms() / 1000 - _written_s(folder) > GONE_AFTER_S
    ]
    for folder, uid, place in found[:_LOOKED_AT_MAX]:
        # Check that the store itself is there: an unmounted file system looks as if all of its jobs were gone.
        own = read_job_info(mine.root)
        info = read_job_info(open_root(place.url))
        if own is None or own.uid != mine.uid or (info is not None and info.uid == uid):
            continue
        gone = state / f"{_GONE}{folder.name}"
        os.rename(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)
        shutil.rmtree(state.parent / "objects" / folder.name, ignore_errors=True)
        _LOG.info("local copies of %s, which is gone, were removed", place.url)


def _is_time_to_look(state: Path, clock: Clock) -> bool:
    stamp = state / ".looked"
    try:
        if clock.now_ms() / 1000 - stamp.stat().st_mtime < _LOOKED_EVERY_S:
            return False
    except FileNotFoundError:
        with open_new_private(stamp):
            pass
    now_s = clock.now_ms() / 1000
    os.utime(stamp, (now_s, now_s))
    return True


def _written_s(folder: Path) -> float:
    """Return when an entry below was last made or removed, by the times of folders, three levels deep."""
    newest, level = folder.lstat().st_mtime, [folder]
    for _ in range(3):
        level = [Path(e.path) for above in level for e in os.scandir(above) if e.is_dir(follow_symlinks=False)]
        newest = max([newest, *(inner.lstat().st_mtime for inner in level)])
    return newest


# --- places --------------------------------------------------------------------------------------------------------


def _hosted(state: Path) -> Iterator[tuple[Path, str, _Place]]:
    """Yield the folders of jobs on this host that record where their root is: folder, job uid, place."""
    try:
        names = sorted(os.listdir(state))
    except FileNotFoundError:
        return
    for name in names:
        matched = _NAME.match(name)
        place = _read_place(state / name) if matched is not None else None
        if matched is not None and place is not None:
            yield state / name, matched[1], place


def _read_place(folder: Path) -> _Place | None:
    """Read the recorded place; None if there is no record, or not in this form (a folder of an earlier version)."""
    try:
        said = json.loads(read_without_links(folder / _PLACE, SMALL_JSON_BYTES_MAX))
        place = _Place(said["url"], said["term"], said["run_uid"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    is_sound = isinstance(place.url, str) and type(place.term) is int and isinstance(place.run_uid, str)
    return place if is_sound and 0 < place.term < 10**20 else None


def _write_place(folder: Path, place: _Place, ids: Ids) -> None:
    make_own_folder(folder)
    new = folder / f"{_PLACE}.{ids.short()}"
    try:
        with open_new_private(new) as file:
            file.write(json.dumps({"url": place.url, "term": place.term, "run_uid": place.run_uid}).encode())
        os.replace(new, folder / _PLACE)
    finally:
        new.unlink(missing_ok=True)
