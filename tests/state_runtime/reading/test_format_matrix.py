"""What can be done with a snapshot of each format: the table of docs/formats.md, each cell tried.

A row is a test, a column what it is given; the documentation shows this table, and a test says so. The job counts keys; it runs
without Spark, tasks and driver as they are.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from model import ALL_HASHES, CountingIds, FakeClock, empty_manifest
from test_changelog_off import STATE, Run
from test_stage_task import Gather, operator, stage_task

from state_runtime.base.settings import JobSettings
from state_runtime.driver.start_position import StartFrom, StartPosition
from state_runtime.maintenance.convert.snapshot import convert
from state_runtime.maintenance.delete.claimed import end_claim
from state_runtime.materialize.records import apply
from state_runtime.materialize.run import materialize
from state_runtime.pipeline.compatibility import reconcile
from state_runtime.processors.operator import EpochClock
from state_runtime.reading.query import open_state
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.locate import OpenedSnapshot, open_place, open_snapshot
from state_runtime.snapshot.manifest import Manifest, SnapshotFormat
from state_runtime.snapshot.shard_versions import ShardVersions
from state_runtime.state.table import StateSchema
from state_runtime.store import Store, open_store
from state_runtime.task.shard_access import TaskJob
from tests.stored import read_states, write_segment

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "formats.md"
Column = Literal["changelog", "incremental", "files", "canonical"]
COLUMNS: dict[Column, str] = {
    "changelog": "`changelog`",
    "incremental": "`incremental` (tables)",
    "files": "`incremental` (files of shards)",
    "canonical": "`canonical`",
}
OPERATOR = "counts"


# --- the job -------------------------------------------------------------------------------------------------------


def job_folder(place: Path) -> Path:
    """Where `Run` looks for the job of a folder."""
    return place / "store" / "job"


def log_epoch(run: Run, *keys: str) -> Manifest:
    """An epoch with the changelog on, as `Run.epoch` is one with it off."""
    last = run.committer.last
    job = TaskJob(
        name="job",
        uid=run.committer.info.uid,
        store_url=str(run.folder / "store"),
        storage_options={},
        local_dir=str(run.folder / run.host),
        term=run.committer.term.term,
        epoch=run.ids.uid(),
        snapshot_id=last.snapshot_id + 1,
        base_snapshot_id=last.snapshot_id,
        parallelism=run.parallelism,
        clock=EpochClock(1_000, epoch=last.snapshot_id + 1),
        settings=JobSettings(backend=run.backend),  # type: ignore[arg-type]
    )
    run.seen = []
    for shard in range(run.parallelism):
        batch = run._of_shard(keys, shard)
        if batch.num_rows:
            gather = Gather()
            task = stage_task(job, operator(), ShardVersions.of(run.versions), gather)
            list(task([batch]))
            run.seen += gather.got
    for acknowledged in run.seen:
        run.versions[acknowledged.shard] = acknowledged.version
    segment = write_segment(
        run.catalog.root,
        [a.changes for a in run.seen],
        job_uid=job.uid,
        term=job.term,
        snapshot_id=job.snapshot_id,
        ids=run.ids,
    )
    return run.committer.commit(
        replace(
            last,
            kind="checkpoint",
            parallelism=run.parallelism,
            operators=(operator().entry(),),
            segments=(*last.segments, *([segment] if segment is not None else [])),
            versions={OPERATOR: ShardVersions.of(run.versions).encode()},
        )
    )


def file_epoch(run: Run, *keys: str) -> Manifest:
    """An epoch with the changelog off, whatever came before: the files are all of the state."""
    run.committer.last = replace(run.committer.last, segments=(), layers=())
    return run.epoch(*keys)


@dataclass(frozen=True)
class Snapshot:
    """One to try things with, in a folder of its own, and what it holds."""

    place: Path
    expected: Counter[str]

    @property
    def root(self) -> Store:
        return open_store(str(job_folder(self.place)))

    @property
    def opened(self) -> OpenedSnapshot:
        return open_snapshot(self.root)

    def copied(self, to: Path) -> Snapshot:
        """By a plain tool."""
        shutil.copytree(job_folder(self.place), job_folder(to))
        return Snapshot(to, self.expected)

    def check(self, *more: str) -> None:
        """Its state, as a tool reads it."""
        table = open_state(open_store(str(self.place / "store")), "job", STATE).read()
        n = next(name for name in table.column_names if name != "k")
        found = dict(zip(table.column("k").to_pylist(), table.column(n).to_pylist()))
        assert found == dict(self.expected + Counter(more))

    def goes_on(
        self, epoch: Callable[..., Manifest], parallelism: int = 2, backend: str = "arrow", host: str = "a new host"
    ) -> Snapshot:
        """A restart from it, on a host that has nothing, counts on; what it is by then."""
        run = Run(self.place, parallelism, backend, host)
        more = [*list(self.expected)[:20], "a-new-key"]
        epoch(run, *more)
        self.check(*more)
        epoch(run, "another-key")
        self.check(*more, "another-key")
        return Snapshot(self.place, self.expected + Counter([*more, "another-key"]))


def keys(first: int, last: int) -> tuple[str, ...]:
    return tuple(f"key-{n:03d}" for n in range(first, last))


def converted(source: Snapshot, place: Path, to: SnapshotFormat) -> Snapshot:
    convert(source.opened, open_store(str(job_folder(place))), to, clock=FakeClock(), ids=CountingIds(prefix=5))
    return Snapshot(place, source.expected)


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> dict[Column, Snapshot]:
    """One of each format; all but the first were converted to it."""
    folder = tmp_path_factory.mktemp("formats")
    live = Run(folder / "live", 2)
    log_epoch(live, *keys(0, 90))
    adopted = apply(
        live.committer.last,
        materialize(live.catalog.root, live.committer.last, "major", clock=FakeClock(), ids=live.ids),
    )
    live.committer.last = adopted
    log_epoch(live, *keys(0, 30), *keys(80, 100))
    log = Snapshot(folder / "live", Counter([*keys(0, 90), *keys(0, 30), *keys(80, 100)]))
    off = Run(folder / "off", 3, "rocksdb")
    off.epoch(*keys(0, 90))
    off.epoch(*keys(0, 30), *keys(80, 100))
    files = Snapshot(folder / "off", log.expected)
    return {
        "changelog": converted(log, folder / "changelog", "changelog"),
        "incremental": converted(log, folder / "incremental", "incremental"),
        "files": converted(files, folder / "files", "incremental"),
        "canonical": converted(log, folder / "canonical", "canonical"),
    }


# --- the rows ------------------------------------------------------------------------------------------------------


def other_parallelism(snapshot: Snapshot, folder: Path) -> None:
    for parallelism in (1, 3, 8):
        snapshot.copied(folder / f"{parallelism}").goes_on(log_epoch, parallelism)


def other_backend(snapshot: Snapshot, folder: Path) -> None:
    for backend in ("arrow", "rocksdb"):
        snapshot.copied(folder / backend).goes_on(log_epoch, backend=backend)


def changelog_on(snapshot: Snapshot, folder: Path) -> None:
    moved = snapshot.copied(folder / "on")
    moved.goes_on(log_epoch)
    assert moved.opened.manifest.segments


def changelog_off(snapshot: Snapshot, folder: Path) -> None:
    moved = snapshot.copied(folder / "off")
    moved.goes_on(file_epoch)
    assert moved.opened.manifest.shards is not None


def relocation(snapshot: Snapshot, folder: Path) -> None:
    """Copied, renamed and moved by plain tools, to a place of another depth and with other names."""
    copy = snapshot.copied(folder / "copied")
    deep = folder / "some" / "other" / "place"
    deep.mkdir(parents=True)
    shutil.move(job_folder(copy.place), deep / "renamed")
    opened = open_place(str(deep / "renamed"))
    states = read_states(opened.root, opened.manifest, OPERATOR, operator().state_schemas, *ALL_HASHES)
    assert dict(zip(states[STATE].column("key.k").to_pylist(), states[STATE].columns[-1].to_pylist())) == dict(
        snapshot.expected
    )
    (folder / "back" / "store").mkdir(parents=True)
    shutil.move(deep / "renamed", job_folder(folder / "back"))
    Snapshot(folder / "back", snapshot.expected).goes_on(log_epoch)


def source_deleted(snapshot: Snapshot, folder: Path) -> None:
    """What it was made of is gone, down to the last byte; nothing in the copy leads there."""
    source = snapshot.copied(folder / "source")
    made = converted(source, folder / "made", "changelog" if snapshot.opened.manifest.shards is None else "incremental")
    shutil.rmtree(folder / "source")
    made.check()
    made.goes_on(log_epoch)


def start_no_claim(snapshot: Snapshot, folder: Path) -> None:
    """Another job begins with it, twice; the source is as it was, and may go right after."""
    source = snapshot.copied(folder / "source")
    before = sorted(path for path in job_folder(source.place).rglob("*") if path.is_file())
    children = [started(source, folder / f"child-{n}", "NO_CLAIM") for n in range(2)]
    assert sorted(path for path in job_folder(source.place).rglob("*") if path.is_file()) == before
    shutil.rmtree(source.place)
    for child in children:
        child.goes_on(log_epoch)


def start_claim(snapshot: Snapshot, folder: Path) -> None:
    """Another job begins with it and owns it: after that job's first checkpoint nothing is left of it."""
    source = snapshot.copied(folder / "source")
    child = started(source, folder / "child", "CLAIM").goes_on(log_epoch)
    info = child.opened.info
    left = end_claim(source.root, info.uid, owner="test", clock=FakeClock(), ids=CountingIds(prefix=8))
    assert left.gone, left
    assert not [path for path in job_folder(source.place).rglob("*") if path.is_file()]
    child.goes_on(log_epoch, host="yet another")


