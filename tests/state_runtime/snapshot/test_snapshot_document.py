"""Documents and manifests: what was written is read, everything else is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import tracemalloc
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import empty_manifest, examples
from store_contract import HOSTILE

from state_runtime.base.errors import (
    CorruptData,
    CorruptManifest,
    InvalidConfiguration,
    StillstateError,
    UnsupportedFormat,
)
from state_runtime.base.progress import Progress
from state_runtime.snapshot import paths
from state_runtime.snapshot.document import (
    FORMAT_VERSION,
    FORMAT_WITH_ROWS,
    FORMAT_WITH_SOURCES,
    decode_document,
    encode_document,
)
from state_runtime.snapshot.manifest import (
    FileEntry,
    InflightNumbers,
    LayerEntry,
    Manifest,
    OpenBatch,
    OperatorEntry,
    SegmentEntry,
    SourceFile,
    SourcePosition,
    StagedFile,
    StagedOutput,
    StateEntry,
    TableEntry,
    TimeEntry,
    format_of,
)
from state_runtime.snapshot.shard_files import ShardListing
from state_runtime.store.paths import check_relative_path
from tests.fuzz.mutations import json_bytes
from tests.fuzz.targets import document_classes, enveloped, sample_of

names = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,10}", fullmatch=True)
relative = st.lists(names, min_size=1, max_size=3).map("/".join)
sizes = st.integers(0, (1 << 63) - 1)
hashes = st.integers(0, (1 << 64) - 1)
ranges = st.tuples(hashes, hashes).map(sorted)
texts = st.text(max_size=20)
finite = st.floats(allow_nan=False, allow_infinity=False)

progresses = st.builds(
    Progress, snapshot_id=sizes, rows_per_s=finite, phases_ms=st.dictionaries(texts, finite, max_size=3)
)
segments = st.builds(SegmentEntry, relative, sizes, texts, sizes, sizes, sizes, sizes)
tables = st.builds(
    lambda entry, hashes: dataclasses.replace(entry, hash_low=hashes[0], hash_high=hashes[1]),
    st.builds(TableEntry, relative, sizes, texts, sizes, names, texts, st.just(0), st.just(0)),
    ranges,
)
files = st.builds(FileEntry, relative, sizes, texts)
layers = st.builds(LayerEntry, sizes, sizes, st.tuples(tables), st.tuples(files))
clocks = st.dictionaries(names, sizes, max_size=2)
times = st.builds(TimeEntry, sizes, sizes, clocks, clocks, clocks, st.lists(names, max_size=2).map(tuple))
positions = st.builds(SourcePosition, sizes, texts, texts, texts, texts, st.lists(st.integers(0, 9)).map(tuple))
named_positions = st.lists(names, min_size=1, max_size=3).map(
    lambda known: SourcePosition(
        0, "", "v1\n{}" + "\n-" * len(known), "", "", (len(known) - 1,), names=tuple(known), away=(0,)
    )
)
open_batches = st.builds(
    lambda late, settled, held, numbers, clocks: OpenBatch(
        late,
        tuple(settled),
        listing=held[0].path if held and numbers else "",
        segments=tuple(held) if numbers else (),
        operators=tuple(numbers) if held else (),
        late_clocks=clocks,
    ),
    sizes,
    st.lists(names, max_size=2),
    st.lists(segments, max_size=2, unique_by=lambda s: s.path),
    st.lists(st.builds(InflightNumbers, names, sizes, sizes, sizes, sizes), max_size=2, unique_by=lambda n: n.uid),
    clocks,
)
manifests = st.builds(
    Manifest,
    format_version=st.just(FORMAT_WITH_SOURCES),
    job_uid=texts,
    snapshot_id=sizes,
    term=sizes,
    commit_id=texts,
    kind=st.sampled_from(["checkpoint", "fencing"]),
    created_at_ms=sizes,
    parallelism=st.integers(0, 32768),
    operators=st.tuples(st.builds(
        OperatorEntry, names, texts, texts, st.tuples(st.builds(StateEntry, texts, st.just("value"), texts)),
        says=st.one_of(st.just({}), st.dictionaries(texts, texts, max_size=2)),
    )),
    segments=st.lists(segments, max_size=3).map(tuple),
    layers=st.lists(layers, max_size=2).map(tuple),
    source=st.none() | positions | named_positions,
    time=st.none() | times,
    outputs=st.tuples(st.builds(StagedOutput, names, sizes, st.tuples(st.builds(StagedFile, relative, relative, sizes, sizes)))),
    versions=st.dictionaries(texts, texts, max_size=3),
    progress=st.none() | progresses,
    previous=st.none() | progresses,
    open_batch=st.none() | open_batches,
    session=st.dictionaries(texts, texts, max_size=2),
)  # fmt: skip


@given(manifests)
@examples(70)
def test_a_documents_body_is_the_json_of_its_dataclasses(manifest: Manifest) -> None:
    """Its digest is compared by readers of any age, so a quicker way to write it must give the same bytes."""
    expected = json.dumps(dataclasses.asdict(manifest), sort_keys=True, separators=(",", ":")).encode()
    assert encode_document("manifest", manifest).split(b"\n")[1] == expected


def test_what_a_document_has_worked_out_is_not_written() -> None:
    """A cached property lies beside the fields of its value, and is none of them."""
    listing = ShardListing("job", 1)
    before = listing.encode()
    assert listing.by_shard == {}
    assert listing.encode() == before


@given(manifests)
@examples(70)
def test_a_manifest_reads_back_as_it_was_written(manifest: Manifest) -> None:
    """Every field, any text, hashes up to 2^64 - 1."""
    assert Manifest.decode(manifest.encode(), "m") == manifest


@given(manifests)
@examples(30)
def test_equal_manifests_are_equal_bytes(manifest: Manifest) -> None:
    """A lost answer is recognised by comparing bytes, so encoding must not depend on how a value was made."""
    again = dataclasses.replace(manifest, versions=dict(reversed(manifest.versions.items())))
    assert again.encode() == manifest.encode()


@given(manifests)
@examples(70)
def test_the_format_of_a_manifest_is_the_oldest_that_knows_its_fields(manifest: Manifest) -> None:
    """A reader of that format must not pass over what it does not know, and none is refused without need."""
    needed = format_of(manifest)
    time, batch, source = manifest.time, manifest.open_batch, manifest.source
    of_sources = [
        time and (time.clocks or time.seen_ms or time.idle),
        batch and batch.late_clocks,
        source and source.names,
        any(operator.says for operator in manifest.operators),
    ]
    assert needed == (6 if any(of_sources) else 5 if batch is not None else 4)
    fitting = dataclasses.replace(manifest, format_version=needed)
    assert Manifest.decode(fitting.encode(), "m") == fitting
    if needed > 4:
        older = dataclasses.replace(manifest, format_version=needed - 1)
        with pytest.raises(StillstateError, match="a format that knows all of its fields"):
            older.encode()
        fields = json.loads(manifest.encode().split(b"\n")[1])
        body = json.dumps({**fields, "format_version": needed - 1}, separators=(",", ":")).encode()
        with pytest.raises(CorruptManifest, match=f"format {needed - 1} does not have"):
            Manifest.decode(enveloped("manifest", body, needed - 1), "m")


@pytest.mark.parametrize("kind", sorted(document_classes()))
def test_fields_that_a_reader_does_not_know_are_passed_over_wherever_they_are(kind: str) -> None:
    """A younger version may add what an older one does no wrong without: it needs no other format."""
    cls = document_classes()[kind]
    known = sample_of(cls)
    younger = with_younger_fields(known)
    assert json.dumps(younger).count("younger") >= 1
    read, as_before = (decode_document(kind, cls, enveloped(kind, json_bytes(body)), "m") for body in (younger, known))
    assert read == as_before


def with_younger_fields(value: Any) -> Any:
    """A body with one field more in each of its objects; a map by names, as `sample_of` makes it, is none."""
    if isinstance(value, list):
        return [with_younger_fields(item) for item in value]
    if not isinstance(value, dict):
        return value
    more = {} if value.keys() == {"name"} else {"younger": {"of": [1]}}
    return {**{key: with_younger_fields(item) for key, item in value.items()}, **more}


def test_an_earlier_version_reads_a_manifest_with_files_of_sources_without_them() -> None:
    """As docs/format.md says: that version starts, and Spark makes the files anew."""
    older = dataclasses.make_dataclass("Older", [(f.name, f.type) for f in dataclasses.fields(SourcePosition)][:6])
    position = SourcePosition(3, "m", "v1", "", "c", (1,), files=(SourceFile("0/0", "MQ=="),))
    read: Any = decode_document("position", older, encode_document("position", position), "m")
    assert read == older(3, "m", "v1", "", "c", (1,))


@pytest.mark.parametrize(
    "damage", [{"names": ["a"]}, {"names": ["a", "b", "c"]}, {"logs": [2]}, {"away": [2]}, {"away": [-1]}]
)
def test_names_that_do_not_fit_the_sources_are_damage(damage: dict[str, object]) -> None:
    """A source would read on from the position of another one."""
    position = SourcePosition(1, "", "v1\n{}\n1\n2", "", "", (1,), names=("a", "b"))
    manifest = Manifest(FORMAT_WITH_SOURCES, "u", 1, 1, "c", "checkpoint", 0, 1, source=position)
    fields = json.loads(manifest.encode().split(b"\n")[1])
    fields["source"].update(damage)
    with pytest.raises(CorruptManifest, match="names for 2 sources"):
        Manifest.decode(enveloped("manifest", json.dumps(fields).encode(), FORMAT_WITH_SOURCES), "m")


@dataclass(frozen=True)
class Numbered:
    """The smallest body that there can be."""

    snapshot_id: int


DOCUMENT = encode_document("boundary", Numbered(7))


def test_a_document_cut_anywhere_is_corrupt() -> None:
    """A full disk, a killed copy: no prefix may pass."""
    for length in range(len(DOCUMENT)):
        with pytest.raises(CorruptManifest, match=r"where\.json is damaged.*[Rr]estore it from a copy"):
            decode_document("boundary", Numbered, DOCUMENT[:length], "where.json")


def test_a_document_with_anything_appended_is_corrupt() -> None:
    """Two documents in one file are nobody's document."""
    for more in (b"\n", b" ", b"\0", DOCUMENT):
        with pytest.raises(CorruptManifest):
            decode_document("boundary", Numbered, DOCUMENT + more, "where.json")


