"""What the log of a Delta table says of one version, and which of it a stream reads; pure.

By the [protocol](https://github.com/delta-io/delta/blob/master/PROTOCOL.md): a version is a JSON file with an action in
each line. Files are in an order that every reading of them gives again, because positions count them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import unquote

from state_runtime.base.errors import CorruptData, InvalidConfiguration, InvalidData, InvalidPipeline, Unavailable

__all__ = [
    "CHANGE_TYPE",
    "Commit",
    "Metadata",
    "Protocol",
    "TableFile",
    "check_columns",
    "check_files",
    "check_readable",
    "files_to_read",
    "files_waiting",
    "ordered",
    "parse_commit",
]

CHANGE_TYPE: Final = "_change_type"
_READER_VERSION_MAX: Final = 3
_FEATURES: Final = frozenset(
    {"columnMapping", "deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"}
)
"""Readers' features that change nothing, or are looked for where they do: a mapping of columns in the table's settings,
deletion vectors in each file."""
_ACTION_CHARACTERS_MAX: Final = 64 * 2**20


@dataclass(frozen=True)
class TableFile:
    """A Parquet file with rows of a version.

    Attributes:
        path: below the table.
        partition: values of the columns that are not in the file: as text of the log, or typed.
        modified_ms: when it was written.
        change: what its rows are: all of them "insert" or "delete", or "in file": a column of the file says it.
        has_vector: some of its rows are deleted by a deletion vector.
        version, committed_ms: of the commit, for change data.
    """

    path: str
    bytes: int
    partition: Mapping[str, Any]
    modified_ms: int = 0
    change: Literal["insert", "delete", "in file"] = "insert"
    has_vector: bool = False
    version: int = 0
    committed_ms: int = 0


@dataclass(frozen=True)
class Metadata:
    """Of a table at a version.

    Attributes:
        schema: Delta's JSON, which is Spark's.
        settings: such as `delta.enableChangeDataFeed`.
    """

    id: str
    schema: str
    partition_by: Sequence[str]
    settings: Mapping[str, str]


@dataclass(frozen=True)
class Protocol:
    """What a reader has to know."""

    reader_version: int
    features: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Commit:
    """One version.

    Attributes:
        added, removed: files whose rows came or went; not those that were only written anew, as OPTIMIZE does.
        changes: files with the changed rows alone, where the table has change data.
        metadata, protocol: if the version changes them.
        operation: the writer's word for it.
    """

    version: int
    at_ms: int
    added: Sequence[TableFile] = ()
    removed: Sequence[TableFile] = ()
    changes: Sequence[TableFile] = ()
    metadata: Metadata | None = None
    protocol: Protocol | None = None
    operation: str = ""

    @property
    def changes_rows(self) -> bool:
        """Whether rows went, or have other values."""
        return bool(self.removed or self.changes)


def parse_commit(version: int, text: str) -> Commit:
    """Read the file of a version.

    Raises:
        CorruptData: it is none.
    """
    if len(text) > _ACTION_CHARACTERS_MAX:
        raise CorruptData(
            f"version {version} of the Delta table's log has {len(text):,} characters, more than "
            f"{_ACTION_CHARACTERS_MAX:,}; such a commit is not read"
        )
    try:
        actions = [json.loads(line) for line in text.splitlines() if line.strip()]
        return _commit(version, [item for action in actions for item in action.items()])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptData(
            f"version {version} of the Delta table's log cannot be read ({type(error).__name__}): repair the table"
        ) from error


def _commit(version: int, actions: Sequence[tuple[str, Any]]) -> Commit:
    info: Mapping[str, Any] = next((of for kind, of in actions if kind == "commitInfo"), {})
    at_ms = int(info.get("inCommitTimestamp") or info.get("timestamp") or 0)

    def files(kind: str, change: Literal["insert", "delete", "in file"]) -> list[TableFile]:
        found = [of for name, of in actions if name == kind and (change == "in file" or of["dataChange"])]
        return ordered(_file(of, change, version, at_ms) for of in found)

    metadata = next((of for kind, of in actions if kind == "metaData"), None)
    protocol = next((of for kind, of in actions if kind == "protocol"), None)
    return Commit(
        version=version,
        at_ms=at_ms,
        added=files("add", "insert"),
        removed=files("remove", "delete"),
        changes=files("cdc", "in file"),
        metadata=None if metadata is None else _metadata(metadata),
        protocol=None if protocol is None else _protocol(protocol),
        operation=str(info.get("operation", "")),
    )


def _file(of: Mapping[str, Any], change: Literal["insert", "delete", "in file"], version: int, at_ms: int) -> TableFile:
    return TableFile(
        path=unquote(of["path"]),
        bytes=int(of.get("size") or 0),
        partition=dict(of.get("partitionValues") or {}),
        modified_ms=int(of.get("modificationTime") or 0),
        change=change,
        has_vector=of.get("deletionVector") is not None,
        version=version,
        committed_ms=at_ms,
    )


def _metadata(of: Mapping[str, Any]) -> Metadata:
    return Metadata(of["id"], of["schemaString"], tuple(of["partitionColumns"]), dict(of.get("configuration") or {}))


def _protocol(of: Mapping[str, Any]) -> Protocol:
    return Protocol(int(of["minReaderVersion"]), frozenset(of.get("readerFeatures") or ()))


def ordered(files: Any) -> list[TableFile]:
    """Return files by the time of their writing, then by name: the order in which positions count them."""
    return sorted(files, key=lambda file: (file.modified_ms, file.path, file.change))


def files_to_read(commit: Commit, where: str, *, changes: bool, skip_changes: bool) -> Sequence[TableFile]:
    """Return the files of a version that a stream reads.

    Args:
        where: the source, for messages.
        changes: the rows that changed, with what happened to them, and not only new ones.
        skip_changes: versions that change rows are passed over.

    Raises:
        InvalidConfiguration: the version removes or changes rows, and the source was not told what to do.
    """
    if changes or skip_changes or not commit.changes_rows:
        return files_waiting(commit, changes=changes, skip_changes=skip_changes)
    raise InvalidConfiguration(
        f"{where}: version {commit.version} of the table removes or changes rows ({commit.operation or 'unnamed'}), "
        "and the source reads rows that are added. The state is kept. Give it changes=True to read the changes (the "
        "table needs delta.enableChangeDataFeed), or skip_changes=True to pass over such versions; or begin anew "
        f"behind it, with starting={commit.version + 1} under another name of the source"
    )


def files_waiting(commit: Commit, *, changes: bool, skip_changes: bool) -> Sequence[TableFile]:
    """Return the files of a version that wait for a stream: those of `files_to_read`, and of a version that ends the
    run those that it adds."""
    if changes:
        return commit.changes or [*commit.removed, *commit.added]
    return () if commit.changes_rows and skip_changes else commit.added


def check_files(files: Sequence[TableFile], partition_by: Sequence[str], where: str) -> None:
    """Refuse files that cannot be read exactly.

    Raises:
        InvalidConfiguration: rows are deleted by vectors, or the file belongs to another table.
        InvalidData: the log does not name a value of a partition column.
    """
    for file in files:
        if file.has_vector:
            raise InvalidConfiguration(
                f"{where}: rows of {file.path} are deleted by a deletion vector, which is not supported here: it would "
                "give rows that are gone. Write the table without them (REORG TABLE … APPLY (PURGE), and "
                "delta.enableDeletionVectors=false), and start again"
            )
        if "://" in file.path or file.path.startswith("/") or ".." in file.path.split("/"):
            raise InvalidConfiguration(
                f"{where}: {file.path} lies outside of the table, which is a shallow clone: read the table that it is "
                "a clone of, or make a deep one"
            )
        missing = [column for column in partition_by if column not in file.partition]
        if missing:
            raise InvalidData(
                f"{where}: the table's log names no value of partition column {missing[0]!r} for {file.path}, which "
                "was removed by a writer that does not say it: its rows cannot be told. Pass over the version with a "
                "new start position"
            )


def check_readable(metadata: Metadata, protocol: Protocol, where: str, *, changes: bool) -> None:
    """Refuse a table that would be read wrong.

    Raises:
        InvalidConfiguration: its log says what this reader does not know, or it has no change data.
    """
    unknown = sorted(protocol.features - _FEATURES)
    if protocol.reader_version > _READER_VERSION_MAX or unknown:
        raise InvalidConfiguration(
            f"{where}: the table asks readers for {', '.join(unknown) or f'version {protocol.reader_version}'}, which "
            "is not supported here: a reader that does not know it reads wrong rows. Drop the feature from the table, "
            "or read with Spark's own connector"
        )
    mapping = metadata.settings.get("delta.columnMapping.mode", "none")
    if mapping != "none":
        raise InvalidConfiguration(
            f"{where}: the table maps its columns (delta.columnMapping.mode={mapping}), which is not supported here: "
            "write it anew without, or read with Spark's own connector"
        )
    if changes and metadata.settings.get("delta.enableChangeDataFeed", "").lower() != "true":
        raise InvalidConfiguration(
            f"{where}: the table has no change data (changes=True). Set its property "
            "delta.enableChangeDataFeed=true (deltalake: DeltaTable(…).alter.set_table_properties); changes are there "
            "from that version on, where the source may begin"
        )


def check_columns(ours: str, then: Metadata, newest: Metadata, where: str) -> None:
    """Compare the columns that this run reads with those of a version.

    A version may lack columns, which are null then. A run that began before the table got new columns ends, and reads
    them when it is started again.

    Args:
        ours: schema with which the run began.

    Raises:
        Unavailable: the table has got other columns since the run began. InvalidPipeline: a restart does not help.
    """
    mine, its = _fields(json.loads(ours)), _fields(json.loads(then.schema))
    if _fits(its, mine):
        return
    new = sorted(set(its) - set(mine))
    other = sorted(name for name in set(its) & set(mine) if not _fits(its[name], mine[name]))
    told = f"new columns ({', '.join(new)})" if new else f"column {other[0]!r} with another type"
    if _fields(json.loads(newest.schema)) != mine:
        raise Unavailable(
            f"{where}: the table has got {told} since the run began. Start again: the job then reads the columns that "
            "the table has now, and null where a file lacks one. The position is kept"
        )
    raise InvalidPipeline(
        f"{where}: a version that is still to be read has {told}, and the table does not have it now: its rows do not "
        "fit. Pass over it, with another start position under another name of the source"
    )


def _fields(kind: Any) -> Any:
    """Return a type without comments and without what may be null: of a struct, the types by name."""
    if isinstance(kind, dict) and kind.get("type") == "struct":
        return {of["name"]: _fields(of["type"]) for of in kind["fields"]}
    if isinstance(kind, dict):
        inner = ("elementType", "keyType", "valueType")
        return [kind["type"], *(_fields(kind[name]) for name in inner if name in kind)]
    return kind


def _fits(its: Any, mine: Any) -> bool:
    """Return whether what has one type can be read as another, which has the same fields or more."""
    if isinstance(its, dict) and isinstance(mine, dict):
        return all(name in mine and _fits(of, mine[name]) for name, of in its.items())
    if isinstance(its, list) and isinstance(mine, list):
        return len(its) == len(mine) and all(map(_fits, its, mine))
    return bool(its == mine)
