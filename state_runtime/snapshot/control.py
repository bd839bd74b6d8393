"""Requests to a running job, as files: any process with access to the store can ask, the driver looks at each heartbeat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from state_runtime.clock import Clock
from state_runtime.ids import Ids
from state_runtime.limits import SMALL_JSON_BYTES_MAX
from state_runtime.snapshot.document import decode_document, encode_document
from state_runtime.snapshot.paths import CONTROL_DIR, check_job_name
from state_runtime.store import Store

__all__ = ["ControlRequest", "pending_stop", "request_stop"]

# Requests are read by every heartbeat; a folder flooded with files must not stop the job.
_REQUESTS_READ_MAX = 1000


@dataclass(frozen=True)
class ControlRequest:
    """A request to one term; requests to an older term are void."""

    action: Literal["stop"]
    term: int
    at_ms: int
    request_id: str


def request_stop(store: Store, job: str, term: int, *, clock: Clock, ids: Ids) -> None:
    """Ask the run `term` of `job` to stop after its current epoch. Asking twice is fine."""
    request = ControlRequest("stop", term, clock.now_ms(), ids.uid())
    root = store.child(check_job_name(job))
    root.create(f"{CONTROL_DIR}/{term:020d}-stop-{request.request_id}.json", encode_document("control", request))


def pending_stop(root: Store, term: int) -> ControlRequest | None:
    """The first stop request to `term` below the job root, if there is one."""
    prefix = f"{term:020d}-stop-"
    for name in [n for n in root.list_names(CONTROL_DIR) if n.startswith(prefix)][:_REQUESTS_READ_MAX]:
        path = f"{CONTROL_DIR}/{name}"
        return decode_document("control", ControlRequest, root.read(path, SMALL_JSON_BYTES_MAX), path)
    return None