def test_every_flipped_bit_of_a_document_is_found() -> None:
    """Header included: it decides how the rest is read."""
    believed = []
    for position in range(len(DOCUMENT) * 8):
        flipped = bytearray(DOCUMENT)
        flipped[position // 8] ^= 1 << position % 8
        with contextlib.suppress(CorruptManifest, UnsupportedFormat):
            decode_document("boundary", Numbered, bytes(flipped), "where.json")
            believed.append((position, bytes(flipped)[:60]))
    assert not believed, f"flipped bits that were not found: {believed}"


@given(st.binary(max_size=300))
@examples(200)
def test_garbage_is_corrupt_and_nothing_else(data: bytes) -> None:
    """Whatever lies there, the error is typed."""
    with pytest.raises((CorruptManifest, UnsupportedFormat)):
        decode_document("boundary", Numbered, data, "where.json")


def with_header(body: bytes, **changes: Any) -> bytes:
    """A document with a right digest, and a header as the test wants it."""
    covered = f"{changes.get('stillstate', 'boundary')} {changes.get('format', FORMAT_VERSION)}\n".encode()
    header = {
        "stillstate": "boundary",
        "format": FORMAT_VERSION,
        "sha256": hashlib.sha256(covered + body).hexdigest(),
        "bytes": len(body),
    }
    kept = {k: v for k, v in {**header, **changes}.items() if v is not ...}
    return json.dumps(kept).encode() + b"\n" + body + b"\n"


def test_a_newer_format_is_unsupported_before_its_body_is_read() -> None:
    """A newer version may have any body; the reader must say "upgrade", not "damaged"."""
    data = with_header(b"what a newer version writes", format=FORMAT_WITH_SOURCES + 1)
    with pytest.raises(UnsupportedFormat, match="Upgrade Stillstate; nothing was changed"):
        decode_document("boundary", Numbered, data, "where.json")


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", None, [], ...])
def test_a_format_that_was_never_written_is_corrupt(version: Any) -> None:
    """There is no version 0; a header that says so was altered."""
    with pytest.raises(CorruptManifest):
        decode_document("boundary", Numbered, with_header(b'{"snapshot_id":7}', format=version), "where.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"stillstate": "manifest"},
        {"stillstate": ...},
        {"stillstate": None},
        {"sha256": ...},
        {"sha256": None},
        {"sha256": "0" * 64},
        {"bytes": ...},
        {"bytes": -1},
        {"bytes": "17"},
        {"bytes": 1e400},
    ],
    ids=repr,
)
def test_a_foreign_or_inconsistent_header_is_corrupt(changes: dict[str, Any]) -> None:
    """A file of another kind under this name was put there by mistake or on purpose."""
    with pytest.raises(CorruptManifest):
        decode_document("boundary", Numbered, with_header(b'{"snapshot_id":7}', **changes), "where.json")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"7",
        b"null",
        b"[]",
        b"{}",
        b'{"snapshot_id":"7"}',
        b'{"snapshot_id":7.5}',
        b'{"snapshot_id":true}',
        b'{"snapshot_id":null}',
        b'{"snapshot_id":NaN}',
        b'{"snapshot_id":Infinity}',
        b'\xef\xbb\xbf{"snapshot_id":7}',
        b'{"snapshot_id":7}\xff',
        b"[" * 100_000,
        b'{"snapshot_id":' * 100_000,
    ],
    ids=lambda body: repr(body[:30]),
)
def test_a_body_of_another_shape_is_corrupt(body: bytes) -> None:
    """The digest only says that these bytes were meant; the schema says whether they can be."""
    with pytest.raises(CorruptManifest):
        decode_document("boundary", Numbered, with_header(body), "where.json")


