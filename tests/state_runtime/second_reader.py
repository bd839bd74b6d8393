"""A reader of job roots, written from docs/format.md alone: plain Python and pyarrow, no line of Stillstate. It reads a local folder.

Slow and simple: rows are dictionaries, and every rule of the document is one function. What it does not read is RocksDB's files.
"""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

FORMATS = (1, 2, 3, 4, 5, 6)
MAGIC = b"STSEG001"
MIB = 1 << 20
BYTES_MAX = {"manifest": 8 * MIB, "boundary": 16 * MIB, "shard-files": 256 * MIB}
PATH = re.compile(r"[A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*\Z")
Row = dict[str, Any]


class Damaged(Exception):
    """It is not what the document says."""


def check(condition: bool, what: str) -> None:
    if not condition:
        raise Damaged(what)


# --- files and documents -----------------------------------------------------------------------------------------


class Root:
    """A job root, or a savepoint's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def bytes_of(self, path: str) -> bytes:
        parts = path.split("/")
        check(len(path) <= 1024 and PATH.match(path) is not None and not {".", ".."} & set(parts), f"path {path!r}")
        return (self.folder / path).read_bytes()

    def file(self, entry: Row) -> bytes:
        data = self.bytes_of(entry["path"])
        check(len(data) == entry["bytes"], f"{entry['path']}: size")
        check(hashlib.sha256(data).hexdigest() == entry["digest"], f"{entry['path']}: digest")
        return data

    def document(self, kind: str, path: str, data: bytes | None = None) -> Row:
        data = self.bytes_of(path) if data is None else data
        check(len(data) <= BYTES_MAX.get(kind, 256 * 1024), f"{path}: too large")
        head, feed, rest = data.partition(b"\n")
        check(bool(feed) and len(head) <= 512, f"{path}: header")
        header = json.loads(head)
        check(header["stillstate"] == kind, f"{path}: kind {header['stillstate']}")
        version = header["format"]
        check(version in FORMATS, f"{path}: format {version}")
        body = rest[:-1]
        check(rest[-1:] == b"\n" and len(body) == header["bytes"], f"{path}: length")
        covered = f"{kind} {version}\n".encode() + body if version >= 3 else body
        check(hashlib.sha256(covered).hexdigest() == header["sha256"], f"{path}: digest")
        parsed: Row = json.loads(body)
        return parsed

    def numbers(self, folder: str, suffix: str = "") -> list[int]:
        """The 20-digit names of a folder."""
        there = self.folder / folder
        names = [p.name for p in there.iterdir()] if there.is_dir() else []
        stems = [n.removesuffix(suffix) for n in names if n.endswith(suffix)]
        return sorted(int(s) for s in stems if re.fullmatch(r"[0-9]{20}", s))

    # --- which snapshots exist -----------------------------------------------------------------------------------

    def snapshot_ids(self) -> list[int]:
        found = self.numbers("snapshots")
        sequences = self.numbers("boundary", ".json")
        if sequences:
            boundary = self.document("boundary", f"boundary/{sequences[-1]:020d}.json")
            found = [i for i in found if i > boundary["snapshot_id"] or i in boundary["kept"]]
        return [i for i in found if (self.folder / f"snapshots/{i:020d}/manifest.json").exists()]

    def newest(self) -> Row:
        return self.manifest(self.snapshot_ids()[-1])

    def manifest(self, snapshot_id: int) -> Row:
        manifest = self.document("manifest", f"snapshots/{snapshot_id:020d}/manifest.json")
        check(manifest["snapshot_id"] == snapshot_id, "the manifest of another snapshot")
        return manifest

    # --- segments ------------------------------------------------------------------------------------------------

    def index(self, segment: Row, manifest: Row) -> list[Row]:
        parts: list[Row] = self.whole_index(segment, manifest)["parts"]
        return parts

    def whole_index(self, segment: Row, manifest: Row) -> Row:
        data = self.file(segment)
        check(data[:8] == MAGIC and data[-8:] == MAGIC, "magic")
        tail = data[len(data) - segment["index_bytes"] :]
        stored, footer = tail[:-48], tail[-48:]
        check(int.from_bytes(footer[:8], "big") == len(stored), "index bytes")
        check(hashlib.sha256(stored).digest() == footer[8:40], "index digest")
        plain = int.from_bytes(stored[:8], "big")
        check(plain <= 64 * MIB, "index too large")
        index: Row = json.loads(pa.decompress(stored[8:], decompressed_size=plain, codec="zstd", asbytes=True))
        uids = {manifest["job_uid"], *(o["job_uid"] for o in manifest.get("origins", []))}
        check(index["job_uid"] in uids and index["snapshot_id"] == segment["snapshot_id"], "swapped")
        return index

    def part(self, segment: Row, part: Row) -> bytes:
        whole = self.bytes_of(part["path"] or segment["path"])
        data = whole[part["offset"] : part["offset"] + part["length"]]
        check(len(data) == part["length"] and hashlib.sha256(data).hexdigest() == part["digest"], "part")
        return data

    def seen_files(self, manifest: Row, source: int) -> list[str]:
        lines: list[str] = []
        for layer in manifest["layers"]:
            for entry in layer["source_logs"]:
                if entry["path"].endswith(f"/source-{source}.log"):
                    text = self.file(entry).decode()
                    lines += text.split("\n") if text else []
        for segment in manifest["segments"]:
            for part in self.index(segment, manifest):
                if part["kind"] == "source" and part["operator"] == str(source):
                    data, size = self.part(segment, part), part["raw_bytes"]
                    lines += (
                        pa.decompress(data, decompressed_size=size, codec="zstd", asbytes=True).decode().split("\n")
                    )
        return lines

    # --- rows in flight ------------------------------------------------------------------------------------------

    def rows_in_flight(self, manifest: Row) -> list[Row]:
        """In the order in which each operator does them: `operator`, `epoch`, `hash`, `place`, `row`."""
        batch = manifest.get("open_batch")
        if batch is None or not batch["listing"]:
            return []
        segments = {s["path"]: s for s in batch["segments"]}
        listing = self.whole_index(segments[batch["listing"]], manifest)
        found: list[Row] = []
        named = [(p["operator"], p["epoch"]) for p in listing["passes"]]
        check(len(set(named)) == len(named), "two passes of one operator and epoch")
        check({o["uid"] for o in batch["operators"]} == {operator for operator, _ in named}, "operators")
        for passed in sorted(listing["passes"], key=lambda p: p["epoch"]):
            ends = [-1, *(r["hash_high"] for r in passed["left"])]
            check(all(end < r["hash_low"] <= r["hash_high"] for end, r in zip(ends, passed["left"])), "ranges")
            for held in passed["parts"]:
                found += self._rows_of_part(held, passed, segments, batch["listing"], manifest)
        return found

    def _rows_of_part(
        self, held: Row, passed: Row, segments: dict[str, Row], listing: str, manifest: Row
    ) -> Iterator[Row]:
        segment = segments[held["segment"] or listing]
        part = held["part"]
        check(part["kind"] == "rows" and part in self.index(segment, manifest), "no part of its segment")
        (batch,) = pyarrow.ipc.open_stream(self.part(segment, part))
        columns = pyarrow.ipc.read_schema(pa.py_buffer(base64.b64decode(passed["layout"]["columns"])))
        check(batch.schema.names == ["key_hash", "place", *(f"row.{name}" for name in columns.names)], "columns")
        check(batch.schema.types[2:] == columns.types, "types")
        at = [(row["key_hash"], row["place"]) for row in batch.to_pylist()]
        check(at == sorted(at) and (at[0][0], at[-1][0]) == (part["hash_low"], part["hash_high"]), "order")
        for row in batch.to_pylist():
            if any(r["hash_low"] <= row["key_hash"] <= r["hash_high"] for r in passed["left"]):
                yield {
                    "operator": passed["operator"],
                    "epoch": passed["epoch"],
                    "hash": row["key_hash"],
                    "place": row["place"],
                    "row": _with_prefix(row, "row."),
                }

    # --- state ---------------------------------------------------------------------------------------------------

    def state(self, manifest: Row, operator: str, state: str) -> list[Row]:
        """The live rows: `key`, `entry` (None in the value layout), `entry_key`, `value`, `time`."""
        op = next(o for o in manifest["operators"] if o["uid"] == operator)
        described = next(s for s in op["states"] if s["name"] == state)
        live: dict[Any, Row] = {}
        for rows in self._sources(manifest, op, described):
            rows = list(rows)
            for row in rows:
                if row["entry"] == 0 and row["deleted"]:
                    live = {i: r for i, r in live.items() if i[0] != identity(row)[0]}
            for row in rows:
                if not (row["entry"] == 0 and row["deleted"]):
                    live[identity(row)] = row
        now_ms = manifest["time"]["batch_time_ms"] if manifest.get("time") else None
        return [row for row in live.values() if not row["deleted"] and not is_expired(row, now_ms)]

    def _sources(self, manifest: Row, op: Row, state: Row) -> Iterator[Iterator[Row]]:
        """Oldest first, each in the newest columns."""
        since = max(op.get("since", 0), state.get("since", 0))
        shards = manifest.get("shards")
        if shards is not None:
            yield from self._of_shards(manifest, op, state, since)
        for layer in manifest["layers"]:
            for table in layer["tables"]:
                newest = table.get("last_snapshot_id", 0) or layer["last_snapshot_id"]
                if table["operator"] == op["uid"] and table["state"] == state["name"] and newest >= since:
                    stored = pq.read_table(io.BytesIO(self.file(table)), page_checksum_verification=True)
                    check(stored.num_rows == table["rows"], "rows of a table")
                    yield brought_to_now(state, newest, rows_of(stored))
        for segment in manifest["segments"]:
            at = segment["snapshot_id"]
            if shards is not None and at <= shards["snapshot_id"]:
                continue
            for part in self.index(segment, manifest):
                if part["kind"] != "state" or part["operator"] != op["uid"]:
                    continue
                if part["state"] not in {s["name"] for s in op["states"]}:
                    dropped = op.get("dropped", {}).get(part["state"], op.get("since", 0))
                    check(at < dropped, f"state {part['state']!r} that nobody dropped")
                elif part["state"] == state["name"] and at >= since:
                    batches = list(pa.ipc.open_stream(self.part(segment, part)))
                    check(len(batches) == 1 and batches[0].num_rows == part["rows"], "rows of a part")
                    yield brought_to_now(state, at, rows_of(batches[0]))

    def _of_shards(self, manifest: Row, op: Row, state: Row, since: int) -> Iterator[Iterator[Row]]:
        entry = manifest["shards"]
        listing = self.document("shard-files", entry["path"], self.file(entry))
        check(listing["parallelism"] == entry["parallelism"], "parallelism of the listing")
        for shard in listing["shards"]:
            if shard["operator"] != op["uid"] or shard["snapshot_id"] < since or state["name"] not in shard["columns"]:
                continue
            check(shard["backend"] == "arrow", "RocksDB's files take RocksDB to read")
            described = json.loads(shard["description"])
            check(described["format"] == 4 and described["version"] == shard["version"], "description")
            schema_text = listing["schemas"][shard["columns"][state["name"]]]
            schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(schema_text)))
            files = {f["name"]: f for f in shard["files"]}
            for run in reversed(described["states"].get(state["name"], {"runs": []})["runs"]):
                yield brought_to_now(state, shard["snapshot_id"], self._run(run, files, shard, schema))

    def _run(self, run: Row, files: dict[str, Row], shard: Row, schema: pa.Schema) -> Iterator[Row]:
        owned = range_of(shard["shard"], shard["parallelism"])
        for piece in run["pieces"]:
            file = files[piece["file"]]
            data = self.file(file) if file["path"] else base64.b64decode(file["content"])
            check(hashlib.sha256(data).hexdigest() == file["digest"] == piece["digest"], "file of a shard")
            batch = pa.ipc.open_file(data).get_batch(0)
            batch = batch.select([n for n in batch.schema.names if n != "due_order"])
            check(batch.schema.equals(schema), "columns of a shard's file")
            low, high = max(run["low"], piece["low"], owned[0]), min(piece["high"], owned[1])
            yield from (row for row in rows_of(batch) if low <= row["hash"] <= high)


def range_of(shard: int, parallelism: int) -> tuple[int, int]:
    """The closed range of hashes of a shard: its key groups are the top 15 bits."""
    groups = [g for g in range(32768) if g * parallelism // 32768 == shard]
    return groups[0] << 49, ((groups[-1] + 1) << 49) - 1


# --- rows --------------------------------------------------------------------------------------------------------


def rows_of(stored: pa.RecordBatch | pa.Table) -> Iterator[Row]:
    names = stored.schema.names
    check(names[:2] == ["key_hash", "deleted"], "columns")
    before = (0, 0)
    for row in stored.to_pylist():
        at = (row["key_hash"], row.get("entry", 0))
        check(before <= at, "order")
        before = at
        yield {
            "hash": row["key_hash"],
            "deleted": row["deleted"],
            "entry": row.get("entry"),
            **{kind: _with_prefix(row, f"{prefix}.") for kind, prefix in (("key", "key"), ("entry_key", "entry"), ("value", "value"))},
            "time": row.get("expires", row.get("due")),
        }  # fmt: skip


def _with_prefix(row: Row, prefix: str) -> Row:
    return {name[len(prefix) :]: value for name, value in row.items() if name.startswith(prefix)}


def identity(row: Row) -> tuple[Any, ...]:
    """Keys are equal as in grouping: null is null, NaN is NaN, 0.0 is -0.0."""
    return _comparable(row["key"]), row["entry"], _comparable(row["entry_key"])


def _comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((name, _comparable(inner)) for name, inner in value.items())
    if isinstance(value, list):
        return tuple(map(_comparable, value))
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    return value


def is_expired(row: Row, now_ms: int | None) -> bool:
    return row.get("kind") == "expires" and now_ms is not None and row["time"] is not None and row["time"] <= now_ms


# --- old columns -------------------------------------------------------------------------------------------------

COLUMN = re.compile(r"\s*`((?:[^`]|``)+)`\s+(.+?)(?:\s+DEFAULT\s+(.+))?\s*\Z", re.S | re.I)


def columns_of(ddl: str) -> dict[str, Any]:
    """Value columns and their defaults."""
    found: dict[str, Any] = {}
    for text in _split(ddl):
        named = COLUMN.match(text)
        check(named is not None, f"DDL {ddl!r}")
        assert named is not None
        found[named[1].replace("``", "`")] = _literal(named[3])
    return found


def _literal(text: str | None) -> Any:
    if text is None or text.lower() == "null":
        return None
    if text.startswith("'"):
        return text[1:-1].replace("''", "'")
    return {"true": True, "false": False}.get(text.lower()) if text[0].isalpha() else json.loads(text)


def _split(ddl: str) -> Iterator[str]:
    depth, start, quote = 0, 0, ""
    for at, sign in enumerate(ddl):
        if sign in "`'" and quote in ("", sign):
            quote = "" if quote else sign
        elif not quote:
            depth += (sign in "<(") - (sign in ">)")
            if sign == "," and depth == 0:
                yield ddl[start:at]
                start = at + 1
    if ddl.strip():
        yield ddl[start:]


def brought_to_now(state: Row, snapshot_id: int, rows: Iterator[Row]) -> Iterator[Row]:
    """Rows of an old version pass through every later one."""
    newest = {"schema": state["schema"], "time": state.get("time", "")}
    history = state.get("history", [])
    first = next((n for n, v in enumerate(history) if v["until"] > snapshot_id), len(history))
    versions = [*history[first:], newest]
    for row in rows:
        check(list(row["value"]) == list(columns_of(versions[0]["schema"])), "columns of another version")
        row = {**row, "kind": versions[0]["time"]}
        for before, after in itertools.pairwise(versions):
            if before["time"] == "expires" and not after["time"]:
                gone = row["time"] is not None and row["time"] <= before["ended_ms"]
                row = {**row, "time": None, "deleted": row["deleted"] or gone}
            if not before["time"] and after["time"]:
                row = {**row, "time": None}
            defaults = columns_of(after["schema"])
            value = {name: row["value"].get(name, default) for name, default in defaults.items()}
            empty = dict.fromkeys(value)
            row = {**row, "kind": after["time"], "value": empty if row["deleted"] else value}
        yield row
