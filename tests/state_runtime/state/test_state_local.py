"""Local runs: a chain of versions against a dictionary, and every damage becomes "unusable", never a wrong answer."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import (
    ALL_KEYS,
    SCHEMA,
    STATE,
    Changes,
    CountingIds,
    FakeClock,
    HashOf,
    Key,
    Value,
    after,
    batch_of,
    changes,
    colliding,
    epochs,
    examples,
    hash_functions,
    key_columns,
    spread,
)

from state_runtime.state import local
from state_runtime.state.backend import LocalCopyUnusable
from state_runtime.state.local import LocalShard, cut_hash
from state_runtime.state.runs import (
    BUDGET_ROWS_MIN,
    Layout,
    Run,
    RunFile,
    Version,
    add_run,
    budget_rows,
    plan_merge,
    record_piece,
    start_merge,
)
from state_runtime.state.table import HASH_MAX, hashes_of
from state_runtime.state.version import OpenVersion

SCHEMAS = {STATE: SCHEMA, "other": SCHEMA}


def found_in(version: OpenVersion, hash_of: HashOf, state: str = STATE) -> dict[Key, Value]:
    """All live keys, by look-up."""
    wanted = sorted(ALL_KEYS, key=hash_of)
    hashes = np.array([hash_of(k) for k in wanted], dtype=np.uint64)
    found, columns = version.find(state, hashes, key_columns(wanted))
    rows = list(zip(*(c.to_pylist() for c in columns), strict=True))
    assert all(len(c) == len(wanted) for c in columns)
    for there, row in zip(found, rows, strict=True):
        assert there or row == (None, None)
    return {key: row for key, there, row in zip(wanted, found, rows, strict=True) if there}


NOW_MS = 1_000


def write(
    shard: LocalShard, version: str, base: OpenVersion, changed: dict[str, pa.RecordBatch], runs_max: int = 4
) -> None:
    shard.write(version, base, changed, now_ms=NOW_MS, due_taken={}, runs_max=runs_max)


class Chain:
    """A shard's folder and a sequence of epochs written to it."""

    def __init__(
        self, folder: Path, hash_of: HashOf = spread, runs_max: int = 4, merge_rows_min: int = BUDGET_ROWS_MIN
    ) -> None:
        self.folder = folder
        self.clock = FakeClock()
        self.ids = CountingIds()
        self.shard = LocalShard(folder, SCHEMAS, self.clock, merge_rows_min=merge_rows_min)
        self.hash_of = hash_of
        self.runs_max = runs_max
        self.version = self.shard.write_restored(self.ids.short(), {}, NOW_MS).version.version

    def open(self, version: str = "", *, verify: bool = True) -> OpenVersion:
        return self.shard.open(version or self.version, NOW_MS, verify=verify)

    def attempt(self, before: str, changed: Changes, state: str = STATE) -> Version:
        """One attempt of a task on top of a version."""
        version = self.ids.short()
        batch = batch_of(changed, self.hash_of)
        write(self.shard, version, self.open(before), {state: batch}, self.runs_max)
        return self.open(version, verify=False).version

    def epoch(self, changed: Changes, state: str = STATE) -> Version:
        """An attempt that is committed."""
        described = self.attempt(self.version, changed, state)
        self.version = described.version
        return described


@given(epochs, hash_functions, st.integers(2, 6), st.sampled_from([1, 3, 10, BUDGET_ROWS_MIN]))
@examples(120)
def test_a_chain_of_versions_is_the_dictionary(
    tmp_path_factory: pytest.TempPathFactory, all_epochs: list[Changes], hash_of: HashOf, runs_max: int, budget: int
) -> None:
    """After every epoch, for any fan-in and any budget, with merges under way and finished."""
    chain = Chain(tmp_path_factory.mktemp("local"), hash_of, runs_max, budget)
    for count, changed in enumerate(all_epochs, 1):
        chain.epoch(changed)
        assert found_in(chain.open(), hash_of) == after(all_epochs[:count])