@dataclass(frozen=True)
class _Texts:
    texts: tuple[str, ...]


def test_a_huge_header_line_is_refused_without_parsing_it() -> None:
    """The header is a few dozen bytes; a megabyte of JSON there is an attack on the parser."""
    data = b'{"stillstate":' + b"[" * (1 << 20) + b"\n{}\n"
    tracemalloc.start()
    with pytest.raises(CorruptManifest, match="no header line"):
        decode_document("boundary", Numbered, data, "where.json")
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_an_error_never_repeats_what_a_document_holds() -> None:
    """Manifests hold source positions and schemas; an error message goes to logs."""
    body = b'{"texts":["fine",{"s3cr3t":1}]}'
    with pytest.raises(CorruptManifest) as caught:
        decode_document("boundary", _Texts, with_header(body), "where.json")
    assert "s3cr3t" not in str(caught.value)
    assert "texts.1" in str(caught.value)


@pytest.mark.parametrize("path", [p for p in HOSTILE if p], ids=repr)
@pytest.mark.parametrize("place", ["segment", "table", "source_log", "staged", "final"])
def test_a_manifest_with_a_hostile_path_is_refused(place: str, path: str) -> None:
    """No path of a manifest is used before all of them were checked."""
    entry = {
        "segment": {"segments": (SegmentEntry(path, 1, "d", 1, 1, 1),)},
        "table": {"layers": (LayerEntry(0, 1, (TableEntry(path, 1, "d", 1, "o", "s", 0, 1),)),)},
        "source_log": {"layers": (LayerEntry(0, 1, (), (FileEntry(path, 1, "d"),)),)},
        "staged": {"outputs": (StagedOutput("out", 1, (StagedFile(path, "b", 1, 1),)),)},
        "final": {"outputs": (StagedOutput("out", 1, (StagedFile("a", path, 1, 1),)),)},
    }[place]
    manifest = dataclasses.replace(empty_manifest(), **entry)
    with pytest.raises(CorruptData, match="not a plain relative path; it was not opened"):
        Manifest.decode(manifest.encode(), "m")


