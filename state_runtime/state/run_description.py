"""The Arrow backend's description of a version: its states' runs and merges, as JSON."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from state_runtime.base.fields import fields_of
from state_runtime.state.backend import LocalFile
from state_runtime.state.runs import Layout, Merge, Run, RunFile, Version, add_run
from state_runtime.state.sealed_files import parsed_description
from state_runtime.state.table import HASH_MAX

__all__ = ["describe_whole", "description_of", "is_run_name", "parse_description"]

_FORMAT = 4
_RUN_NAME = re.compile(r"[0-9a-f]{16}-[0-9]{1,4}\.arrow\Z")


def is_run_name(name: str) -> bool:
    """Return whether a file name is one that this backend gives: a version's id and a number."""
    return _RUN_NAME.match(name) is not None


def description_of(described: Version) -> str:
    """Encode a version: the inverse of `parse_description`."""
    return json.dumps({"format": _FORMAT, **fields_of(described)}, default=fields_of)


def parse_description(body: bytes | str, version: str) -> Version:
    """Parse a version that the backend wrote.

    Raises:
        any of `sealed_files.UNREADABLE` but OSError: it cannot be read.
    """
    described = parsed_description(body, version, _FORMAT)
    states = {str(state): _parse_layout(layout) for state, layout in described["states"].items()}
    found = Version(
        version=version,
        parent=str(described["parent"]),
        states=states,
        snapshot_id=int(described["snapshot_id"]),
        epoch=str(described["epoch"]),
        restored_from=str(described["restored_from"]),
    )
    for file in found.files:
        if not is_run_name(file.file):
            raise ValueError(f"a run's file has the name {file.file[:80]!r}, which this backend gives to no file")
    return found


def describe_whole(version: str, runs: Mapping[str, tuple[pa.Buffer, int]]) -> tuple[tuple[LocalFile, ...], str]:
    """Return the files and the description of a version that was never on a disk.

    Args:
        runs: per state one run (`encode_run`), and its rows.
    """
    layouts: dict[str, Layout] = {}
    files = []
    for number, (state, (body, rows)) in enumerate(runs.items()):
        digest, check = hashlib.sha256(body).hexdigest(), xxhash.xxh3_128_hexdigest(body)
        file = RunFile(f"{version}-{number}.arrow", rows, body.size, digest, check=check)
        layouts[state] = add_run(Layout(), file)
        files.append(LocalFile(file.file, file.bytes, file.digest, Path(file.file)))
    return tuple(files), description_of(Version(version, "", layouts))


def _parse_file(stored: Any) -> RunFile:
    low, high = int(stored["low"]), int(stored["high"])
    if not 0 <= low <= high <= HASH_MAX:
        raise ValueError(f"a run's file covers the hashes from {low} to {high}, which is no range of hashes")
    return RunFile(
        file=str(stored["file"]),
        rows=int(stored["rows"]),
        bytes=int(stored["bytes"]),
        digest=str(stored["digest"]),
        low=low,
        high=high,
        check=str(stored.get("check", "")),
    )


def _parse_layout(stored: Any) -> Layout:
    runs = tuple(
        Run(
            tuple(_parse_file(piece) for piece in run["pieces"]),
            int(run["low"]),
            None if run["taken_ms"] is None else int(run["taken_ms"]),
        )
        for run in stored["runs"]
    )
    merges = tuple(Merge(int(m["start"]), int(m["count"])) for m in stored["merges"])
    if any(not (m.start >= 0 and m.count > 0 and m.start + m.count < len(runs)) for m in merges):
        raise ValueError(f"a merge names runs that the version does not have; it has {len(runs)}")
    return Layout(runs, merges)
