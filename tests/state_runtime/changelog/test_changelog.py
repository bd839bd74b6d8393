"""Segments: what tasks changed comes back exactly, for any range and parallelism; damage is found."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from maintenance_root import FakeWorld, Job
from model import (
    ALL_HASHES,
    ALL_KEYS,
    OPERATOR,
    SCHEMA,
    STATE,
    Changes,
    CountingIds,
    DictStore,
    HashOf,
    StateWriter,
    after,
    batch_of,
    changes,
    epochs,
    examples,
    hash_functions,
    parallelisms,
    rows_of,
    spread,
)

from state_runtime.base.errors import CorruptData, CorruptSegment, MissingFile
from state_runtime.changelog.parts import PartEntry, decode_part, encode_part, sha256
from state_runtime.changelog.reader import read_index
from state_runtime.changelog.segment import FOOTER_BYTES, SegmentIndex, build_segment, decode_index
from state_runtime.changelog.writer import source_log_changes
from state_runtime.snapshot.manifest import LayerEntry, Manifest, TableEntry
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.table import StateSchema
from state_runtime.store import Store
from tests.stored import count_live, read_source_log, read_states, write_segment, write_task_changes

SCHEMAS = {STATE: SCHEMA}


def state_of(
    root: Store, manifest: Manifest, low: int = ALL_HASHES[0], high: int = ALL_HASHES[1]
) -> dict[object, object]:
    return rows_of(read_states(root, manifest, OPERATOR, SCHEMAS, low, high)[STATE])  # type: ignore[return-value]


@given(epochs, hash_functions, parallelisms, st.sampled_from([0, 300, 1 << 20]))
@examples(60)
def test_the_log_read_back_is_the_dictionary(
    all_epochs: list[Changes], hash_of: HashOf, parallelism: int, inline_bytes_max: int
) -> None:
    """Whether changes ride inline or lie in objects of their own."""
    writer = StateWriter(hash_of=hash_of, parallelism=parallelism, inline_bytes_max=inline_bytes_max)
    for changed in all_epochs:
        writer.epoch(changed)
    assert state_of(writer.root, writer.manifest) == after(all_epochs)


@given(epochs, hash_functions, parallelisms, st.sampled_from([1, 2, 3, 5, 7]))
@examples(40)
def test_shards_of_any_parallelism_read_their_part_of_the_log(
    all_epochs: list[Changes], hash_of: HashOf, written_by: int, read_by: int
) -> None:
    """Rescaling: the ranges of the new shards together are the state, each key in one of them."""
    writer = StateWriter(hash_of=hash_of, parallelism=written_by)
    for changed in all_epochs:
        writer.epoch(changed)
    together: dict[object, object] = {}
    for shard in range(read_by):
        low, high = hash_range_of_shard(shard, read_by)
        part = state_of(writer.root, writer.manifest, low, high)
        assert all(low <= hash_of(key) <= high for key in part)  # type: ignore[arg-type]
        assert not set(part) & set(together)
        together.update(part)
    assert together == after(all_epochs)


def test_an_epoch_without_changes_writes_nothing() -> None:
    """No object, no entry, no cost."""
    writer = StateWriter()
    writer.epoch({})
    assert writer.manifest.segments == ()
    assert writer.root.list_names("") == []


def test_large_changes_are_uploaded_by_the_task_and_small_ones_ride_along(ids: CountingIds) -> None:
    """The driver packs what is small; what is large must not go through it."""
    changed = {STATE: batch_of(dict.fromkeys(ALL_KEYS, (1, "x" * 50)))}
    for inline_bytes_max, objects in ((1 << 20, 0), (10, 1)):
        root = DictStore()
        task = write_task_changes(
            root,
            term=1,
            operator=OPERATOR,
            hash_range=ALL_HASHES,
            changes=changed,
            inline_bytes_max=inline_bytes_max,
            ids=ids,
        )
        assert len(root.objects) == objects
        assert (sum(map(len, task.inline)) > 0) == (objects == 0)
        segment = write_segment(root, [task], job_uid="j", term=1, snapshot_id=1, ids=ids)
        assert segment is not None
        assert segment.direct_bytes == (task.bytes if objects else 0)
        assert segment.bytes == len(root.objects[segment.path])
        assert segment.rows == len(ALL_KEYS)


def test_a_repeated_attempt_overwrites_nothing(ids: CountingIds) -> None:
    """A zombie's late upload must not replace what a manifest names."""
    root = DictStore()
    for _ in range(2):
        write_task_changes(
            root,
            term=1,
            operator=OPERATOR,
            hash_range=ALL_HASHES,
            changes={STATE: batch_of({ALL_KEYS[0]: (1, "x")})},
            inline_bytes_max=0,
            ids=ids,
        )
    assert len(root.objects) == 2


