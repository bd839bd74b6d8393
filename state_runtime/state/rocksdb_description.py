"""The RocksDB backend's description of a version: the database's files and the states in it, as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from state_runtime.base.fields import fields_of
from state_runtime.state.rocksdb_codec import STATES_MAX
from state_runtime.state.sealed_files import parsed_description
from state_runtime.state.table import StateSchema

__all__ = [
    "RocksFile",
    "RocksState",
    "RocksVersion",
    "description_of",
    "is_database_file",
    "parse_description",
    "with_new_states",
]

_FORMAT = 2
_DB_FILE = re.compile(r"(?:CURRENT|MANIFEST-[0-9]{6,20}|[0-9]{6,20}\.sst)\Z")


@dataclass(frozen=True)
class RocksFile:
    """One file of the database; the digest is SHA-256."""

    name: str
    bytes: int
    digest: str


@dataclass(frozen=True)
class RocksState:
    """One state of a version.

    Attributes:
        number: prefix of its keys; never given to another state of the shard.
        columns: its Arrow schema as text: another schema is another state.
        cursor: where the sweep for expired rows continues, a key in hexadecimal; "" is the beginning.
    """

    number: int
    columns: str
    cursor: str


@dataclass(frozen=True)
class RocksVersion:
    """The parts of a version; immutable. See `Stamp` and `StoredVersion` for the last three.

    Attributes:
        config: rocksdict's note beside the database when it was written.
    """

    version: str
    parent: str
    config: str
    files: tuple[RocksFile, ...]
    states: Mapping[str, RocksState]
    snapshot_id: int = 0
    epoch: str = ""
    restored_from: str = ""


def is_database_file(name: str) -> bool:
    """Return whether a file name is one of those of a closed database."""
    return _DB_FILE.match(name) is not None


def description_of(described: RocksVersion) -> str:
    """Encode a version: the inverse of `parse_description`."""
    return json.dumps({"format": _FORMAT, **fields_of(described)}, default=fields_of)


def parse_description(body: bytes | str, version: str) -> RocksVersion:
    """Parse a version that `description_of` wrote.

    Raises:
        any of `sealed_files.UNREADABLE` but OSError: it cannot be read.
    """
    described = parsed_description(body, version, _FORMAT)
    files = tuple(RocksFile(str(f["name"]), int(f["bytes"]), str(f["digest"])) for f in described["files"])
    for file in files:
        if not is_database_file(file.name):
            raise ValueError(f"a file has the name {file.name[:80]!r}, which RocksDB gives to no file")
    states = {
        str(name): RocksState(int(s["number"]), str(s["columns"]), bytes.fromhex(s["cursor"]).hex())
        for name, s in described["states"].items()
    }
    for state in states.values():
        if not 0 <= state.number < STATES_MAX:
            raise ValueError(f"a state has the number {state.number}; numbers are from 0 to {STATES_MAX - 1}")
    return RocksVersion(
        version=version,
        parent=str(described["parent"]),
        config=str(described["config"]),
        files=files,
        states=states,
        snapshot_id=int(described["snapshot_id"]),
        epoch=str(described["epoch"]),
        restored_from=str(described["restored_from"]),
    )


def with_new_states(stored: Mapping[str, RocksState], schemas: Mapping[str, StateSchema]) -> dict[str, RocksState]:
    """Return a version's states and those that the operator got since.

    Raises:
        ValueError: a state has other columns now.
    """
    states = dict(stored)
    for name, schema in schemas.items():
        columns = schema.arrow.to_string(truncate_metadata=False)
        if name not in states:
            number = 1 + max((state.number for state in states.values()), default=-1)
            states[name] = RocksState(number, columns, "")
        elif states[name].columns != columns:
            raise ValueError(f"state {name} has other columns")
    return states
