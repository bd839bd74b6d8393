"""Every reader of stored bytes, with valid bytes to begin from. A target takes `Choose`, damages something, and reads it.

It may succeed or raise one of our errors (`FileNotFoundError` where an object is not there); anything else is a bug.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib
import json
import typing
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from model import ALL_HASHES, DictStore

from state_runtime.base.errors import StillstateError
from state_runtime.changelog.inflight import cut_by_shards
from state_runtime.changelog.parts import PartEntry, decode_lines, decode_part, sha256
from state_runtime.changelog.reader import fetch_part, read_index, read_passes, read_table
from state_runtime.changelog.rows import decode_columns, decode_rows
from state_runtime.changelog.segment import SegmentIndex, build_segment, decode_index
from state_runtime.changelog.versions import StateVersions
from state_runtime.materialize.records import Record, protected
from state_runtime.reading.inflight import ReadableInflight
from state_runtime.reading.query import open_state
from state_runtime.reading.references import references, sink_references
from state_runtime.restore.sources import PrimaryStates
from state_runtime.restore.uploaded_files import Bottom, direct, read_listing
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.control import pending_stop
from state_runtime.snapshot.document import FORMAT_VERSION, decode_document
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.pins import read_pins
from state_runtime.snapshot.shard_files import ShardListing
from state_runtime.state.table import StateSchema
from state_runtime.store import Store
from tests.fuzz.mutations import Choose, damaged_bytes, damaged_value, json_bytes
from tests.stored import read_source_log, read_states

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "state_runtime" / "golden"
ROOTS = ("format-1", "format-2", "format-3/on", "format-4/on", "format-3/off", "format-4/off", "format-5/inflight")
Target = Callable[[Choose], None]


@cache
def objects_of(root: str) -> dict[str, bytes]:
    folder = GOLDEN / root
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def reading(call: Callable[[], Any]) -> Any:
    """What a reader gives; None if it says in our words that it cannot."""
    try:
        found = call()
        return list(found) if isinstance(found, Iterator) else found
    except (StillstateError, FileNotFoundError):
        return None


# --- documents ---------------------------------------------------------------------------------------------------


@cache
def document_classes() -> dict[str, type[Any]]:
    """Every kind that some code reads, and the class of its body: found in the code, so that a new kind is fuzzed as it comes."""
    found: dict[str, type[Any]] = {}
    for file in sorted((ROOT / "state_runtime").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("decode_document") and len(node.args) > 1:
                kind, cls = node.args[:2]
                if isinstance(kind, ast.Constant) and isinstance(cls, ast.Name):
                    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
                    found[str(kind.value)] = getattr(importlib.import_module(module), cls.id)
    return found


def enveloped(kind: str, body: bytes, version: int = FORMAT_VERSION) -> bytes:
    """A document whose digest is right, whatever is in it."""
    covered = f"{kind} {version}\n".encode() if version >= 3 else b""
    header = {
        "stillstate": kind,
        "format": version,
        "sha256": hashlib.sha256(covered + body).hexdigest(),
        "bytes": len(body),
    }
    return json.dumps(header).encode() + b"\n" + body + b"\n"


def sample_of(hint: Any, depth: int = 0) -> Any:
    """A JSON value of a type, as full as it can be."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return {f.name: sample_of(hints[f.name], depth + 1) for f in dataclasses.fields(hint)}
    if origin is typing.Literal:
        return arguments[0]
    if origin is tuple:
        inner = arguments[:1] if arguments[-1:] == (Ellipsis,) else arguments
        return [sample_of(a, depth + 1) for a in inner]
    if origin is dict:
        return {"name": sample_of(arguments[1], depth + 1)}
    if arguments:  # a union with None
        return sample_of(next(a for a in arguments if a is not type(None)), depth + 1)
    plain: dict[Any, Any] = {int: 1, str: "name", float: 1.0, bool: True}
    return plain.get(hint)


def parts_of_document(data: bytes) -> tuple[str, int, Any]:
    head, _, body = data.partition(b"\n")
    header = json.loads(head)
    return header["stillstate"], header["format"], json.loads(body)


def read_document(kind: str, data: bytes) -> None:
    value = reading(partial(decode_document, kind, document_classes()[kind], data, "here"))
    if kind == "manifest":
        manifest = reading(partial(Manifest.decode, data, "here"))
        if manifest is not None:
            reading(manifest.encode)
            reading(lambda: list(sink_references(manifest)))
    elif kind == "materialization":
        reading(partial(Record.decode, data, "here"))
    elif kind == "shard-files" and value is not None:
        entry = stored_manifest("format-4/off").shards
        assert entry is not None
        reading(lambda: ShardListing.decode(data, entry, {value.job_uid}))


@cache
def stored_manifest(root: str) -> Manifest:
    manifest = Catalog.of_root(DictStore(dict(objects_of(root)))).latest()
    assert manifest is not None
    return manifest