# --- damage ------------------------------------------------------------------------------------------------------


def written(inline_bytes_max: int) -> StateWriter:
    """Two epochs in two segments."""
    writer = StateWriter(parallelism=2, inline_bytes_max=inline_bytes_max)
    writer.epoch({ALL_KEYS[0]: (1, "a"), ALL_KEYS[7]: (2, "b")})
    writer.epoch({ALL_KEYS[7]: None, ALL_KEYS[9]: (3, "c")})
    return writer


@pytest.mark.parametrize("inline_bytes_max", [0, 1 << 20], ids=["direct", "inline"])
def test_a_flipped_bit_anywhere_in_an_object_is_found_or_harmless(inline_bytes_max: int) -> None:
    """Index or part: some digest covers every byte that is read. Only the leading magic is never read."""
    writer = written(inline_bytes_max)
    assert isinstance(writer.root, DictStore)
    right = state_of(writer.root, writer.manifest)
    for path, body in list(writer.root.objects.items()):
        for position in range(0, len(body) * 8, 7):
            damaged = bytearray(body)
            damaged[position // 8] ^= 1 << position % 8
            writer.root.objects[path] = bytes(damaged)
            try:
                found = state_of(writer.root, writer.manifest)
            except CorruptSegment:
                continue
            assert found == right, f"bit {position} of {path}"
            assert position // 8 < 8
        writer.root.objects[path] = body


@pytest.mark.parametrize("inline_bytes_max", [0, 1 << 20], ids=["direct", "inline"])
def test_a_cut_object_is_corrupt(inline_bytes_max: int) -> None:
    """At any length, also to nothing."""
    writer = written(inline_bytes_max)
    assert isinstance(writer.root, DictStore)
    for path, body in list(writer.root.objects.items()):
        for length in range(0, len(body), 11):
            writer.root.objects[path] = body[:length]
            with pytest.raises(CorruptData):
                state_of(writer.root, writer.manifest)
        writer.root.objects[path] = body


@pytest.mark.parametrize("inline_bytes_max", [0, 1 << 20], ids=["direct", "inline"])
def test_a_missing_object_is_named(inline_bytes_max: int) -> None:
    """Which file, and what to do."""
    writer = written(inline_bytes_max)
    assert isinstance(writer.root, DictStore)
    for path in list(writer.root.objects):
        body = writer.root.objects.pop(path)
        with pytest.raises(MissingFile, match=f"{path} is missing .*Restore the file from a copy"):
            state_of(writer.root, writer.manifest)
        writer.root.objects[path] = body


def test_swapped_segments_are_found() -> None:
    """Both are whole and valid; each says whose and which it is."""
    writer = written(1 << 20)
    first, second = writer.manifest.segments
    swapped = (replace(second, snapshot_id=1), replace(first, snapshot_id=2))
    with pytest.raises(CorruptSegment, match="files were swapped"):
        state_of(writer.root, replace(writer.manifest, segments=swapped))


def test_a_segment_of_another_job_is_found() -> None:
    """A copy into the wrong root."""
    writer = written(1 << 20)
    with pytest.raises(CorruptSegment, match="belongs to snapshot 2 of job job-1, not to snapshot 2 of other"):
        state_of(writer.root, replace(writer.manifest, job_uid="other"))


def test_swapped_direct_objects_are_found() -> None:
    """Two tasks' uploads exchanged: the index has each one's digest."""
    writer = written(0)
    assert isinstance(writer.root, DictStore)
    direct = sorted(p for p in writer.root.objects if "direct" in p)
    one, two = direct[0], direct[-1]
    objects = writer.root.objects
    objects[one], objects[two] = objects[two], objects[one]
    with pytest.raises(CorruptData):
        state_of(writer.root, writer.manifest)


@pytest.mark.parametrize("index_bytes", [-1, 0, 1, FOOTER_BYTES - 1, FOOTER_BYTES, 1 << 40])
def test_an_index_length_that_cannot_be_is_corrupt(index_bytes: int) -> None:
    """The manifest's numbers are not believed either."""
    writer = written(1 << 20)
    altered = replace(writer.manifest.segments[0], index_bytes=index_bytes)
    with pytest.raises(CorruptData):
        read_index(writer.root, altered, {"job-1"})


@pytest.mark.parametrize("size", [10, 1 << 20], ids=["short", "long"])
@pytest.mark.parametrize("plain", [b"", b"{}" * 20], ids=["no Zstandard", "another size"])
def test_an_index_that_cannot_be_decompressed_is_damage(plain: bytes, size: int) -> None:
    """Its digest is right: somebody wrote it that way."""
    body = pa.compress(plain, codec="zstd", asbytes=True) if plain else b"no frame of Zstandard"
    stored = size.to_bytes(8, "big") + body
    footer = len(stored).to_bytes(8, "big") + hashlib.sha256(stored).digest() + b"STSEG001"
    with pytest.raises(CorruptSegment, match=r"here has a damaged index: .*Restore"):
        decode_index(stored + footer, "here")


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "../../x", "offset": 0},
        {"path": "/etc/passwd", "offset": 0},
        {"path": "a", "length": -1},
        {"path": "a", "length": 1 << 60},
        {"path": "a", "offset": -5},
        {"path": "a", "raw_bytes": 1 << 60},
    ],
    ids=repr,
)
def test_an_index_with_hostile_entries_is_corrupt(changes: dict[str, object], ids: CountingIds) -> None:
    """A right digest only means that somebody computed it."""
    root = DictStore()
    task = write_task_changes(
        root,
        term=1,
        operator=OPERATOR,
        hash_range=ALL_HASHES,
        changes={STATE: batch_of({ALL_KEYS[0]: (1, "x")})},
        inline_bytes_max=0,
        ids=ids,
    )
    body, tail = build_segment(SegmentIndex("j", 1, (dataclasses.replace(task.parts[0], **changes),)), [])  # type: ignore[arg-type]
    with pytest.raises(CorruptData):
        decode_index(body[-tail:], "here")