def started(source: Snapshot, place: Path, mode: Literal["NO_CLAIM", "CLAIM"]) -> Snapshot:
    """The first snapshot of a job that begins with a snapshot."""
    beginning = StartPosition(
        Catalog(open_store(str(place / "store")), "job", FakeClock()),
        start_from=StartFrom(str(job_folder(source.place)), mode),
        clock=FakeClock(),
        ids=CountingIds(prefix=int(place.name[-1]) + 20 if place.name[-1].isdigit() else 30),
    )
    beginning.look()
    beginning.open(lambda info: empty_manifest(info.uid, 2), host="h", pid=1)
    return Snapshot(place, source.expected)


def schema_evolution(snapshot: Snapshot, folder: Path) -> None:
    """A column more, with a default: rows that were stored without it are read with it, and nothing is rewritten."""
    manifest = snapshot.opened.manifest
    entry = operator().entry()
    (state,) = entry.states
    wider = replace(entry, states=(replace(state, schema=f"{state.schema}, `note` string DEFAULT 'none'"),))
    (described,) = reconcile(manifest, [wider], snapshot_id=manifest.snapshot_id + 1)
    now = operator().state_schemas[STATE]
    schema = StateSchema(now.keys, now.values.append(pa.field("note", pa.string())), now.entries, now.time)
    rows = read_states(snapshot.root, manifest, described, {STATE: schema}, *ALL_HASHES)[STATE].to_pylist()
    assert {row["key.k"]: row["value.note"] for row in rows} == dict.fromkeys(snapshot.expected, "none")


