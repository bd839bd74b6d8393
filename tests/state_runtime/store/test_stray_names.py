"""Names that are not ours, in every folder of a job root: whoever lists a folder passes them over."""

from __future__ import annotations

from pathlib import Path

import pytest
from maintenance_root import DAY_S, Job
from model import CountingIds, DictStore, FakeClock

from state_runtime.maintenance.delete.roots import delete_root
from state_runtime.maintenance.gc.collect import apply_gc, plan_gc
from state_runtime.maintenance.layout import kind_of
from state_runtime.pipeline.sinks import ParquetSink
from state_runtime.pipeline.source_position import SparkCheckpoint
from state_runtime.snapshot.control import asked_to_stop, new_requests, open_requests, pending_stop, request_stop
from state_runtime.snapshot.pins import read_pins
from state_runtime.snapshot.savepoint_record import list_savepoints
from state_runtime.store import open_store

TERM = f"{1:020d}"
ARABIC = "\u0661" * 20
SUPERSCRIPT = "\u00b2" * 20
STRAY = (
    "x (1).parquet",
    ".DS_Store",
    "._x",
    ARABIC,
    f"{ARABIC}.json",
    SUPERSCRIPT,
    f"{SUPERSCRIPT}.json",
    "%2e%2e",
    "a b.json",
    "x" * 250,
    f"{TERM}-stop-x (1).json",
    f"{TERM}-savepoint-\u0661.json",
    f"{TERM} (1).json",
)
FOLDERS = (
    "",
    "terms",
    "snapshots",
    f"snapshots/{TERM}",
    "boundary",
    "pins",
    "changelog",
    f"changelog/{TERM}",
    "tables",
    "materializations",
    "files",
    "outputs",
    f"outputs/legs/{TERM}",
    "control",
    "savepoints",
)


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("as_folder", [False, True], ids=["files", "folders"])
def test_stray_names_stop_nobody(tmp_path: Path, folder: str, as_folder: bool) -> None:
    """A person's copy, a desktop's index file, or digits of another script: the job starts, hears, and is collected
    and deleted as if they were not there."""
    job = Job(open_store(str(tmp_path)), FakeClock()).checkpoints(3)
    place = tmp_path / "job" / folder
    place.mkdir(parents=True, exist_ok=True)
    for name in STRAY:
        (place / name).mkdir() if as_folder else (place / name).write_bytes(b"not ours")
    ids = job.check()
    request_stop(job.store, "job", job.committer.term.term, clock=job.clock, ids=job.ids)
    assert len(new_requests(job.root, job.committer.term.term, ())) == 1
    assert pending_stop(job.root, job.committer.term.term) is not None
    assert asked_to_stop(job.root, job.committer.term.term)
    assert open_requests(job.root, before_term=99) == []
    assert read_pins(job.root) == []
    assert list_savepoints(job.root) == []
    job.start()
    assert job.check()[: len(ids)] == ids
    job.ended()
    job.clock.advance_s(3 * DAY_S)
    plan = plan_gc(job.root, clock=job.clock)
    assert apply_gc(job.root, plan, clock=job.clock, ids=job.ids, owner="test").failures == ()
    deleted = delete_root(job.root, clock=job.clock, ids=job.ids, owner="test")
    stray = {str(Path(folder) / name) for name in STRAY}
    assert {f.path for f in deleted.failures} <= stray, "only what is not ours stays, and is named"
    left = {str(p.relative_to(tmp_path / "job")) for p in (tmp_path / "job").rglob("*") if p.is_file()}
    assert left == (set() if as_folder else {path for path in stray if kind_of(path) is None})


def test_stray_names_in_a_staging_folder_stop_no_start(tmp_path: Path) -> None:
    """Every start clears what fenced runs have staged: it goes, and what is not ours stays."""
    spec = ParquetSink(str(tmp_path / "out")).spec("job", "0123456789abcdef", "legs", ("unused", {}))
    staging = tmp_path / "out" / spec.staging_prefix
    for folder in (TERM, ARABIC, SUPERSCRIPT, "x (1)"):
        (staging / folder).mkdir(parents=True)
        for name in STRAY:
            (staging / folder / name).write_bytes(b"not ours")
        (staging / folder / "folder.parquet").mkdir()
    (staging / TERM / "00000000000000000001-00000-aa-000.parquet").write_bytes(b"ours")
    before = {p for p in staging.rglob("*") if p.is_file()}
    spec.remove_abandoned(5, set())
    gone = before - {p for p in staging.rglob("*") if p.is_file()}
    assert {p.name for p in gone} == {"00000000000000000001-00000-aa-000.parquet"}


def test_a_request_is_heard_beside_names_that_no_request_has() -> None:
    """On any store: a path that is refused before it is opened must not keep the others from being heard."""
    root, clock = DictStore(), FakeClock()
    for name in STRAY:
        root.objects[f"job/control/{name}"] = b"not ours"
    request_stop(root, "job", 1, clock=clock, ids=CountingIds(prefix=1))
    assert len(new_requests(root.child("job"), 1, ())) == 1
    assert asked_to_stop(root.child("job"), 1)


@pytest.mark.parametrize("name", [ARABIC, SUPERSCRIPT, "\u00b2"])
def test_digits_of_other_scripts_are_no_number_of_a_source(name: str, tmp_path: Path) -> None:
    """`int` refuses some of what `str.isdigit` takes."""
    (tmp_path / "sources" / name).mkdir(parents=True)
    (tmp_path / "sources" / "3").mkdir()
    assert SparkCheckpoint(tmp_path)._sources() == [3]


def test_a_folder_is_no_object(tmp_path: Path) -> None:
    """As on an object store: it is missing, not an error, and cannot be deleted as one."""
    store = open_store(str(tmp_path))
    (tmp_path / "d").mkdir()
    assert not store.exists("d")
    with pytest.raises(FileNotFoundError):
        store.read("d", 10)
    store.delete("d")
    assert (tmp_path / "d").is_dir()
    store.put("f", b"1")
    assert store.list_names("f") == []
