"""Plans of deletions as documents: made, shown, and executed once, perhaps by somebody else and later.

A plan says what it was made from. Whoever executes it looks again, and refuses it if it is of another job, too old, or
if what it would delete is needed by now. So an old plan never deletes more than a new one would.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.limits import PLAN_BYTES_MAX
from state_runtime.snapshot.document import decode_document, document_kind, encode_document
from state_runtime.snapshot.job_info import JobInfo

__all__ = ["PLAN_AGE_MAX_MS", "Kind", "Made", "check_fresh", "digest_of_plan", "read_plan", "write_plan"]

Kind = Literal["retention", "gc"]
"""The twins: both delete by a plan."""

Plan = TypeVar("Plan")
"""The kind of plan that is read."""

_PLANS = {"gc-plan": "plan of garbage collection", "retention-plan": "plan of retention"}

PLAN_AGE_MAX_MS = 7 * 86_400_000
"""What was decided longer ago is decided again."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a plan was made from.

    Attributes:
        job: as the root calls it.
        place: URL of the root, without credentials; for people.
    """

    job: str
    job_uid: str
    place: str
    at_ms: int
    newest_snapshot_id: int
    term: int


def check_fresh(made: Made, info: JobInfo, place: str, now_ms: int) -> None:
    """Refuse a plan of another root, or an old one.

    Raises:
        InvalidConfiguration: make a new one.
    """
    if made.job_uid != info.uid or made.place != place:
        raise InvalidConfiguration(
            f"the plan was made for job {made.job!r} in {made.place}, not for {info.name!r} in {place}; nothing was "
            "deleted. "
            "Make a new plan"
        )
    if now_ms - made.at_ms > PLAN_AGE_MAX_MS:
        raise InvalidConfiguration(
            f"the plan is {(now_ms - made.at_ms) / 86_400_000:.0f} days old, and one is good for "
            f"{PLAN_AGE_MAX_MS // 86_400_000}; "
            "nothing was deleted. Make a new plan"
        )


def digest_of_plan(kind: str, plan: Any) -> str:
    """What a plan is called: whoever executes the plan of this digest executes what was looked at, to the byte."""
    return hashlib.sha256(encode_document(kind, plan)).hexdigest()


def write_plan(file: Path, kind: str, plan: Any) -> None:
    """Write a plan to a local file.

    Raises:
        InvalidConfiguration: the file cannot be written.
    """
    try:
        file.write_bytes(encode_document(kind, plan))
    except OSError as error:
        raise InvalidConfiguration(
            f"the plan cannot be written to {file}: {error.strerror}; choose another file"
        ) from error


def read_plan(file: Path, kind: str, cls: type[Plan]) -> Plan:
    """Read a plan back.

    Raises:
        InvalidConfiguration: there is no such file, or it is no plan, or one of another kind. CorruptManifest,
            UnsupportedFormat: it is one, and damaged.
    """
    body = _read(file)
    other = document_kind(body)
    if other != kind and other in _PLANS:
        raise InvalidConfiguration(
            f"{file} is a {_PLANS[other]} and no {_PLANS[kind]}: give it to `stillstate {other.removesuffix('-plan')} "
            "apply`. Nothing was deleted"
        )
    if other != kind:
        raise InvalidConfiguration(
            f"{file} is no plan (what `plan --json` prints is none either). Nothing was deleted; "
            f"`stillstate {kind.removesuffix('-plan')} plan JOB --out FILE` writes one"
        )
    return decode_document(kind, cls, body, str(file))


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            body = opened.read(PLAN_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidConfiguration(f"the plan {file} cannot be read: {error.strerror}; make one with --out") from error
    if len(body) > PLAN_BYTES_MAX:
        raise InvalidConfiguration(
            f"the plan {file} has more than {PLAN_BYTES_MAX:,} bytes: it is not a plan of Stillstate"
        )
    return body
