"""Which source of a pipeline a position in a snapshot belongs to: by name, whatever the order in the pipeline; pure.

Spark numbers the sources of a query by their place in its plan, and after a restart gives each the position of its
number. Stillstate keeps numbers of its own in snapshots. A name keeps its number for the life of the job, so sources
may be added, removed and written in another order between two starts; only where Spark's checkpoint directory is read
and primed do Spark's numbers count. Without names both are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from state_runtime.base.errors import InvalidPipeline
from state_runtime.pipeline.graph import is_given
from state_runtime.snapshot.manifest import SourceFile, SourcePosition

__all__ = ["PLAIN", "SourceName", "SourceNumbers", "source_numbers"]

_HEADER_LINES = 2
_LOG_VERSION = "v1"
_NOTHING_READ = "-"


@dataclass(frozen=True)
class SourceName:
    """A source of a pipeline.

    Attributes:
        streams: how many sources of Spark it is made of; several after a union or a join inside one read(), 0 if its
            plan does not tell.
        was: the name that it had in snapshots until now; None: the same.
    """

    name: str
    streams: int = 1
    was: str | None = None


@dataclass(frozen=True)
class SourceNumbers:
    """The numbers in snapshots of the sources of a run.

    Attributes:
        names: by number; empty if no source has a name.
        numbers: of each of Spark's sources, by its place; empty if they are Spark's own.
        absent: the position of the sources that the pipeline does not read, with those of all others; None if it reads
            all.
    """

    names: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    absent: SourcePosition | None = None

    def number(self, place: int) -> int:
        """Return the number of one of Spark's sources."""
        return self.numbers[place] if self.numbers else place

    def place(self, number: int) -> int:
        """Return Spark's number of a source that the pipeline reads."""
        return self.numbers.index(number) if self.numbers else number

    def is_read(self, number: int) -> bool:
        """Return whether the pipeline reads a source."""
        return not self.numbers or number in self.numbers

    def by_place(self, offsets: str) -> str:
        """Return the text of an offsets file as Spark reads it; a source that is new has read nothing."""
        if not self.numbers or not offsets:
            return offsets
        header, lines = _parts(offsets)
        read = [lines[number] if number < len(lines) else _NOTHING_READ for number in self.numbers]
        return "\n".join([*header, *read])

    def by_number(self, offsets: str) -> str:
        """Return the text of an offsets file as snapshots have it; sources that are not read stay where they were."""
        if not self.numbers or not offsets:
            return offsets
        header, read = _parts(offsets)
        if len(read) != len(self.numbers):
            raise InvalidPipeline(
                f"Spark reads {len(read)} sources, and the pipeline has {len(self.numbers)}; if one DataFrame is used "
                "twice inside a read(), make a frame for each use"
            )
        _, stayed = _parts(self.absent.offsets) if self.absent is not None else ((), [])
        lines = [stayed[n] if n < len(stayed) else _NOTHING_READ for n in range(len(self.names))]
        for number, line in zip(self.numbers, read, strict=True):
            lines[number] = line
        return "\n".join([*header, *lines])

    @property
    def away(self) -> tuple[int, ...]:
        """The numbers of the sources that are not read, as the user has allowed."""
        return tuple(n for n in range(len(self.names)) if not self.is_read(n))

    def restated(self, position: SourcePosition | None) -> SourcePosition | None:
        """Return a position of before this run with what the run knows of its sources: it may read nothing for long,
        and the next start must not ask again."""
        if position is None or not self.numbers:
            return position
        known = len(_names_of(position))
        return replace(position, names=self.names[:known], away=tuple(n for n in self.away if n < known))

    @property
    def absent_logs(self) -> tuple[int, ...]:
        """The numbers of the sources that are not read any more and have a log of seen files."""
        return tuple(n for n in self.absent.logs if not self.is_read(n)) if self.absent is not None else ()

    @property
    def absent_files(self) -> tuple[SourceFile, ...]:
        """The files of the sources that are not read any more."""
        files = self.absent.files if self.absent is not None else ()
        return tuple(file for file in files if not self.is_read(int(file.path.partition("/")[0])))