def documents(choose: Choose) -> None:
    """Any document: of a golden root, or made up; damaged as bytes, or inside and with the right digest."""
    stored = [(root, path) for root in ROOTS for path in objects_of(root) if path.endswith(".json")]
    kinds = sorted(document_classes())
    at = choose(len(stored) + 3 * len(kinds))
    if at < len(stored):
        root, path = stored[at]
        kind, version, value = parts_of_document(objects_of(root)[path])
    else:
        kind, version = kinds[at % len(kinds)], FORMAT_VERSION
        value = sample_of(document_classes()[kind])
    if choose(3) == 0:
        read_document(kind, damaged_bytes(enveloped(kind, json_bytes(value), version), choose))
    else:
        read_document(kind, enveloped(kind, json_bytes(damaged_value(value, choose)), version))


# --- segments, parts, tables ---------------------------------------------------------------------------------------


@cache
def segments() -> list[tuple[bytes, SegmentIndex]]:
    found = []
    for root in ("format-3/on", "format-4/on", "format-5/inflight"):
        store = DictStore(dict(objects_of(root)))
        manifest = stored_manifest(root)
        for entry in manifest.stored_segments:
            found.append((store.objects[entry.path], read_index(store, entry, manifest.job_uids)))
    return found


def segment_tails(choose: Choose) -> None:
    """The index at a segment's end: its bytes, or its JSON with everything around it right."""
    data, index = segments()[choose(len(segments()))]
    if choose(3) == 0:
        reading(partial(decode_index, damaged_bytes(data, choose), "here"))
        return
    plain = json_bytes(damaged_value(json.loads(json.dumps(dataclasses.asdict(index))), choose))
    size = len(plain) if choose(4) else (0, 1, len(plain) - 1, len(plain) + 1, 1 << 26, 1 << 40)[choose(6)]
    stored = size.to_bytes(8, "big") + pa.compress(plain, codec="zstd", asbytes=True)
    footer = len(stored).to_bytes(8, "big") + hashlib.sha256(stored).digest() + b"STSEG001"
    found = reading(partial(decode_index, stored + footer, "here"))
    if found is not None:
        store = DictStore({"segment": data})
        for part in found.parts[:20]:
            reading(partial(fetch_part, store, "segment", part))
        for passed in found.passes[:20]:
            reading(partial(cut_by_shards, passed, 7))
            reading(partial(decode_columns, passed.layout.columns, "here"))
            for held in passed.parts[:5]:
                reading(partial(decode_rows, data[held.part.offset :][: held.part.length], held.part, "segment"))


@cache
def state_parts() -> list[tuple[bytes, PartEntry]]:
    found = []
    for root in ("format-3/on", "format-4/on", "format-5/inflight"):
        store, manifest = DictStore(dict(objects_of(root))), stored_manifest(root)
        for entry in manifest.stored_segments:
            for part in read_index(store, entry, manifest.job_uids).parts:
                body = store.read_range(part.path or entry.path, part.offset, part.length)
                found.append((body, part))
    return found


def parts(choose: Choose) -> None:
    """A part's bytes under the right digest: what a hostile writer could do."""
    body, part = state_parts()[choose(len(state_parts()))]
    body = damaged_bytes(body, choose)
    raw_bytes = part.raw_bytes if choose(3) else (0, 1, 1 << 20)[choose(3)]
    part = dataclasses.replace(part, length=len(body), digest=sha256(body), raw_bytes=raw_bytes)
    if part.kind == "source":
        reading(partial(decode_lines, body, part, "here"))
        return
    if part.kind == "rows":
        reading(partial(decode_rows, body, part, "here"))
        return
    reading(partial(decode_part, body, part, "here"))
    reading(partial(fetch_part, DictStore({"x": body}), "x", dataclasses.replace(part, offset=0, path="")))


def tables(choose: Choose) -> None:
    """A Parquet file under the right digest."""
    entries = [
        (r, t) for r in ("format-3/on", "format-4/on") for layer in stored_manifest(r).layers for t in layer.tables
    ]
    root, table = entries[choose(len(entries))]
    body = damaged_bytes(objects_of(root)[table.path], choose)
    reading(
        partial(
            read_table, DictStore({table.path: body}), dataclasses.replace(table, bytes=len(body), digest=sha256(body))
        )
    )


# --- whole roots ---------------------------------------------------------------------------------------------------


def roots(choose: Choose) -> None:
    """A whole root of which one file is another, missing, or exchanged; documents with the right digest; then everything that reads."""
    name = ROOTS[choose(len(ROOTS))]
    objects = dict(objects_of(name))
    for _ in range(1 + choose(2)):
        path = sorted(objects)[choose(len(objects))]
        operation = choose(5)
        if operation == 0:
            del objects[path]
        elif operation == 1:
            other = sorted(objects)[choose(len(objects))]
            objects[path] = objects[other]
        elif operation == 2 or not path.endswith(".json"):
            objects[path] = damaged_bytes(objects[path], choose)
        else:
            try:
                kind, version, value = parts_of_document(objects[path])
            except (ValueError, KeyError, TypeError):
                continue
            objects[path] = enveloped(kind, json_bytes(damaged_value(value, choose)), version)
        if not objects:
            return
    read_some(DictStore(objects), choose)


