"""The envelope of every JSON file below a job root; pure.

    {"stillstate": "manifest", "format": 3, "sha256": "<see below>", "bytes": 123}\\n
    {…body…}\\n

The first line says the kind of the file and its format version, so that an older reader can refuse before it reads the
body; the digest finds a truncated or altered body. From format 3 on the digest covers kind and format too, as
`<kind> <format>\\n` before the body. Before, a format number that was altered to an older one was not found. A body is
one dataclass, validated strictly by pydantic.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from state_runtime.base.errors import CorruptManifest, UnsupportedFormat
from state_runtime.base.fields import fields_of
from state_runtime.snapshot.strict import ValidationError, parse_json, shown_problem

__all__ = [
    "FORMAT_VERSION",
    "FORMAT_WITH_ROWS",
    "FORMAT_WITH_SOURCES",
    "decode_document",
    "document_kind",
    "encode_document",
    "header_format",
]

FORMAT_VERSION = 4
"""Version of everything below a job root; raised with any change that an older reader would misread.

1: one row per key, without times. 2: many rows per key, times, and schema versions of states. 3: epochs apart from
checkpoints, base tables that are younger than their layer, files of shards. 4: snapshots that were taken over from
other jobs, or gone back to; boundaries with the kept ids. Newer versions read all older ones.
"""

FORMAT_WITH_ROWS = 5
"""For manifests whose newest batch is not done, with the rows in flight. A reader that does not know them would lose
the rows. All other documents have the format before, byte for byte."""

FORMAT_WITH_SOURCES = 6
"""The newest version that is read: for manifests of jobs with named sources, whose positions belong to the names, and
of operators with clocks of their own. A reader that does not know them would give a source the position of another."""

D = TypeVar("D")
NOTHING_YOUNGER: Mapping[str, Any] = MappingProxyType({})
_HEADER_BYTES_MAX = 512


def encode_document(
    kind: str,
    body: Any,
    format_version: int = FORMAT_VERSION,
    left_out: Sequence[tuple[str, str]] = (),
    younger: Mapping[str, Any] = NOTHING_YOUNGER,
    younger_inside: Mapping[str, Mapping[str, Any]] = NOTHING_YOUNGER,
) -> bytes:
    """Return the bytes of a document: canonical JSON, so that equal values are equal bytes.

    Args:
        left_out: fields of fields that are not written while they are empty. They are younger than the format: a reader
            that does not know them passes over them. Those that it would get wrong without have a format of their own.
        younger: the same for fields of the document itself: they are not written while they have this value.
        younger_inside: the same for the items of a field that is a sequence, by the field's name.
    """
    values = _without_younger(fields_of(body), younger)
    for outer in younger_inside.keys() & values.keys():
        values[outer] = [_without_younger(fields_of(each), younger_inside[outer]) for each in values[outer]]
    for outer, inner in left_out:
        given = values.get(outer)
        if isinstance(given, list | tuple):
            values[outer] = [_without_empty(each, inner) for each in given]
        elif given is not None:
            values[outer] = _without_empty(given, inner)
    line = json.dumps(values, default=fields_of, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    header = {
        "stillstate": kind,
        "format": format_version,
        "sha256": _digest(kind, format_version, line),
        "bytes": len(line),
    }
    return json.dumps(header).encode() + b"\n" + line + b"\n"


def _without_younger(fields: Mapping[str, Any], younger: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in younger or value != younger[name]}


def _without_empty(of: Any, name: str) -> Mapping[str, Any]:
    """Return the fields of a value, without one of them if it is empty."""
    fields = of if isinstance(of, Mapping) else fields_of(of)
    return fields if fields[name] else {each: value for each, value in fields.items() if each != name}


def decode_document(kind: str, cls: type[D], data: bytes, where: str) -> D:
    """Check and parse a document.

    Args:
        kind: the required kind of the file.
        cls: frozen dataclass of the body.
        data: the whole file, already bounded in size by the caller.
        where: path for messages.

    Raises:
        UnsupportedFormat: written by a newer version.
        CorruptManifest: any other content that Stillstate does not write.
    """
    header_line, newline, rest = data.partition(b"\n")
    try:
        if not newline or len(header_line) > _HEADER_BYTES_MAX:
            raise ValueError("no header line")
        header = json.loads(header_line)
        if not isinstance(header, dict) or header.get("stillstate") != kind:
            raise ValueError(f"not a {kind} file")
        version = header["format"]
        if type(version) is not int or version < 1:
            raise ValueError("format is not a version number")
        if version > FORMAT_WITH_SOURCES:
            raise UnsupportedFormat(
                f"{where} has format {version}; this version of Stillstate reads up to {FORMAT_WITH_SOURCES}. "
                "Upgrade Stillstate; nothing was changed"
            )
        size = header["bytes"]
        body = rest[:-1]
        if size != len(body) or rest[-1:] != b"\n":
            raise ValueError(f"{len(body)} bytes of body where {size} were written")
        if _digest(kind, version, body) != header["sha256"]:
            raise ValueError("digest differs")
        return parse_json(cls, body)
    except ValidationError as error:
        raise CorruptManifest(f"{where} is damaged: {shown_problem(error)}. {_NEXT}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptManifest(f"{where} is damaged: {error}. {_NEXT}") from error


def _digest(kind: str, format_version: int, line: bytes) -> str:
    covered = f"{kind} {format_version}\n".encode() if format_version >= 3 else b""
    return hashlib.sha256(covered + line).hexdigest()


def document_kind(data: bytes) -> str:
    """Return the kind in a file's header; empty if it is no document. Nothing else of the file is checked."""
    header_line = data[:_HEADER_BYTES_MAX].partition(b"\n")[0]
    try:
        header = json.loads(header_line)
    except (ValueError, RecursionError):
        return ""
    kind = header.get("stillstate") if isinstance(header, dict) else None
    return kind if isinstance(kind, str) else ""


def header_format(data: bytes) -> int:
    """Return the format version of a document that `decode_document` has accepted."""
    return int(json.loads(data.partition(b"\n")[0])["format"])


_NEXT = (
    "It was left as it is. Restore it from a copy; if it is a snapshot, the job can go back to an older one "
    "(`stillstate rollback`, or --from-snapshot)"
)