def parquet_tools(snapshot: Snapshot, folder: Path) -> None:
    """The state with nothing but a Parquet reader and a glob."""
    tables = sorted(job_folder(snapshot.place).glob(f"tables/{OPERATOR}/*/*.parquet"))
    assert tables, "there is no Parquet at all"
    found = pa.concat_tables([pq.read_table(path) for path in tables])
    value = next(name for name in found.column_names if name.startswith("value."))
    counted = list(zip(found.column("key.k").to_pylist(), found.column(value).to_pylist()))
    assert Counter(dict(counted)) == snapshot.expected
    assert len(counted) == len(snapshot.expected), "each row once"


def deleted_at_once(snapshot: Snapshot, folder: Path) -> None:
    """All of it lies in one folder, which can go as a whole: nobody else's snapshot needs a byte of it."""
    made = snapshot.copied(folder / "made")
    others = [snapshot.copied(folder / "other"), converted(made, folder / "converted", "canonical")]
    shutil.rmtree(made.place)
    for other in others:
        other.check()


Cell = Literal["yes", "no"]
Row = tuple[str, Callable[[Snapshot, Path], None], tuple[Cell, Cell, Cell, Cell]]

MATRIX: tuple[Row, ...] = (
    ("restart with another parallelism", other_parallelism, ("yes", "yes", "yes", "yes")),
    ("restart with another backend", other_backend, ("yes", "yes", "yes", "yes")),
    ("go on with the changelog on", changelog_on, ("yes", "yes", "yes", "yes")),
    ("go on with the changelog off", changelog_off, ("yes", "yes", "yes", "yes")),
    ("copy, rename, move with plain tools", relocation, ("yes", "yes", "yes", "yes")),
    ("start another job from it, NO_CLAIM", start_no_claim, ("yes", "yes", "yes", "yes")),
    ("start another job from it, CLAIM", start_claim, ("yes", "yes", "yes", "yes")),
    ("lives on when what it was made from is deleted", source_deleted, ("yes", "yes", "yes", "yes")),
    ("delete its folder without harm to any other snapshot", deleted_at_once, ("yes", "yes", "yes", "yes")),
    ("schema evolution without a rewrite", schema_evolution, ("yes", "yes", "yes", "yes")),
    ("state read by any Parquet reader", parquet_tools, ("no", "no", "no", "yes")),
)