def test_a_segment_keeps_the_digest_that_the_task_took() -> None:
    """Bytes that changed between the task and the segment are found by whoever reads them; a new digest would hide
    it."""
    task = write_task_changes(
        DictStore(),
        term=1,
        operator=OPERATOR,
        hash_range=ALL_HASHES,
        changes={STATE: batch_of({ALL_KEYS[0]: (1, "x")})},
        inline_bytes_max=1 << 20,
        ids=CountingIds(),
    )
    altered = bytearray(task.inline[0])
    altered[len(altered) // 2] ^= 1
    body, tail = build_segment(SegmentIndex("j", 1, task.parts), [bytes(altered)])
    (part,) = decode_index(body[-tail:], "here").parts
    assert part.digest == task.parts[0].digest
    with pytest.raises(CorruptSegment, match="another digest"):
        decode_part(body[part.offset : part.offset + part.length], part, "here")


def a_bomb(raw_bytes: int) -> tuple[bytes, PartEntry]:
    """A part that grows to some 70 MiB, and says that it has `raw_bytes`; right digests."""
    rows = 1 << 20
    schema = StateSchema(pa.schema([("k", pa.int32())]), pa.schema([("s", pa.string())]))
    batch = schema.batch(
        np.zeros(rows, dtype=np.uint64),
        None,
        [pa.array(np.zeros(rows, dtype=np.int32))],
        [pa.array(["x" * 50] * rows)],
    )
    body = encode_part(batch)
    return body, PartEntry("state", OPERATOR, STATE, "", 0, len(body), sha256(body), rows, raw_bytes, *ALL_HASHES)


def test_a_part_that_grows_beyond_what_its_index_says_is_not_decoded() -> None:
    """Before memory is taken for it. One that says what it is, is."""
    body, part = a_bomb(1000)
    before = pa.total_allocated_bytes()
    with pytest.raises(CorruptSegment, match=r"grows to [\d,]+ bytes where 1,000 were written"):
        decode_part(body, part, "here")
    assert pa.total_allocated_bytes() == before
    body, part = a_bomb(70 << 20)
    assert decode_part(body, part, "here").num_rows == part.rows


@given(changes, st.integers(0, 6), st.integers(0, 9), st.sampled_from([1, 40, 3000]))
@examples(40)
def test_every_slice_of_a_batch_is_within_its_stated_size(changed: Changes, start: int, rows: int, width: int) -> None:
    """Also one cut out of something larger, with nested values."""
    whole = batch_of({k: v and (v[0], (v[1] or "") * width) for k, v in changed.items()})
    nested = pa.array([[{"a": "x" * width, "b": n}] * (n % 4) for n in range(whole.num_rows)], pa.list_(pa.struct([("a", pa.string()), ("b", pa.int32())])))  # fmt: skip
    schema = StateSchema(SCHEMA.keys, pa.schema([*SCHEMA.values, pa.field("x", nested.type)]))
    batch = pa.RecordBatch.from_arrays([*whole.columns, nested], schema=schema.arrow).slice(start, rows)
    body = encode_part(batch)
    part = PartEntry(
        "state", OPERATOR, STATE, "", 0, len(body), sha256(body), batch.num_rows, batch.nbytes, *ALL_HASHES
    )
    assert decode_part(body, part, "here").num_rows == batch.num_rows


def test_a_state_that_the_operator_does_not_have_is_corrupt_in_logs_and_tables() -> None:
    """Never skipped without a word: it is somebody's state. Typed, wherever it is found."""
    writer = written(1 << 20)
    with pytest.raises(CorruptSegment, match=f"holds state '{STATE}' that operator"):
        read_states(writer.root, writer.manifest, OPERATOR, {"other": SCHEMA}, *ALL_HASHES)
    table = TableEntry("tables/x", 1, "d", 1, OPERATOR, STATE, *ALL_HASHES)
    layered = replace(writer.manifest, segments=(), layers=(LayerEntry(0, 1, (table,)),))
    with pytest.raises(CorruptSegment):
        read_states(writer.root, layered, OPERATOR, {"other": SCHEMA}, *ALL_HASHES)


def test_a_part_of_another_schema_is_corrupt() -> None:
    """Columns of another type would be reinterpreted."""
    writer = written(1 << 20)
    other = StateSchema(SCHEMA.keys, pa.schema([("n", pa.int32()), ("s", pa.string())]))
    with pytest.raises(CorruptSegment, match="types must match"):
        read_states(writer.root, writer.manifest, OPERATOR, {STATE: other}, *ALL_HASHES)


# --- logs of seen files ------------------------------------------------------------------------------------------

lines = st.lists(st.text(alphabet=st.characters(exclude_characters="\n", exclude_categories=["Cs"]), min_size=1), max_size=5)  # fmt: skip


@given(st.lists(lines.filter(bool), max_size=5))
@examples(60)
def test_lines_of_a_source_log_come_back_in_order(epochs_of_lines: list[list[str]]) -> None:
    """Names of input files hold any character but a line feed."""
    writer = StateWriter()
    manifest = writer.manifest
    for number, new in enumerate(epochs_of_lines, 1):
        task = source_log_changes(0, new)
        segment = write_segment(
            writer.root,
            [task, source_log_changes(1, ["other"])],
            job_uid="job-1",
            term=1,
            snapshot_id=number,
            ids=writer.ids,
        )
        assert segment is not None
        manifest = replace(manifest, segments=(*manifest.segments, segment))
    assert read_source_log(writer.root, manifest, 0) == [line for new in epochs_of_lines for line in new]
    assert read_source_log(writer.root, manifest, 1) == ["other"] * len(epochs_of_lines)


def test_live_rows_are_those_without_tombstone() -> None:
    """The number of keys in a state."""
    assert count_live(batch_of({ALL_KEYS[0]: None, ALL_KEYS[1]: (1, "x"), ALL_KEYS[2]: (None, None)}, spread)) == 2
    assert count_live(SCHEMA.empty()) == 0


def test_an_index_that_lists_more_parts_than_a_reader_holds_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(FakeWorld().connect()).checkpoints(1)
    (segment,) = job.committer.last.segments
    count = len(read_index(job.root, segment, job.committer.last.job_uids).parts)
    monkeypatch.setattr("state_runtime.changelog.segment.SEGMENT_PARTS_MAX", count - 1)
    with pytest.raises(CorruptSegment, match=f"lists {count} parts, more than {count - 1}"):
        read_index(job.root, segment, job.committer.last.job_uids)