@given(st.lists(st.tuples(changes, st.sampled_from([STATE, "other"])), min_size=1, max_size=8))
@examples(30)
def test_states_of_one_version_do_not_mix(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Changes, str]]
) -> None:
    """Two states of one operator share folder and version, and nothing else."""
    chain = Chain(tmp_path_factory.mktemp("local"), runs_max=2)
    for changed, state in steps:
        chain.epoch(changed, state)
    for state in SCHEMAS:
        assert found_in(chain.open(), spread, state) == after([c for c, s in steps if s == state])


@given(epochs, changes, changes)
@examples(40)
def test_an_epoch_that_is_run_again_gives_the_same_state(
    tmp_path_factory: pytest.TempPathFactory, before: list[Changes], failed: Changes, again: Changes
) -> None:
    """A retry, a speculative twin or a re-run batch starts from the committed version, whatever lies beside it."""
    chain = Chain(tmp_path_factory.mktemp("local"), colliding, runs_max=2, merge_rows_min=4)
    for changed in before:
        chain.epoch(changed)
    committed = chain.version
    twin = chain.attempt(committed, failed)
    first = chain.attempt(committed, again)
    second = chain.attempt(committed, again)
    assert found_in(chain.open(first.version), colliding) == after([*before, again])
    assert found_in(chain.open(second.version), colliding) == after([*before, again])
    assert found_in(chain.open(twin.version), colliding) == after([*before, failed])
    assert found_in(chain.open(committed), colliding) == after(before)


@given(epochs, changes)
@examples(40)
def test_prune_keeps_the_committed_version_and_concurrent_attempts(
    tmp_path_factory: pytest.TempPathFactory, before: list[Changes], now: Changes
) -> None:
    """A twin of this epoch opened the same version, and its own files follow from it."""
    chain = Chain(tmp_path_factory.mktemp("local"), runs_max=2)
    for changed in before:
        chain.epoch(changed)
    twin = chain.attempt(chain.version, now)
    chain.shard.prune(chain.version)
    assert found_in(chain.open(), spread) == after(before)
    assert found_in(chain.open(twin.version), spread) == after([*before, now])


def test_pruned_versions_are_gone_and_so_are_their_files(tmp_path: Path) -> None:
    """Disk space follows the state, not the number of epochs: merged runs must not pile up for an hour."""
    chain = Chain(tmp_path, runs_max=3, merge_rows_min=7)
    for number in range(60):
        described = chain.epoch(dict.fromkeys(ALL_KEYS[number % 5 :: 5], (number, "x")))
        parent = chain.open(described.parent).version
        chain.shard.prune(described.parent)
        named = {file.file for version in (described, parent) for file in version.files}
        named |= {f"{described.version}.json", f"{described.parent}.json"}
        assert set(os.listdir(tmp_path)) == named, f"after epoch {number}"


def test_leavings_of_killed_attempts_go_after_an_hour(tmp_path: Path) -> None:
    """A live attempt needs its files for minutes; nobody else ever removes them."""
    chain = Chain(tmp_path)
    chain.epoch({ALL_KEYS[0]: (1, "x")})
    for name in ("00000000000000ff-0.arrow", ".tmp-00000000000000ff"):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (chain.clock.at_ms / 1000, chain.clock.at_ms / 1000))
    (tmp_path / "readme.txt").write_text("somebody's")
    chain.shard.prune(chain.version)
    assert (tmp_path / "00000000000000ff-0.arrow").exists()
    chain.clock.advance_s(3601)
    chain.shard.prune(chain.version)
    assert not (tmp_path / "00000000000000ff-0.arrow").exists()
    assert not (tmp_path / ".tmp-00000000000000ff").exists()
    assert (tmp_path / "readme.txt").exists()
    assert found_in(chain.open(), spread) == {ALL_KEYS[0]: (1, "x")}


# --- damage ------------------------------------------------------------------------------------------------------


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    """Two epochs, so that a version has two runs."""
    made = Chain(tmp_path / "shard")
    made.epoch({ALL_KEYS[0]: (1, "a"), ALL_KEYS[7]: (2, "b")})
    made.epoch({ALL_KEYS[7]: None, ALL_KEYS[9]: (3, "c")})
    return made


