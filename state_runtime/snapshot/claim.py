"""Claims: a job took over a snapshot of this root, and with it the root. One create-if-absent file names the job.

    claim.json      in a job root or a savepoint's folder

From then on the job of a claimed root cannot run, and no other job can start from it: the claimer removes the root as
soon as it has its own checkpoint (maintenance/delete/claimed.py). A claim is placed by creating the file and *then*
fencing the root (a term and a fencing snapshot, snapshot/fencing.py); a run claims its term and *then* looks for the
file. So a run that did not see the claim is fenced by it, and the state that the claimer reads after its fencing
snapshot is final.

To abandon a claim, remove the file; only while the claimer has no snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass

from state_runtime.base.errors import SnapshotInUse
from state_runtime.base.limits import SMALL_JSON_BYTES_MAX
from state_runtime.snapshot.create_once import Proposal, create_agreed
from state_runtime.snapshot.document import decode_document, encode_document
from state_runtime.snapshot.paths import CLAIM_FILE
from state_runtime.store import Store

__all__ = ["Claim", "claim_root", "read_claim", "refuse_if_claimed"]


@dataclass(frozen=True)
class Claim:
    """The job that took a root over.

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
    """Read the claim on a root; None without a claim.

    Raises:
        CorruptManifest, UnsupportedFormat: it cannot be read; no job may run or start from the root.
    """
    try:
        data = root.read(CLAIM_FILE, SMALL_JSON_BYTES_MAX)
    except FileNotFoundError:
        return None
    return decode_document("claim", Claim, data, f"{root.url}/{CLAIM_FILE}")


def claim_root(root: Store, claim: Claim) -> None:
    """Take a root over. Atomic: of several jobs one does; repeated by the same one it does nothing.

    Raises:
        SnapshotInUse: another job has claimed it. OutcomeUnknown: the claim may be there; repeat the call.
    """
    counts = create_agreed(root, Proposal(CLAIM_FILE, encode_document("claim", claim), claim), lambda: read_claim(root))
    _refuse(root, counts, by=claim.job_uid)


def refuse_if_claimed(root: Store, *, by: str = "") -> None:
    """Refuse every job but the claimer.

    Args:
        by: uid of the calling job; empty is no job's.

    Raises:
        SnapshotInUse: another job has claimed the root; the message names it.
    """
    _refuse(root, read_claim(root), by=by)


def _refuse(root: Store, claim: Claim | None, *, by: str) -> None:
    if claim is not None and claim.job_uid != by:
        raise SnapshotInUse(
            f"{root.url} was claimed by {claim}, which continues from its state and then removes it; no other job may "
            "run it or start from it. Continue with that job. If that job never made a snapshot and is not wanted, or "
            f"if this folder is a copy of a claimed root, remove {CLAIM_FILE} here"
        )
