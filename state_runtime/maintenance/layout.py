"""Kinds of objects below a job root, by name; pure. An unknown name is foreign: it is reported, and kept."""

from __future__ import annotations

import re
from typing import Literal

__all__ = ["DATA_KINDS", "ObjectKind", "kind_of", "number_in"]

ObjectKind = Literal[
    "segment",
    "direct",
    "table",
    "source-log",
    "listing",
    "shard-file",
    "staged",
    "manifest",
    "boundary",
    "mark",
    "pin",
    "record",
    "record-pin",
    "term",
    "heartbeat",
    "epochs",
    "request",
    "answer",
    "probe",
    "job",
    "claim",
    "savepoint",
    "moving",
    "conversion",
    "building",
    "moved",
    "published",
    "migration",
    "temporary",
]

DATA_KINDS: frozenset[str] = frozenset({"segment", "direct", "table", "source-log", "listing", "shard-file", "staged"})
"""The kinds that manifests name. An object of another kind is never deleted because a manifest named it."""

_NUMBER = r"(?P<number>[0-9]{20})"
_PART = r"[A-Za-z0-9._=-]+"
_PATTERNS: tuple[tuple[ObjectKind, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern + r"\Z"))  # type: ignore[misc]
    for kind, pattern in (
        # First: a temporary file is stored in the folder of the object that it was to become.
        ("temporary", rf"({_PART}/)*\.tmp-[0-9a-f]+"),
        ("direct", rf"changelog/{_NUMBER}/(direct|rows)-{_PART}\.seg"),
        ("segment", rf"changelog/{_NUMBER}/{_PART}\.seg"),
        ("source-log", rf"tables/_sources/{_PART}/{_PART}\.log"),
        ("table", rf"tables/{_PART}/{_PART}/{_PART}\.parquet"),
        ("listing", rf"files/{_NUMBER}/{_PART}\.json"),
        ("shard-file", rf"files/{_NUMBER}/{_PART}/{_PART}"),
        ("staged", rf"outputs/{_PART}/{_NUMBER}/{_PART}"),
        ("manifest", rf"snapshots/{_NUMBER}/manifest\.json"),
        ("boundary", rf"boundary/{_NUMBER}\.json"),
        ("mark", rf"boundary/run-{_NUMBER}-{_PART}"),
        ("mark", rf"boundary/root-{_PART}"),
        ("pin", rf"pins/{_NUMBER}-[0-9A-Za-z]+\.json"),
        ("record", rf"materializations/{_NUMBER}\.json"),
        ("record-pin", rf"materializations/{_NUMBER}\.started\.json"),
        ("term", rf"terms/{_NUMBER}\.json"),
        ("heartbeat", rf"terms/{_NUMBER}\.heartbeat\.json"),
        ("epochs", rf"terms/{_NUMBER}\.epochs\.json"),
        ("answer", rf"control/{_NUMBER}-[a-z]+-[0-9A-Za-z]+\.answer\.json"),
        ("request", rf"control/{_NUMBER}-[a-z]+-[0-9A-Za-z]+\.json"),
        ("probe", r"_probe-[0-9a-f]+"),
        ("job", r"job\.json"),
        ("claim", r"claim\.json"),
        ("moving", r"moving\.json"),
        ("conversion", r"conversion\.json"),
        ("building", r"building\.json"),
        ("moved", r"moved\.json"),
        ("published", r"published\.json"),
        ("migration", rf"migrations/{_NUMBER}\.json"),
        ("savepoint", r"savepoint(-[1-9][0-9]{0,8})?\.json"),
    )
)


def kind_of(path: str) -> ObjectKind | None:
    """Return the kind of an object below a job root, by its name; None if Stillstate does not write such names. The
    folders of savepoints are roots themselves."""
    return next((kind for kind, pattern in _PATTERNS if pattern.match(path)), None)


def number_in(path: str) -> int:
    """Return the number in a name: a term, snapshot, record or sequence; 0 if the name has none."""
    for _, pattern in _PATTERNS:
        found = pattern.match(path)
        if found is not None:
            return int(found.groupdict().get("number") or 0)
    return 0