@pytest.mark.parametrize("uid", ["../x", "a/b", "", ".", "a b", "x" * 64, "ä"])
def test_a_manifest_with_a_hostile_operator_uid_is_refused(uid: str) -> None:
    """Operator uids become folders."""
    manifest = dataclasses.replace(empty_manifest(), operators=(OperatorEntry(uid, "k", "s", ()),))
    with pytest.raises((CorruptData, InvalidConfiguration)):
        Manifest.decode(manifest.encode(), "m")


def test_a_manifest_with_two_operators_of_one_uid_is_refused() -> None:
    """Readers look operators up by uid: the states of one would be read by the description of the other."""
    one = OperatorEntry("op", "k", "s", ())
    for operators, is_sound in (((one, dataclasses.replace(one, uid="other")), True), ((one, one), False)):
        data = dataclasses.replace(empty_manifest(), operators=operators).encode()
        if is_sound:
            assert Manifest.decode(data, "m").operators == operators
        else:
            with pytest.raises(CorruptManifest, match="two operators of one uid"):
                Manifest.decode(data, "m")


@pytest.mark.parametrize("field", ["rows", "bytes", "epoch", "read_at_ms"])
@pytest.mark.parametrize(("number", "is_sound"), [(0, True), ((1 << 63) - 1, True), (-1, False), (1 << 63, False)])
def test_numbers_of_rows_in_flight_that_cannot_be_are_refused(field: str, number: int, is_sound: bool) -> None:
    """They are added up and compared before the rows are read."""
    place = SegmentEntry("changelog/1/x.seg", 1, "d", 1, 1, 1, 1)
    waiting = dataclasses.replace(InflightNumbers("op", 1, 1, 1, 1), **{field: number})
    batch = OpenBatch(0, (), listing=place.path, segments=(place,), operators=(waiting,))
    data = dataclasses.replace(empty_manifest(), format_version=FORMAT_WITH_ROWS, open_batch=batch).encode()
    if is_sound:
        assert Manifest.decode(data, "m").open_batch == batch
    else:
        with pytest.raises(CorruptManifest, match="what it says of in-flight rows cannot be"):
            Manifest.decode(data, "m")


