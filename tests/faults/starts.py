"""Jobs that begin from each other's snapshots: the real beginning, driver, tasks, stores and local disks, without Spark (engine.py)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from model import CountingIds, FakeClock, empty_manifest

from state_runtime import JobSettings
from state_runtime.driver.start_position import Decide, StartFrom, StartPosition
from state_runtime.maintenance.copy.objects import CopyProgress, copy_snapshot
from state_runtime.materialize import materialize
from state_runtime.reading.references import references
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import JOB_FILE
from state_runtime.snapshot.term_files import RunStatus, write_status
from state_runtime.store import Store, open_store
from tests.faults.engine import InProcess, Run, operator, without_spark
from tests.job_settings import job_settings
from tests.stored import read_source_log, read_states

Batches = Sequence[Sequence[str]]
BATCHES: Batches = [[f"key-{(n * 7 + i * i) % 12}" for i in range(5)] for n in range(8)]
ALL = (0, (1 << 64) - 1)


@dataclass(frozen=True)
class Shop:
    """A store, and how to reach it."""

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def root(self, job: str) -> Store:
        return open_store(self.url, self.options).child(job)

    def place(self, job: str, snapshot_id: int | None = None) -> str:
        return f"{self.url}/{job}" + (f"@{snapshot_id}" if snapshot_id is not None else "")

    def start(self, job: str, mode: Any = "NO_CLAIM", snapshot_id: int | None = None) -> StartFrom:
        """From a job of this store."""
        return StartFrom(self.place(job, snapshot_id), mode, self.options)


@dataclass
class World:
    """All jobs write to one output folder and keep local copies on one host."""

    folder: Path
    clock: FakeClock = field(default_factory=FakeClock)
    ids: CountingIds = field(default_factory=CountingIds)

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def settings(self, **changes: Any) -> JobSettings:
        given: dict[str, Any] = {
            "parallelism": 2,
            "local_dir": str(self.folder / "host"),
            "materialize": False,
            "inline_bytes_max": 300,
            "upload_timeout_s": 600,
        }
        return job_settings(**{**given, **changes})

    def beginning(
        self,
        job: str,
        shop: Shop,
        start: StartFrom | None = None,
        from_snapshot: int | str | None = None,
        on_copy: Callable[[CopyProgress], None] | None = None,
    ) -> StartPosition:
        return StartPosition(
            Catalog(open_store(shop.url, shop.options), job, self.clock),
            start_from=start,
            from_snapshot=from_snapshot,
            storage_options=shop.options,
            clock=self.clock,
            ids=self.ids,
            on_copy=on_copy,
        )

    def open(self, beginning: StartPosition, decide: Decide | None = None) -> Committer:
        """Look and open, as a run does."""
        beginning.look(decide)
        return beginning.open(lambda info: empty_manifest(info.uid, 2), host="h", pid=1)

    def run(
        self,
        job: str,
        shop: Shop,
        until: int,
        start: StartFrom | None = None,
        *,
        from_snapshot: int | str | None = None,
        on_copy: Callable[[CopyProgress], None] | None = None,
        batches: Batches = BATCHES,
        take_output: bool = False,
        **settings: Any,
    ) -> Run:
        """A whole run: it begins, works off the batches up to `until`, and ends well."""
        beginning = self.beginning(job, shop, start, from_snapshot, on_copy)
        committer = self.open(beginning)
        ending = beginning.ending(committer.info, "h:1")
        spark = InProcess()
        with without_spark(spark):
            run = Run(
                shop.url,
                shop.options,
                str(self.out),
                self.settings(**settings),
                operators=1,
                clock=self.clock,
                ids=self.ids,
                spark=spark,
                on_progress=ending.watching(None, committer) if ending is not None else None,
                job=job,
                committer=committer,
                take_output=take_output,
            )
            run.run(batches[:until])
        self.beat(committer, shop.root(job), "finished")
        if ending is not None:
            ending.close(60)
        return run

    def beat(self, committer: Committer, root: Store, state: Any) -> None:
        """A heartbeat of a run."""
        term, now_ms = committer.term, self.clock.now_ms()
        write_status(root, RunStatus(term.term, term.run_uid, state, now_ms, now_ms, 2.0, term.pid, term.host))

    def fold(self, job: str, shop: Shop) -> None:
        """Tables, which the job takes over with its next checkpoint."""
        newest = self.newest(job, shop)
        materialize(shop.root(job), newest, "major", clock=self.clock, ids=self.ids)

    def savepoint(self, job: str, shop: Shop, name: str) -> str:
        """A self-contained folder, as a savepoint makes it; its place."""
        root = shop.root(job)
        folder = root.child(f"savepoints/{name}")
        copy_snapshot(root, self.newest(job, shop), folder, clock=self.clock, ids=self.ids)
        folder.create(JOB_FILE, root.read(JOB_FILE, 10_000))
        return f"{shop.place(job)}/savepoints/{name}"

    def newest(self, job: str, shop: Shop) -> Manifest:
        found = Catalog(open_store(shop.url, shop.options), job).latest()
        assert found is not None
        return found

    # --- laws ---

    def check(self, job: str, shop: Shop, until: int, batches: Batches = BATCHES) -> Manifest:
        """The newest snapshot is complete, and is the state after so many batches."""
        manifest, root = self.newest(job, shop), shop.root(job)
        for ref in references(root, manifest):
            size = root.size(ref.path)
            assert ref.bytes in (0, -1, size), ref.path
        chained = operator(0)
        states = read_states(root, manifest, chained.uid, chained.state_schemas, *ALL)
        (batch,) = [b for b in states.values() if b.num_rows]
        (value,) = [name for name in batch.schema.names if name.startswith("value.")]
        found = dict(zip(batch.column("key.k").to_pylist(), batch.column(value).to_pylist(), strict=True))
        assert found == dict(Counter(itertools.chain.from_iterable(batches[:until])))
        assert read_source_log(root, manifest, 0) == [f"file {n}" for n in range(until)]
        return manifest

    def published(self, job: str) -> Counter[tuple[str, int]]:
        """The rows of a job's files, whoever gave them their final names."""
        found: Counter[tuple[str, int]] = Counter()
        for path in self.out.glob(f"part-{job}-*.parquet"):
            found.update((row["k"], row["n"]) for row in pq.read_table(path).to_pylist())
        return found

    def check_output(self, job: str, first: int, until: int, batches: Batches = BATCHES) -> None:
        """Each key's count after each batch from `first` on that had it, once."""
        assert self.published(job) == expected_output(first, until, batches)


def expected_output(first: int, until: int, batches: Batches = BATCHES) -> Counter[tuple[str, int]]:
    """What the job gives for some batches, with those before them in its state."""
    totals: Counter[str] = Counter()
    rows: Counter[tuple[str, int]] = Counter()
    for number, batch in enumerate(batches[:until]):
        totals.update(batch)
        if number >= first:
            rows.update((key, totals[key]) for key in set(batch))
    return rows


def listing(root: Store, *, without: str = "pins/") -> dict[str, tuple[int, bytes]]:
    """Every object of a root: its size and its bytes."""
    found = {o.path: o.bytes for o in root.list_objects("") if not o.path.startswith(without)}
    return {path: (size, root.read(path, 1 << 30)) for path, size in found.items()}
