"""Compactions of a Parquet sink's folder: files of many epochs become one, and each row stays where readers find it.

    _stillstate/compacting/<uid>.parquet              a file that is not agreed on yet
    _stillstate/compactions/<number>.json             a compaction: its inputs, and the file that takes their place
    _stillstate/compactions/<number>.end.json         it has ended: `done`, or `void` (nothing was changed)

A withdrawal is a compaction without a file that takes the inputs' place: the job went back, and their rows go.

The document with a number is the decision. It is created once, and only if no other compaction has one of its inputs.
Before it the folder is as it was. Behind it anybody can end the compaction, any number of times: the new file gets its
name, the inputs are removed, and the end is written. So a crash anywhere is repaired by the next compaction, and by the
next start of a job that writes here.

Readers who list the folder see the inputs before; while the inputs are removed they see rows of those that are still
there twice, in the new file too; then they see the new file. A row is never missing. See docs/design/0055-compact.md.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Literal

from state_runtime.base import faults
from state_runtime.base.errors import CorruptManifest, Unavailable
from state_runtime.base.limits import MANIFEST_BYTES_MAX, SMALL_JSON_BYTES_MAX
from state_runtime.snapshot.create_once import Proposal, create_next
from state_runtime.snapshot.document import decode_document, encode_document
from state_runtime.snapshot.manifest import StagedFile
from state_runtime.store import Store

__all__ = [
    "COMPACTING_DIR",
    "COMPACTIONS_DIR",
    "Compaction",
    "Numbers",
    "agree",
    "finish",
    "finish_all",
    "numbers_of",
    "staged_of",
]

COMPACTIONS_DIR: Final = "_stillstate/compactions"
COMPACTING_DIR: Final = "_stillstate/compacting"
_AT_A_TIME: Final = 16
"""Inputs that are removed in parallel: readers see rows twice meanwhile, so it is to be short."""
_NAME: Final = re.compile(r"([0-9]{20})(\.end)?\.json\Z")
# Below folders by value, if any: no path with `_stillstate` in it.
_OURS: Final = re.compile(r"(?:[^/=_.][^/=]*=[^/]*/)*part-[^/]+\.parquet\Z")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Compaction:
    """The content of a compaction's document.

    Attributes:
        uid: of the process's attempt; no two documents have the same bytes.
        inputs: names of the files that go, in the folder of `output`.
        output: the file that takes their place; None: their rows go.
        first_epoch, last_epoch: of its rows.
        digest: of its rows, in any order (reading/fingerprint.py).
    """

    uid: str
    at_ms: int
    inputs: tuple[str, ...]
    output: StagedFile | None
    first_epoch: int
    last_epoch: int
    digest: str


@dataclass(frozen=True)
class _End:
    outcome: Literal["done", "void"]


@dataclass(frozen=True)
class Numbers:
    """The numbers of a folder's compactions.

    Attributes:
        newest: the highest; 0 without any.
        open: those without an end, in order.
    """

    newest: int
    open: tuple[int, ...]


def staged_of(uid: str) -> str:
    """Return where a file waits until a compaction is agreed on."""
    return f"{COMPACTING_DIR}/{uid}.parquet"


def numbers_of(store: Store) -> Numbers:
    """Return the numbers of all compactions; one listing."""
    found = [match for match in map(_NAME.match, store.list_names(COMPACTIONS_DIR)) if match]
    begun = {int(match[1]) for match in found if match[2] is None}
    ended = {int(match[1]) for match in found if match[2] is not None}
    return Numbers(max(begun, default=0), tuple(sorted(begun - ended)))


def agree(store: Store, inputs: Iterable[str], known: int, make: Callable[[int], Compaction]) -> int | None:
    """Create the document of a compaction, unless a newer one has one of its inputs.

    Args:
        known: the newest number when the inputs were listed. All compactions up to it had ended by then.
        make: returns the compaction with a number.

    Returns:
        Its number; None if another compaction was faster. Then nothing was changed.

    Raises:
        OutcomeUnknown: it may be there; the next compaction ends it.
    """
    mine = set(inputs)

    def propose() -> Proposal[int] | None:
        newest = numbers_of(store).newest
        if any(mine.intersection(_read(store, number).inputs) for number in range(known + 1, newest + 1)):
            return None
        return Proposal(_path(newest + 1), encode_document("compaction", make(newest + 1)), newest + 1)

    return create_next(
        store,
        propose,
        contended=lambda: Unavailable(f"too many compactions of {store.url} begin at once; start this one again"),
    )


def finish_all(store: Store) -> int:
    """End the compactions that somebody has begun and not ended; return how many there were.

    Raises:
        CorruptManifest, UnsupportedFormat: a document cannot be read. StoreUnavailable: start again.
    """
    begun = numbers_of(store).open
    for number in begun:
        finish(store, number)
    return len(begun)


def finish(store: Store, number: int) -> bool:
    """End a compaction that was agreed on; return whether its file is in place. Idempotent, and safe beside others that
    do the same: no file that it removes ever comes back, and it removes none while the new file is not there.

    A compaction whose file is gone is void: its inputs stay.
    """
    compaction = _read(store, number)
    output = compaction.output
    if output is not None:
        try:
            store.move(output.staged, output.final)
        except FileNotFoundError:
            # Somebody else has ended it, and the file belongs to its readers since. Or it was removed before it had
            # its name: then the inputs are all that there is.
            return _end(store, number, "void") == "done"
    faults.reach("compaction-visible")
    with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="compact") as pool:
        for _ in pool.map(store.delete, compaction.inputs):
            faults.reach("compaction-input-removed")
    if output is not None:
        _sync(store, output)
    faults.reach("compaction-removed")
    return _end(store, number, "done") == "done"


def _sync(store: Store, output: StagedFile) -> None:
    """Move the new file once more, to where it is: on a local disk this makes the removals durable. Behind a loss of
    power an input would be back, beside an end that says it is gone."""
    try:
        store.move(output.staged, output.final)
    except FileNotFoundError:
        _LOG.info("%s in %s was moved on while its compaction ended", output.final, store.url)


def _end(store: Store, number: int, outcome: Literal["done", "void"]) -> str:
    """Write the end, and return the one that counts: that of the first."""
    path = f"{COMPACTIONS_DIR}/{number:020d}.end.json"
    store.create(path, encode_document("compaction-end", _End(outcome)))
    found = decode_document("compaction-end", _End, store.read(path, SMALL_JSON_BYTES_MAX), f"{store.url}/{path}")
    if found.outcome == "void" and outcome == "void":
        _LOG.warning(
            "compaction %d of %s has lost its file before it had its name; its inputs stay as they are",
            number,
            store.url,
        )
    return found.outcome


def _read(store: Store, number: int) -> Compaction:
    """Return a document.

    Raises:
        CorruptManifest: it is damaged, or names files to remove that no task has written.
    """
    path = _path(number)
    found = decode_document("compaction", Compaction, store.read(path, MANIFEST_BYTES_MAX), f"{store.url}/{path}")
    finals = () if found.output is None else (found.output.final,)
    strange = [name for name in (*found.inputs, *finals) if not _OURS.match(name)]
    strange += [name for name in finals if name in found.inputs]
    if strange:
        raise CorruptManifest(
            f"{path} in {store.url} names {strange[0][:200]!r}, which is no output of a job. Nothing was removed. "
            "Restore the document from a copy, or remove it if there is none"
        )
    return found


def _path(number: int) -> str:
    return f"{COMPACTIONS_DIR}/{number:020d}.json"