def test_a_damaged_manifest_is_never_blamed_on_the_configuration() -> None:
    """The reaction to a hostile uid in a stored file is "repair", not "fix your call"."""
    manifest = dataclasses.replace(empty_manifest(), operators=(OperatorEntry("../x", "k", "s", ()),))
    with pytest.raises(CorruptData):
        Manifest.decode(manifest.encode(), "m")


def test_a_manifest_beyond_its_bound_is_refused_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flink's coordinator fell over a 49 MB metadata file; the writer must stop first and say what to do."""
    monkeypatch.setattr("state_runtime.snapshot.manifest.MANIFEST_BYTES_MAX", 2000)
    many = tuple(SegmentEntry(f"changelog/{n}", 1, "d" * 64, 1, n, 1) for n in range(50))
    with pytest.raises(CorruptManifest, match="materialize the changelog"):
        dataclasses.replace(empty_manifest(), segments=many).encode()
    files = tuple(StagedFile(f"staged/{n}", f"town={n}/x", 1, 1) for n in range(50))
    with pytest.raises(CorruptManifest, match="names 50 files of output and 0 segments: partition the output by"):
        dataclasses.replace(empty_manifest(), outputs=(StagedOutput("out", 1, files),)).encode()


@given(st.integers(0, 10**20 - 1))
@examples(100)
def test_snapshot_and_term_names_are_inverse_to_their_paths(number: int) -> None:
    """Ids are found by listing names."""
    assert paths.snapshot_id_of(paths.manifest_path(number).split("/")[1]) == number
    assert paths.term_of(paths.term_path(number).split("/")[1]) == number
    assert paths.term_of(paths.heartbeat_path(number).split("/")[1]) is None


@given(st.text(alphabet="0123456789²³٣५𝟙.jsonheartb", min_size=1, max_size=32) | st.text(alphabet="²٣1", min_size=20, max_size=20))  # fmt: skip
@examples(300)
def test_foreign_names_below_snapshots_and_terms_are_no_ids(name: str) -> None:
    """Somebody's file in the folder must neither stop a job nor pass for a snapshot."""
    for found, path in ((paths.snapshot_id_of(name), paths.manifest_path), (paths.term_of(name), paths.term_path)):
        assert found is None or name in path(found)


@given(st.text(max_size=80))
@examples(300)
def test_safe_names_are_path_parts(name: str) -> None:
    """Users name states freely; the name becomes a folder."""
    check_relative_path(f"tables/op/{paths.safe_name(name)}/x")


@pytest.mark.parametrize("name", ["", "A", "ä", "a/b", "../x", "a b", ".", "-a", "_a", "a" * 64, "a\n", "con:"])
def test_job_names_are_plain_lower_case_folders(name: str) -> None:
    """No two names may meet on a store that does not tell case apart."""
    with pytest.raises(InvalidConfiguration, match="job name"):
        paths.check_job_name(name)


def test_a_manifest_that_names_no_settings_is_written_as_before_there_were_any() -> None:
    """Readers of any age compare its bytes, and an earlier version has never heard of the field."""
    assert b"session" not in empty_manifest().encode()
    named = dataclasses.replace(empty_manifest(), session={"spark.sql.session.timeZone": "UTC"})
    assert named.format_version == empty_manifest().format_version
    assert Manifest.decode(named.encode(), "m").session == named.session