PLAIN = SourceNumbers()
"""Of a pipeline without names, whose sources have Spark's own numbers."""


def source_numbers(
    sources: Sequence[SourceName], before: SourcePosition | None, *, allow_dropped: bool = False
) -> SourceNumbers:
    """Return the numbers of a pipeline's sources, from the snapshot that a run goes on from.

    Args:
        sources: in the order in which Spark has them.
        before: None if no snapshot has a position.
        allow_dropped: sources of the snapshot may be missing in the pipeline. Their positions are kept; one that comes
            back under its name reads on from there.

    Raises:
        InvalidPipeline: a source is missing, or cannot be matched.
    """
    renamed = {source.was: source.name for source in sources if source.was is not None}
    stored = [renamed.get(name, name) for name in _names_of(before)]
    if not any(stored):
        unnamed = [source.name for source in sources if not is_given(source.name) for _ in range(source.streams)]
        is_known = all(source.streams for source in sources)
        is_as_it_was = before is None or len(sources) == 1 or len(unnamed) == len(stored) or not is_known
        if is_as_it_was and not any(is_given(source.name) for source in sources):
            return PLAIN
        if len(unnamed) == len(stored):
            stored = unnamed  # in the order that Spark read them in
    names, numbers = list(stored), list[int]()
    for source in sources:
        known = [number for number, name in enumerate(stored) if name == source.name]
        if known and len(known) != source.streams:
            raise InvalidPipeline(
                f"source {source.name!r} is made of {source.streams} streams of Spark, and of {len(known)} in the "
                "snapshot to go on from; which position belongs to which stream is not known. Give each stream a "
                "read() and a name of its own, and union them"
            )
        new = range(len(names), len(names) + source.streams)
        numbers += known or new
        names += [] if known else [source.name] * source.streams
    unread = [number for number in range(len(stored)) if number not in numbers]
    away = before.away if before is not None else ()
    missing = list(dict.fromkeys(stored[number] for number in unread if number not in away))
    if missing and not allow_dropped:
        raise InvalidPipeline(_missing(missing, sources, stored))
    return SourceNumbers(tuple(names), tuple(numbers), before if unread else None)


def _names_of(position: SourcePosition | None) -> Sequence[str]:
    if position is None:
        return ()
    return position.names or [""] * len(position.offsets.split("\n")[_HEADER_LINES:])


def _missing(missing: Sequence[str], sources: Sequence[SourceName], stored: Sequence[str]) -> str:
    new = [source.name for source in sources if source.name not in stored]
    told = f"the snapshot to go on from has the position of {_told(missing)}, which the pipeline does not read"
    if new:
        return (
            f"{told}; {_told(new)} is new. If it is the same one, say so: read(…, name={new[0]!r}, "
            f"was={missing[0]!r}), or of a query query(…, names={{{new[0]!r}: {missing[0]!r}}}). If it is not, start "
            "once with --allow-dropped-state (allow_dropped_state=True)"
        )
    return (
        f"{told}. To go on without it, start once with --allow-dropped-state (allow_dropped_state=True): its position "
        "is kept, and if it comes back under this name it reads on from there"
    )


def _told(names: Sequence[str]) -> str:
    return ", ".join(f"source {name!r}" if name else "the source without a name" for name in names)


def _parts(offsets: str) -> tuple[Sequence[str], list[str]]:
    """Return the header lines of an offsets file, and the line of each source.

    Raises:
        InvalidPipeline: it is of a version whose lines may not be in the order of sources.
    """
    header, lines = offsets.split("\n")[:_HEADER_LINES], offsets.split("\n")[_HEADER_LINES:]
    if header[0] != _LOG_VERSION:
        raise InvalidPipeline(
            f"Spark writes its offsets in version {header[0]!r}, and positions by name are only known of "
            f"{_LOG_VERSION}. If read() calls Spark's readStream.name(…), leave that out: read(…, name=) names the "
            "source. Nothing was committed"
        )
    return header, lines
