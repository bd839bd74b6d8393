"""Claims: a job took over a snapshot of this root, and with it the root. One create-if-absent file says who.

    claim.json      in a job root or a savepoint's folder

From then on nobody runs the job of a claimed root, and nobody else starts from it: the claimer removes the root as soon
as it has a checkpoint of its own (maintenance/delete/claimed.py). A claim is placed by creating the file and *then*
fencing the root (a term and a fencing snapshot, snapshot/commit.py); a run claims its term and *then* looks for the
file. So a run that did not see the claim is fenced by it, and what the claimer reads after its fencing snapshot is
final.

A claim that is not wanted any more is taken back by removing the file, as long as the claimer has no snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass

from state_runtime.base.errors import SnapshotInUse
from state_runtime.base.limits import SMALL_JSON_BYTES_MAX
from state_runtime.snapshot.document import decode_document, encode_document
from state_runtime.snapshot.paths import CLAIM_FILE
from state_runtime.store import Created, Store

__all__ = ["Claim", "claim_root", "read_claim", "refuse_if_claimed"]


@dataclass(frozen=True)
class Claim:
    """Who took a root over.

    Attributes:
        job, job_uid: the claimer.
        place: URL of the claimer's root, without credentials.
    """

    job: str
    job_uid: str
    place: str
    at_ms: int

    def __str__(self) -> str:
        return f"job {self.job!r} ({self.place})"


def read_claim(root: Store) -> Claim | None:
    """The claim on a root; None if it is its own.

    Raises:
        CorruptManifest, UnsupportedFormat: it cannot be read; nobody may run or start from the root.
    """
    try:
        data = root.read(CLAIM_FILE, SMALL_JSON_BYTES_MAX)
    except FileNotFoundError:
        return None
    return decode_document("claim", Claim, data, f"{root.url}/{CLAIM_FILE}")


def claim_root(root: Store, claim: Claim) -> None:
    """Take a root over. Atomic: of several jobs one does; repeated by the same one it does nothing.

    Raises:
        SnapshotInUse: another job has claimed it. OutcomeUnknown: it may be there; repeat the call.
    """
    if root.create(CLAIM_FILE, encode_document("claim", claim)) is not Created.MINE:
        refuse_if_claimed(root, by=claim.job_uid)


def refuse_if_claimed(root: Store, *, by: str = "") -> None:
    """Turn away everybody but the claimer.

    Args:
        by: uid of the job that asks; empty is nobody's.

    Raises:
        SnapshotInUse: another job has claimed the root; the message names it.
    """
    claim = read_claim(root)
    if claim is not None and claim.job_uid != by:
        raise SnapshotInUse(
            f"{root.url} was claimed by {claim}, which goes on with its state and removes it; nobody else runs it or "
            "starts from it. "
            "Go on with that job. If it never came to a snapshot of its own and is not wanted, or if this is a copy "
            "that was made "
            f"of a claimed root, remove {CLAIM_FILE} here"
        )