def _cells() -> Iterable[Any]:
    for title, try_it, cells in MATRIX:
        for column, cell in zip(COLUMNS, cells, strict=True):
            yield pytest.param(try_it, column, cell, id=f"{title.replace(' ', '-')}-{column}")


@pytest.mark.parametrize(("try_it", "column", "cell"), [*_cells()])
def test_a_cell_says_what_is_so(
    snapshots: dict[Column, Snapshot],
    tmp_path: Path,
    try_it: Callable[[Snapshot, Path], None],
    column: Column,
    cell: Cell,
) -> None:
    """A "no" is tried too: what the table does not promise must not work by accident in this test either."""
    if cell == "yes":
        try_it(snapshots[column], tmp_path)
    else:
        with pytest.raises(AssertionError):
            try_it(snapshots[column], tmp_path)


def test_the_snapshots_that_are_tried_are_of_their_formats(snapshots: dict[Column, Snapshot]) -> None:
    """Otherwise a column is about something else."""
    manifests = {column: snapshot.opened.manifest for column, snapshot in snapshots.items()}
    assert {column: m.snapshot_format for column, m in manifests.items()} == {
        "changelog": "changelog",
        "incremental": "incremental",
        "files": "incremental",
        "canonical": "canonical",
    }
    assert manifests["changelog"].layers, "with tables below the log"
    assert len(manifests["incremental"].layers) == 2, "with a delta above the base"
    assert manifests["files"].shards is not None


def table() -> str:
    """The matrix as Markdown."""
    lines = ["| | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [f"| {title} | {' | '.join(cells)} |" for title, _, cells in MATRIX]
    return "\n".join(lines)


def test_the_documentation_shows_this_table() -> None:
    assert table() in DOCUMENT.read_text(), f"put this into {DOCUMENT.name}:\n{table()}"
