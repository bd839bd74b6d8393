"""What drivers of `make soak-edges` agree on, and what their target must have by it; no process, no server.

A job root in small: a chain of manifests, each made once, and rows that follow from a seed. A manifest names the epoch's
staged output, as a snapshot of a job does. Whoever wants to write the next one and finds it taken is fenced.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from state_runtime.base.errors import Fenced
from state_runtime.snapshot.manifest import StagedFile, StagedOutput

__all__ = ["SCHEMA", "Difference", "Manifest", "Manifests", "Row", "appended", "difference", "merged", "rows_of"]

SCHEMA: Final = pa.schema(
    [
        ("k", pa.string()),
        ("epoch", pa.int64()),
        ("term", pa.int64()),
        ("place", pa.int64()),
        ("gone", pa.bool_()),
    ]
)
SHARDS: Final = 2
_KEYS: Final = (None, *(f"k{n}" for n in range(29)))
_ROWS_MAX: Final = 12
_SHARE_WITHOUT_ROWS: Final = 0.1
_SHARE_GONE: Final = 0.2

Row = tuple[Any, ...]


def rows_of(name: str, epoch: int, term: int, shard: int) -> list[dict[str, Any]]:
    """What a task stages. It depends on the term: what a driver has staged and no manifest names must not come."""
    draw = random.Random(f"{name} {epoch}")
    if draw.random() < _SHARE_WITHOUT_ROWS:
        return []
    draw = random.Random(f"{name} {epoch} {term} {shard}")
    return [
        {
            "k": draw.choice(_KEYS),
            "epoch": epoch,
            "term": term,
            "place": 1000 * shard + number,
            "gone": draw.random() < _SHARE_GONE,
        }
        for number in range(draw.randint(1, _ROWS_MAX))
    ]


@dataclass(frozen=True)
class Manifest:
    """One step of the chain.

    Attributes:
        term: of the driver that wrote it.
        epoch: the newest.
        staged_by: by epoch, the term that staged what is named of it; of this manifest's new epochs.
        outputs: what is not known to be published, oldest first.
    """

    sequence: int = 0
    term: int = 0
    epoch: int = 0
    staged_by: Mapping[int, int] | None = None
    outputs: tuple[StagedOutput, ...] = ()
    job_uid: str = ""

    def encoded(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decoded(text: str) -> Manifest:
        found = json.loads(text)
        outputs = tuple(
            StagedOutput(o["sink"], o["epoch"], tuple(StagedFile(**file) for file in o["files"]))
            for o in found.pop("outputs")
        )
        staged_by = {int(epoch): term for epoch, term in (found.pop("staged_by") or {}).items()}
        return Manifest(**found, outputs=outputs, staged_by=staged_by)


class Manifests:
    """The chain in a folder. A crash leaves a manifest whole, or none."""

    def __init__(self, folder: Path, job_uid: str) -> None:
        self._folder = folder
        self._job_uid = job_uid
        folder.mkdir(parents=True, exist_ok=True)

    def all(self) -> list[Manifest]:
        """Oldest first."""
        return [Manifest.decoded(path.read_text()) for path in sorted(self._folder.glob("*.json"))]

    def newest(self) -> Manifest:
        return next(iter(self.all()[-1:]), Manifest(job_uid=self._job_uid))

    def create(self, manifest: Manifest) -> None:
        """Make the next one.

        Raises:
            Fenced: another driver has made it.
        """
        waiting = self._folder / f".{os.getpid()}"
        waiting.write_text(manifest.encoded())
        try:
            os.link(waiting, self._folder / f"{manifest.sequence:08d}.json")
        except FileExistsError as error:
            raise Fenced(f"manifest {manifest.sequence} was made by another driver") from error
        finally:
            waiting.unlink()

    def epochs(self) -> list[tuple[int, int]]:
        """Each epoch that a manifest has named, with the term that staged it, in order."""
        return sorted({pair for manifest in self.all() for pair in (manifest.staged_by or {}).items()})


def _in_order(name: str, epochs: Iterable[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    for epoch, term in epochs:
        for shard in range(SHARDS):
            yield from rows_of(name, epoch, term, shard)


def appended(name: str, epochs: Sequence[tuple[int, int]]) -> list[Row]:
    """The rows that a target must have which takes all of them, in order."""
    return [tuple(row.values()) for row in _in_order(name, epochs)]


def merged(name: str, epochs: Sequence[tuple[int, int]]) -> list[Row]:
    """The rows that a target must have which keeps the newest of each key: as a dict keeps them."""
    kept: dict[str | None, dict[str, Any]] = {}
    for row in _in_order(name, epochs):
        kept.pop(row["k"], None)
        if not row["gone"]:
            kept[row["k"]] = row
    return [tuple(value for column, value in row.items() if column != "gone") for row in kept.values()]


@dataclass(frozen=True)
class Difference:
    """Rows of a target beside those that it should have."""

    rows: int
    lost: Counter[Row]
    doubled: Counter[Row]

    @property
    def is_none(self) -> bool:
        return not self.lost and not self.doubled


def difference(found: Iterable[Row], wanted: Iterable[Row]) -> Difference:
    """Compare, whatever their order."""
    there, needed = Counter(found), Counter(wanted)
    return Difference(needed.total(), needed - there, there - needed)