def read_some(root: Store, choose: Choose) -> None:
    """One reader of all that `read_everything` plays, so that a fuzzer gets through many roots; and what comes before it."""
    looks = looks_at(root)
    look = choose(len(looks) + 12)
    if look < len(looks):
        reading(looks[look])
        return
    catalog = reading(partial(Catalog.of_root, root))
    manifest = reading(catalog.latest) if catalog is not None else None
    if manifest is None:
        return
    uses = uses_of(root, manifest)
    reading(uses[choose(len(uses))])


def read_everything(root: Store) -> None:
    for look in looks_at(root):
        reading(look)
    catalog = reading(partial(Catalog.of_root, root))
    if catalog is None:
        return
    manifest = reading(catalog.latest)
    if manifest is None:
        return
    for use in uses_of(root, manifest):
        reading(use)


def looks_at(root: Store) -> list[Callable[[], Any]]:
    """What is read of a root before, or without, its newest snapshot."""
    return [
        partial(read_boundary, root),
        partial(read_pins, root),
        partial(protected, root, 1_700_000_000_000),
        partial(pending_stop, root, 1),
        lambda: Catalog.of_root(root).status(),
        lambda: Catalog.of_root(root).snapshot_ids(),
    ]


def uses_of(root: Store, manifest: Manifest) -> list[Callable[[], Any]]:
    """What is read of a snapshot."""
    return [
        partial(references, root, manifest),
        partial(read_listing, direct(root), manifest),
        partial(read_passes, root, manifest),
        *(
            partial(rows_in_flight, root, manifest, operator.uid)
            for operator in (manifest.open_batch.operators[:3] if manifest.open_batch is not None else ())
        ),
        *(partial(read_source_log, root, manifest, number) for number in range(2)),
        *(
            partial(way, root, manifest, operator.uid, state.name)
            for operator in manifest.operators[:3]
            for state in operator.states[:10]
            for way in (by_versions, as_a_task, as_a_tool)
        ),
    ]


def rows_in_flight(root: Store, manifest: Manifest, operator: str) -> Any:
    """As a DataFrame's tasks do."""
    return list(ReadableInflight.of(root, manifest, operator).batches())


def by_versions(root: Store, manifest: Manifest, operator: str, state: str) -> Any:
    """A state as its definition in the code has it; None for those that no golden root has."""
    schema = golden_schemas().get(state)
    return read_states(root, manifest, operator, {state: schema}, *ALL_HASHES) if schema is not None else None


def as_a_task(root: Store, manifest: Manifest, operator: str, state: str) -> Any:
    """The same, source by source, as a restore does."""
    schema = golden_schemas().get(state)
    return restored(root, manifest, operator, state, schema) if schema is not None else None


def as_a_tool(root: Store, manifest: Manifest, operator: str, state: str) -> Any:
    """By the manifest's own description."""
    return open_state(_Parent(root), "root", state, operator=operator).read()  # type: ignore[arg-type]


@cache
def golden_schemas() -> dict[str, StateSchema]:
    from make_golden import COUNT_2, LOG, SEEN, SPANS, TIMERS

    return {"count": COUNT_2, "log": LOG, "seen": SEEN, "$timers": TIMERS, "spans": SPANS}


def restored(root: Store, manifest: Manifest, operator: str, state: str, schema: StateSchema) -> list[pa.RecordBatch]:
    """A state as a task brings it back: source by source, in bounded batches."""
    entry = next(o for o in manifest.operators if o.uid == operator)
    described = entry.state(state)
    assert described is not None
    versions = {state: StateVersions(entry, described, schema)}
    objects = direct(root)
    listing = read_listing(objects, manifest)
    bottom = Bottom(objects, listing, entry) if listing is not None else None
    sources = PrimaryStates(
        objects=objects,
        manifest=manifest,
        pending=(),
        entry=entry,
        versions=versions,
        hash_range=ALL_HASHES,
        scratch=None,
        bottom=bottom,
    )
    return list(sources.read(state, *ALL_HASHES, -1))


class _Parent:
    """A store that has one job."""

    def __init__(self, root: Store) -> None:
        self._root = root

    def child(self, name: str) -> Store:
        return self._root


TARGETS: dict[str, Target] = {
    "documents": documents,
    "segment-tails": segment_tails,
    "parts": parts,
    "tables": tables,
    "roots": roots,
}
__all__ = ["TARGETS", "build_segment", "read_everything"]
