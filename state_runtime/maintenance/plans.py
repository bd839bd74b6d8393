"""Plans of deletions as documents: made, shown, and executed once, perhaps by somebody else and later.

A plan says what it was made from. Whoever executes it looks again, and refuses it if it is of another job, too old, or
if what it would delete is needed by now. So an old plan never deletes more than a new one would.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self

from state_runtime.base.clock import Clock
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.limits import PLAN_BYTES_MAX
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.document import decode_document, document_kind, encode_document
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.store import Store

__all__ = ["PLAN_AGE_MAX_MS", "Kind", "Made", "PlanDocument", "check_fresh"]

Kind = Literal["retention", "gc"]
"""The twins: both delete by a plan."""

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
            "deleted. Make a new plan"
        )
    if now_ms - made.at_ms > PLAN_AGE_MAX_MS:
        raise InvalidConfiguration(
            f"the plan is {(now_ms - made.at_ms) / 86_400_000:.0f} days old, and one is good for "
            f"{PLAN_AGE_MAX_MS // 86_400_000}; nothing was deleted. Make a new plan"
        )


@dataclass(frozen=True)
class PlanDocument(ABC):
    """What every plan of deletions has.

    Attributes:
        KIND: of the document.
    """

    KIND: ClassVar[str]

    made: Made

    @property
    def digest(self) -> str:
        """What the plan is called: whoever executes the plan of this digest executes what was looked at, to the
        byte."""
        return hashlib.sha256(encode_document(self.KIND, self)).hexdigest()

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether it deletes nothing."""

    def write(self, file: Path) -> None:
        """Write it to a local file.

        Raises:
            InvalidConfiguration: the file cannot be written.
        """
        try:
            file.write_bytes(encode_document(self.KIND, self))
        except OSError as error:
            raise InvalidConfiguration(
                f"the plan cannot be written to {file}: {error.strerror}; choose another file"
            ) from error

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read one back.

        Raises:
            InvalidConfiguration: there is no such file, or it is no plan, or one of another kind. CorruptManifest,
                UnsupportedFormat: it is one, and damaged.
        """
        body = _read(file)
        other = document_kind(body)
        if other != cls.KIND and other in _PLANS:
            raise InvalidConfiguration(
                f"{file} is a {_PLANS[other]} and no {_PLANS[cls.KIND]}: give it to "
                f"`stillstate {other.removesuffix('-plan')} apply`. Nothing was deleted"
            )
        if other != cls.KIND:
            raise InvalidConfiguration(
                f"{file} is not a plan (neither is the output of `plan --json`). Nothing was deleted; "
                f"`stillstate {cls.KIND.removesuffix('-plan')} plan JOB --out FILE` writes one"
            )
        return decode_document(cls.KIND, cls, body, str(file))

    def unfit(self, root: Store, clock: Clock) -> list[str]:
        """Why it is not one of this root, or too old; empty if it is one.

        Raises:
            JobNotFound: the job is gone. CorruptManifest, StoreUnavailable: that is not known.
        """
        try:
            check_fresh(self.made, Catalog.of_root(root, clock).job_info(), root.url, clock.now_ms())
        except InvalidConfiguration as error:
            return [str(error)]
        return []


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