def answer(chain: Chain, *, verify: bool = True) -> dict[Key, Value] | None:
    """What the version says, None if it cannot be used; anything else fails the test."""
    try:
        return found_in(chain.open(verify=verify), spread)
    except LocalCopyUnusable:
        return None


def stored(chain: Chain) -> dict[str, list[list[dict[str, Any]]]] | None:
    """All rows of all runs of the newest version, None if it cannot be used; quicker than `answer`."""
    try:
        opened = chain.open()
    except LocalCopyUnusable:
        return None
    return {state: [batch.to_pylist() for batch in opened.batches(state)] for state in opened.mapped}


def newest_run(chain: Chain) -> Path:
    return chain.folder / chain.open().version.states[STATE].files[0].file


def test_a_flipped_bit_anywhere_in_a_run_is_found(chain: Chain) -> None:
    """A disk that lies costs a restore, never a result."""
    run = newest_run(chain)
    body = run.read_bytes()
    for position in range(0, len(body) * 8, 3):
        damaged = bytearray(body)
        damaged[position // 8] ^= 1 << position % 8
        run.unlink()
        run.write_bytes(damaged)
        assert stored(chain) is None, f"bit {position}"


def test_no_flipped_bit_of_a_version_file_changes_an_answer(chain: Chain) -> None:
    """One bit in a state's name, and the state would look empty: such a file must not be believed."""
    right = stored(chain)
    assert right is not None
    version = chain.folder / f"{chain.version}.json"
    body = version.read_bytes()
    wrong = []
    for position in range(0, len(body) * 8, 3):
        damaged = bytearray(body)
        damaged[position // 8] ^= 1 << position % 8
        version.write_bytes(damaged)
        found = stored(chain)
        if found is not None and found != right:
            wrong.append((position, bytes(damaged[max(0, position // 8 - 12) : position // 8 + 12])))
    assert not wrong, f"{len(wrong)} flipped bits give a wrong answer, e.g. {wrong[:3]}"


def test_a_version_file_cut_anywhere_is_unusable(chain: Chain) -> None:
    """A kill between write and rename cannot do this, a full disk or a bad copy can."""
    version = chain.folder / f"{chain.version}.json"
    body = version.read_bytes()
    for length in range(len(body)):
        version.write_bytes(body[:length])
        assert answer(chain) is None, f"{length} bytes"


@pytest.mark.parametrize("verify", [True, False])
def test_a_run_cut_anywhere_is_unusable(chain: Chain, verify: bool) -> None:
    """The size alone tells."""
    run = newest_run(chain)
    body = run.read_bytes()
    for length in range(0, len(body), 7):
        run.unlink()
        run.write_bytes(body[:length])
        assert answer(chain, verify=verify) is None


def replace_with_link(path: Path) -> None:
    real = path.with_name("real")
    path.rename(real)
    path.symlink_to(real)


def replace_folder_with_link(path: Path) -> None:
    real = path.parent.with_name("real-folder")
    path.parent.rename(real)
    path.parent.symlink_to(real, target_is_directory=True)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda run, version: run.unlink(), id="run missing"),
        pytest.param(lambda run, version: version.unlink(), id="version missing"),
        pytest.param(lambda run, version: replace_with_link(run), id="run is a symlink"),
        pytest.param(lambda run, version: replace_with_link(version), id="version is a symlink"),
        pytest.param(lambda run, version: replace_folder_with_link(run), id="folder is a symlink"),
        pytest.param(lambda run, version: run.parent.chmod(0o755), id="folder readable by others"),
        pytest.param(lambda run, version: run.parent.chmod(0o770), id="folder writable by a group"),
        pytest.param(lambda run, version: (run.unlink(), run.mkdir()), id="run is a folder"),
        pytest.param(lambda run, version: (version.unlink(), version.mkdir()), id="version is a folder"),
        pytest.param(lambda run, version: version.write_bytes(b"x" * (1 << 21)), id="version too large"),
        pytest.param(lambda run, version: os.truncate(run, 1 << 30), id="run grown"),
    ],
)
def test_a_damaged_folder_is_unusable(chain: Chain, damage: Callable[[Path, Path], Any], verify: bool) -> None:
    """Whatever happened to the disk, the primary serves."""
    damage(newest_run(chain), chain.folder / f"{chain.version}.json")
    assert answer(chain, verify=verify) is None


def run_entry(**changed: Any) -> dict[str, Any]:
    whole = {"file": "0000000000000003-0.arrow", "rows": 2, "bytes": 1, "digest": "d", "low": 0, "high": HASH_MAX}
    return {**whole, **changed}


def layout(*pieces: Any, merges: Any = (), **changed: Any) -> dict[str, Any]:
    return {"runs": [{"pieces": pieces, "low": 0, "taken_ms": None, **changed}], "merges": merges}


@pytest.mark.parametrize(
    "described",
    [
        pytest.param([], id="a list"),
        pytest.param(7, id="a number"),
        pytest.param({"states": []}, id="states are a list"),
        pytest.param({"states": {STATE: 7}}, id="a layout is a number"),
        pytest.param({"states": {STATE: {"runs": 7, "merges": []}}}, id="runs are a number"),
        pytest.param({"states": {STATE: layout(7)}}, id="a file is a number"),
        pytest.param({"states": {STATE: layout(run_entry(file="../../etc/passwd"))}}, id="a file elsewhere"),
        pytest.param({"states": {STATE: layout(run_entry(file="/etc/passwd"))}}, id="an absolute file"),
        pytest.param({"states": {STATE: layout(run_entry(rows="many"))}}, id="rows are no number"),
        pytest.param({"states": {STATE: layout(run_entry(rows=math.inf))}}, id="rows are infinite"),
        pytest.param({"states": {STATE: layout(run_entry(bytes=None))}}, id="bytes are null"),
        pytest.param({"states": {STATE: layout(taken_ms="x")}}, id="a time is no number"),
        pytest.param({"states": {STATE: layout(merges=[{"start": 0, "count": 1}])}}, id="a merge of nothing"),
        pytest.param({"states": {STATE: layout(run_entry(low=-1))}}, id="a range below all hashes"),
        pytest.param({"states": {STATE: layout(run_entry(high=1 << 64))}}, id="a range above all hashes"),
        pytest.param({"states": {STATE: layout(run_entry(low=5, high=4))}}, id="a range of nothing"),
        pytest.param({"snapshot_id": "x"}, id="a snapshot that is no number"),
        pytest.param({"epoch": ...}, id="no epoch"),
        pytest.param({"format": 3}, id="older format"),
        pytest.param({"format": 5}, id="newer format"),
        pytest.param({"version": "00000000000000aa"}, id="another version"),
        pytest.param({"states": ...}, id="no states"),
        pytest.param({"parent": ...}, id="no parent"),
    ],
)
def test_a_version_file_of_another_shape_is_unusable(chain: Chain, described: Any) -> None:
    """The file may have been written by anything, with a right digest; no kind of error but ours may end the task."""
    stamp = {"snapshot_id": 0, "epoch": "", "restored_from": ""}
    whole = {"format": 4, "version": chain.version, "parent": "", "states": {STATE: layout()}, **stamp}
    write_version_file(chain, whole)
    assert answer(chain) == {}, "what is damaged below is right otherwise"
    if isinstance(described, dict):
        described = {k: v for k, v in {**whole, **described}.items() if v is not ...}
    write_version_file(chain, described)
    assert answer(chain) is None


def write_version_file(chain: Chain, described: Any) -> None:
    body = json.dumps(described).encode()
    path = chain.folder / f"{chain.version}.json"
    path.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


def describe_files(chain: Chain, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The version file with other descriptions of the same files."""
    described = json.loads((chain.folder / f"{chain.version}.json").read_bytes().partition(b"\n")[2])
    for stored_layout in described["states"].values():
        for run in stored_layout["runs"]:
            run["pieces"] = [change(piece) for piece in run["pieces"]]
    write_version_file(chain, described)


def as_before(chain: Chain, piece: dict[str, Any]) -> dict[str, Any]:
    """As versions described a file that knew no check value."""
    return {name: value for name, value in piece.items() if name != "check"} | {
        "digest": sha256_of(chain.folder / piece["file"])
    }


def flipped(body: bytes) -> bytes:
    """With another bit in the key hashes."""
    at = body.index(np.uint64(spread(ALL_KEYS[9])).tobytes())
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_copy_of_an_earlier_version_is_checked_by_its_digest(chain: Chain) -> None:
    """It has no check value; after an upgrade each host still finds out whether its copies are whole."""
    path = newest_run(chain)
    right = answer(chain)
    describe_files(chain, lambda piece: as_before(chain, piece))
    assert answer(chain) == right
    body = path.read_bytes()
    path.write_bytes(flipped(body))
    assert answer(chain) is None
    path.write_bytes(body)
    assert answer(chain) == right
    describe_files(chain, lambda piece: {**piece, "digest": ""})
    assert answer(chain) is None, "what nothing proves is not believed"


@pytest.mark.parametrize("stored_before", [False, True])
def test_what_is_exported_is_known_by_its_digest(tmp_path: Path, stored_before: bool) -> None:
    """Also what was written while nobody stored it; the first version written after that has it for good."""
    chain = Chain(tmp_path / "chain", merge_rows_min=2)
    chain.shard = LocalShard(chain.folder, SCHEMAS, chain.clock, with_digests=stored_before)
    for n in range(3):
        chain.epoch({ALL_KEYS[n]: (n, "x")})
    assert [bool(file.digest) for file in chain.open().version.files] == [stored_before] * 3
    exported = chain.shard.export(chain.version)
    assert [file.digest for file in exported.files] == [sha256_of(file.path) for file in exported.files]
    chain.shard = LocalShard(chain.folder, SCHEMAS, chain.clock, with_digests=True)
    described = chain.epoch({ALL_KEYS[5]: (5, "y")})
    assert [file.digest for file in described.files] == [
        sha256_of(chain.folder / file.file) for file in described.files
    ]


def test_a_damaged_file_gets_no_digest(chain: Chain) -> None:
    """Else its bytes would be uploaded as if they were the state."""
    path = newest_run(chain)
    path.write_bytes(flipped(path.read_bytes()))
    with pytest.raises(LocalCopyUnusable, match="was altered"):
        chain.shard.export(chain.version)
    after_switch = LocalShard(chain.folder, SCHEMAS, chain.clock, with_digests=True)
    base = after_switch.open(chain.version, NOW_MS, verify=False)
    with pytest.raises(LocalCopyUnusable, match="was altered"):
        write(after_switch, chain.ids.short(), base, {STATE: batch_of({ALL_KEYS[0]: (9, "z")})}, 4)


@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"runs":' * 100_000, b"\xff\xfe", b"", b"{}", b"NaN"])
def test_hostile_json_as_a_version_is_unusable(chain: Chain, body: bytes) -> None:
    """Deep nesting exhausts Python's recursion, which is no ValueError."""
    (chain.folder / f"{chain.version}.json").write_bytes(body)
    assert answer(chain) is None


@pytest.mark.parametrize("version", ["", "-" * 16, "../../../etc/x", "0" * 15, "0" * 17, "G" * 16, "0" * 16 + "\n"])
def test_a_foreign_version_id_is_unusable(chain: Chain, version: str) -> None:
    """Ids come out of a manifest."""
    with pytest.raises(LocalCopyUnusable):
        chain.shard.open(version, NOW_MS, verify=True)


def test_a_run_of_another_schema_is_unusable(chain: Chain, tmp_path: Path) -> None:
    """A processor that changed its schema must not read old columns as new ones."""
    from state_runtime.state.table import StateSchema

    other = StateSchema(SCHEMA.keys, pa.schema([("n", pa.int32()), ("s", pa.string())]))
    with pytest.raises(LocalCopyUnusable):
        LocalShard(chain.folder, {STATE: other}, FakeClock()).open(chain.version, NOW_MS, verify=False)


def test_prune_survives_a_damaged_neighbour(chain: Chain) -> None:
    """Clean-up runs before the write of an epoch; what it cannot read must not end the task."""
    for number, body in enumerate(
        [b"", b"[" * 200_000, b'{"format":1,"version":"000000000000aa02","runs":[],"parent":""}']
    ):
        (chain.folder / f"000000000000aa{number:02d}.json").write_bytes(body)
    chain.shard.prune(chain.version)
    assert answer(chain) is not None


# --- a disk that does not take it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_failing_write_is_an_oserror_and_the_old_version_still_serves(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, number: int, fails_at: int
) -> None:
    """The task goes on without a local copy; the committed version beside it stays what it was."""
    right = answer(chain)
    calls = [0]

    def failing(write: Callable[..., Any]) -> Callable[..., Any]:
        def fail(path: Path, *what: Any, **settings: Any) -> Any:
            calls[0] += 1
            written = write(path, *what, **settings)
            if calls[0] == fails_at:
                os.truncate(path, path.stat().st_size // 2)
                raise OSError(number, os.strerror(number))
            return written

        return fail

    for name in ("write_run", "write_private_file"):
        monkeypatch.setattr(local, name, failing(getattr(local, name)))
    both = {STATE: batch_of({ALL_KEYS[0]: (9, "z")}), "other": batch_of({ALL_KEYS[1]: (9, "z")})}
    opened = chain.open()
    attempt = chain.ids.short()
    with pytest.raises(OSError, match=os.strerror(number)):
        write(chain.shard, attempt, opened, both)
    monkeypatch.undo()
    assert answer(chain) == right
    with pytest.raises(LocalCopyUnusable):
        chain.shard.open(attempt, NOW_MS, verify=False)


def test_a_folder_that_others_may_read_is_not_written_to(tmp_path: Path) -> None:
    """State is private to the user."""
    folder = tmp_path / "shard"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="not a private folder of this user"):
        LocalShard(folder, SCHEMAS, FakeClock()).write_restored("0" * 16, {}, NOW_MS)
    assert os.listdir(folder) == []


def test_what_is_written_is_private(chain: Chain) -> None:
    """Folder 0700, files 0600, whatever the umask."""
    before = os.umask(0)
    try:
        chain.epoch({ALL_KEYS[0]: (5, "x")})
    finally:
        os.umask(before)
    assert chain.folder.stat().st_mode & 0o777 == 0o700
    assert {f.stat().st_mode & 0o077 for f in chain.folder.iterdir()} == {0}


# --- merging -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=80), st.integers(2, 16))
@examples(200)
def test_the_number_of_runs_never_exceeds_its_bound(rows: list[int], runs_max: int) -> None:
    """A look-up searches every run."""
    runs: list[int] = []
    for changed in rows:
        count = plan_merge([changed, *runs], runs_max)
        assert 1 <= count <= len(runs) + 1
        runs = [sum([changed, *runs][:count]), *[changed, *runs][count:]]
        assert len(runs) <= runs_max


@pytest.mark.parametrize("runs_max", [4, 8, 16])
@pytest.mark.parametrize("epochs_run", [256, 1024, 4096])
def test_a_row_is_rewritten_about_log_times(epochs_run: int, runs_max: int) -> None:
    """Equal epochs of new keys: write amplification grows with the logarithm, not with the number of epochs.

    (Two runs at most cannot do that: then every epoch or two rewrites the state.)
    """
    runs: list[int] = []
    written = 0
    for _ in range(epochs_run):
        count = plan_merge([100, *runs], runs_max)
        runs = [sum([100, *runs][:count]), *[100, *runs][count:]]
        written += runs[0]
    assert written / (100 * epochs_run) <= 2 * math.log2(epochs_run) + 2


def test_a_large_old_run_is_left_alone_by_small_epochs() -> None:
    """The cost of an epoch follows its changes, not the state."""
    runs = [1_000_000]
    written = 0
    for _ in range(200):
        count = plan_merge([10, *runs], 8)
        runs = [sum([10, *runs][:count]), *[10, *runs][count:]]
        written += runs[0]
    assert runs[-1] == 1_000_000
    assert written < 200 * 10 * 20


def merged(runs: Layout, changed: int, runs_max: int, epoch: int) -> tuple[Layout, int]:
    """One epoch's merging on a layout, with hashes as fractions and keys that never repeat; also the rows read."""
    layout = start_merge(add_run(runs, RunFile(f"{epoch}", changed, 0, "")), runs_max)
    budget = budget_rows(layout, changed, runs_max)
    read = 0
    for older in range(len(layout.merges) - 1, -1, -1):
        merge = layout.merges[len(layout.merges) - 1 - older]
        inputs = layout.inputs(merge)
        rows, done = sum(run.rows for run in inputs), inputs[0].low / 2**64
        share = min(1.0, done + budget / rows)
        piece = RunFile("p", round(rows * (share - done)), 0, "")
        layout = record_piece(layout, merge, piece, None if share == 1.0 else int(share * 2**64))
        read += piece.rows
        budget -= piece.rows
        if budget <= 0:
            break
    return layout, read


@pytest.mark.parametrize(
    ("state", "changed"), [(1_000_000, 95_000), (5_000_000, 25_000), (5_000_000, 500), (100_000, 50_000), (0, 20_000)]
)
def test_no_epoch_pays_for_a_full_rewrite_and_runs_stay_few(state: int, changed: int) -> None:
    """Merging is spread over epochs: what one reads is bounded by its changes and a small share of the state."""
    layout = Layout((Run((RunFile("base", state, 0, ""),)),) if state else ())
    for epoch in range(400):
        layout, read = merged(layout, changed, 8, epoch)
        total = sum(run.rows for run in layout.runs)
        rewrites = 2 + math.log2(1 + total / changed) / 2
        assert read <= 2 * max(BUDGET_ROWS_MIN, rewrites * changed, total / 64) + 1
        assert len(layout.runs) <= 4 * 8
        assert len(layout.files) <= 3 * 64


@given(st.lists(st.none() | st.integers(-5, 5), min_size=2, max_size=12), st.integers(2, 4), st.integers(-5, 5))
@examples(100)
def test_no_merge_makes_a_row_look_taken(taken: list[int | None], runs_max: int, through_ms: int) -> None:
    """A merge's output is at most as far as each of its inputs; a later epoch's bound is for all runs there are."""
    runs = tuple(Run((RunFile(f"{n}", 10, 0, ""),), taken_ms=t) for n, t in enumerate(taken))
    started = start_merge(Layout(runs), runs_max)
    for layout in (started, started.with_taken(through_ms)):
        for merge in layout.merges:
            output = layout.runs[merge.start].taken_ms
            inputs = [run.taken_ms for run in layout.inputs(merge)]
            assert output is None or all(t is not None and output <= t for t in inputs)
            assert output is not None or None in inputs
    raised = [run.taken_ms for run in started.with_taken(through_ms).runs]
    before = [run.taken_ms for run in started.runs]
    assert raised == [through_ms if t is None else max(t, through_ms) for t in before]
    assert add_run(started.with_taken(through_ms), RunFile("new", 1, 0, "")).runs[0].taken_ms is None


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=300), min_size=1, max_size=5), st.integers(1, 400))
@examples(100)
def test_a_merge_range_makes_progress_and_reads_about_its_budget(lists: list[list[int]], budget: int) -> None:
    """A range that read nothing would never end; one that read everything would not be bounded."""
    inputs = [batch_of_hashes(sorted(set(hashes))) for hashes in lists]
    total = sum(batch.num_rows for batch in inputs)
    low = min((int(h) for batch in inputs for h in hashes_of(batch)[:1]), default=0)
    end = cut_hash(inputs, low, budget)
    if end is None:
        assert total <= budget or len({int(h) for batch in inputs for h in hashes_of(batch)}) <= 128 * len(inputs)
        return
    read = sum(int(np.count_nonzero(hashes_of(batch) < np.uint64(end))) for batch in inputs)
    assert 0 < read <= 2 * budget + 2 * len(inputs) * (1 + total // 128)


def batch_of_hashes(hashes: list[int]) -> pa.RecordBatch:
    """Rows that differ in their hash only."""
    count = len(hashes)
    columns = [pa.nulls(count, f.type) for f in SCHEMA.values]
    keys = [pa.nulls(count, f.type) for f in SCHEMA.keys]
    return SCHEMA.batch(np.array(hashes, dtype=np.uint64), None, keys, columns)
