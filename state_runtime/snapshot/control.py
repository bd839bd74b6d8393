"""Requests to a running job, as files: any process with access to the store can ask; the driver reads the requests at
each heartbeat.

    control/<20-digit term>-<action>-<request id>.json           create-if-absent, by the requester
    control/<20-digit term>-<action>-<request id>.answer.json    create-if-absent, by the run, or by a later one

A request is to one run. If that run has ended without an answer, the request is void: it is not carried out later.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from state_runtime.base.clock import Clock
from state_runtime.base.errors import CorruptManifest, UnsupportedFormat
from state_runtime.base.ids import Ids
from state_runtime.base.limits import SMALL_JSON_BYTES_MAX
from state_runtime.snapshot.document import decode_document, encode_document
from state_runtime.snapshot.paths import CONTROL_DIR, check_job_name
from state_runtime.snapshot.savepoint_record import (
    YOUNGER,
    SavepointFormat,
    SavepointThen,
    SavepointTrigger,
    check_tags,
)
from state_runtime.store import Store

__all__ = [
    "Answer",
    "ControlAnswer",
    "ControlRequest",
    "answer",
    "asked_to_stop",
    "new_requests",
    "open_requests",
    "pending_stop",
    "read_answer",
    "request_savepoint",
    "request_stop",
    "savepoint_request",
]

_LOG = logging.getLogger(__name__)

# Requests are read by every heartbeat; a folder flooded with files must not stop the job.
_REQUESTS_READ_MAX = 1000
_ANSWER = ".answer.json"
# The names that `_path` makes. Any other file in the folder is foreign, and is not opened.
_REQUEST = re.compile(r"[0-9]{20}-[a-z]+-[0-9A-Za-z]+\.json\Z")

Action = Literal["stop", "savepoint"]
Answer = Literal["accepted", "refused", "void"]


@dataclass(frozen=True, kw_only=True)
class ControlRequest:
    """A request to one term; requests to an older term are void.

    Attributes:
        name, then, trigger, tags, note, format, independent, drain_inflight: of a savepoint; see `SavepointRecord`.
    """

    action: Action
    term: int
    at_ms: int
    request_id: str
    name: str = ""
    then: SavepointThen = "continue"
    trigger: SavepointTrigger = "user"
    tags: tuple[str, ...] = ()
    note: str = ""
    format: SavepointFormat = "native"
    independent: bool = False
    drain_inflight: bool = False

    @property
    def takes_no_rows(self) -> bool:
        """Whether the savepoint must have no rows in flight: by request, or because its format cannot hold them."""
        return self.drain_inflight or self.format == "canonical"

    @property
    def ends_the_run(self) -> bool:
        """Whether the run ends for good once the request is carried out."""
        return self.action == "stop" or self.then != "continue"


@dataclass(frozen=True)
class ControlAnswer:
    """The result of a request.

    Attributes:
        answer: for a savepoint "accepted" means that its snapshot is made and pinned, and that the copy begins; the
            later states are in its record.
        message: why not.
    """

    request_id: str
    answer: Answer
    at_ms: int
    message: str = ""
    snapshot_id: int = 0


def request_stop(store: Store, job: str, term: int, *, clock: Clock, ids: Ids) -> None:
    """Ask the run `term` of `job` to stop after its current epoch. A second request is harmless."""
    _ask(
        store.child(check_job_name(job)),
        ControlRequest(action="stop", term=term, at_ms=clock.now_ms(), request_id=ids.uid()),
    )


def request_savepoint(
    root: Store,
    term: int,
    name: str,
    *,
    clock: Clock,
    ids: Ids,
    then: SavepointThen = "continue",
    trigger: SavepointTrigger = "user",
    tags: tuple[str, ...] = (),
    note: str = "",
    format: SavepointFormat = "native",
    independent: bool = False,
    drain_inflight: bool = False,
) -> ControlRequest:
    """Ask the run `term` of the job at `root` for a savepoint; `read_answer` has its answer, within an epoch.

    Raises:
        InvalidConfiguration: the name, a tag or the note cannot be used; nothing was requested.
        StoreUnavailable, OutcomeUnknown: it may have been requested.
    """
    check_job_name(name, "savepoint name")
    request = ControlRequest(
        action="savepoint",
        term=term,
        at_ms=clock.now_ms(),
        request_id=ids.uid(),
        name=name,
        then=then,
        trigger=trigger,
        tags=check_tags(tags, note),
        note=note,
        format=format,
        independent=independent,
        drain_inflight=drain_inflight,
    )
    _ask(root, request)
    return request


def answer(root: Store, request: ControlRequest, given: ControlAnswer) -> None:
    """Answer a request; a second answer is lost. Only the requested run, or a later one, calls it."""
    root.create(_path(request, _ANSWER), encode_document("control-answer", given))


def read_answer(root: Store, request: ControlRequest) -> ControlAnswer | None:
    """Read the answer; None before the answer."""
    path = _path(request, _ANSWER)
    try:
        data = root.read(path, SMALL_JSON_BYTES_MAX)
    except FileNotFoundError:
        return None
    return decode_document("control-answer", ControlAnswer, data, f"{root.url}/{path}")


def new_requests(root: Store, term: int, seen: Collection[str]) -> dict[str, ControlRequest | None]:
    """Return the unanswered requests to `term`, by file name, oldest first, without those in `seen`. None marks an
    unreadable request."""
    names = root.list_names(CONTROL_DIR)
    answered = {name.removesuffix(_ANSWER) for name in names if name.endswith(_ANSWER)}
    prefix = f"{term:020d}-"
    asked = [
        n
        for n in names
        if n.startswith(prefix) and _REQUEST.match(n) and n.removesuffix(".json") not in answered and n not in seen
    ]
    found: dict[str, ControlRequest | None] = {}
    for name in asked[:_REQUESTS_READ_MAX]:
        path = f"{CONTROL_DIR}/{name}"
        try:
            data = root.read(path, SMALL_JSON_BYTES_MAX)
            found[name] = decode_document("control", ControlRequest, data, f"{root.url}/{path}")
        except FileNotFoundError:
            continue  # removed meanwhile
        except (CorruptManifest, UnsupportedFormat) as error:
            # One unreadable request must not block the others.
            _LOG.warning("a request is passed over: %s", error)
            found[name] = None
    return dict(sorted(found.items(), key=lambda item: item[1].at_ms if item[1] is not None else 0))


def open_requests(root: Store, *, before_term: int) -> list[ControlRequest]:
    """Return the unanswered requests to older runs: they are void. Requests to stop need no answer."""
    terms = {int(name[:20]) for name in root.list_names(CONTROL_DIR) if _REQUEST.match(name)}
    found = []
    for term in sorted(t for t in terms if t < before_term):
        found += [r for r in new_requests(root, term, ()).values() if r is not None and r.action == "savepoint"]
    return found


def pending_stop(root: Store, term: int) -> ControlRequest | None:
    """Return the first stop request to `term` below the job root; None without one."""
    return next(_requests(root, term, "stop"), None)


def asked_to_stop(root: Store, term: int) -> bool:
    """Whether the run `term` was asked to end: to stop, or to stop after a savepoint (unless that was refused)."""
    if pending_stop(root, term) is not None:
        return True
    return any(r.ends_the_run and _may_be_done(root, r) for r in _requests(root, term, "savepoint"))


def savepoint_request(root: Store, term: int, name: str) -> ControlRequest | None:
    """Return the savepoint request of that name to the run `term`, unless it was refused; None without one."""
    asked = (r for r in _requests(root, term, "savepoint") if r.name == name)
    return next((request for request in asked if _may_be_done(root, request)), None)


def _requests(root: Store, term: int, action: str) -> Iterator[ControlRequest]:
    """Yield the requests of an action to the run `term`. A request that is removed meanwhile is left out.

    Raises:
        CorruptManifest, UnsupportedFormat: one of them cannot be read. StoreUnavailable: try again.
    """
    prefix = f"{term:020d}-{action}-"
    names = [n for n in root.list_names(CONTROL_DIR) if n.startswith(prefix) and _REQUEST.match(n)]
    for name in names[:_REQUESTS_READ_MAX]:
        path = f"{CONTROL_DIR}/{name}"
        try:
            data = root.read(path, SMALL_JSON_BYTES_MAX)
        except FileNotFoundError:
            continue
        yield decode_document("control", ControlRequest, data, path)


def _may_be_done(root: Store, request: ControlRequest) -> bool:
    given = read_answer(root, request)
    return given is None or given.answer == "accepted"


def _ask(root: Store, request: ControlRequest) -> None:
    root.create(_path(request, ".json"), encode_document("control", request, younger=YOUNGER))


def _path(request: ControlRequest, suffix: str) -> str:
    return f"{CONTROL_DIR}/{request.term:020d}-{request.action}-{request.request_id}{suffix}"
