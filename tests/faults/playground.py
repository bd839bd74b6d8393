"""A job on a store, a disk and processes that fail: all drawn from one seed.

The driver loop, the tasks, the changelog writer, the commit protocol, the sink and the local copies are the real ones (engine.py).
A process may be killed at any request; or it freezes there, others start, live and die meanwhile, and then it goes on.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from model import CountingIds
from tenacity import wait_none

from state_runtime import Progress, store
from state_runtime.base.errors import CorruptData, Fenced, StillstateError
from state_runtime.base.settings import MaterializationSettings, UploadSettings
from state_runtime.changelog.parts import sha256
from state_runtime.changelog.reader import fetch_part, read_index
from state_runtime.changelog.upload import Uploader
from state_runtime.driver import epoch_line
from state_runtime.materialize import BackgroundMaterializer, background
from state_runtime.pipeline import output_layout, sinks, staging
from state_runtime.pipeline.sinks import ParquetSink
from state_runtime.reading.references import references
from state_runtime.restore import objects as host_objects
from state_runtime.snapshot import commit
from state_runtime.snapshot.manifest import Manifest, StagedOutput
from state_runtime.snapshot.paths import manifest_path
from state_runtime.store import Store, fsspec_store
from state_runtime.task import persist, shard_access
from state_runtime.task import stage as task
from tests.faults.engine import InProcess, Run, operator, without_spark
from tests.faults.virtual import CALM, FaultPlan, FaultyFs, Killed, VirtualTime
from tests.job_settings import job_settings
from tests.stored import read_source_log, read_states

STORE, OUT = "memory://lake/state", "memory://lake/out"
NAMES = [f"key-{n}" for n in range(12)]
PROCESSES_MAX = 50
NESTED_MAX = 2
POLICY = UploadSettings.model_construct(timeout_s=1.0, attempts_max=3, deadline_s=20.0, in_flight_bytes_max=4096)


@dataclass(frozen=True)
class Script:
    """What one seed does.

    Attributes:
        freeze: chance per request that its process sleeps there while others go on.
        repeat: chance per task that it runs once more although it succeeded.
        damage: chance per process that the local disk is damaged after it.
        changelog: "on", "off", or "either": each process has its own mode.
    """

    batches: tuple[tuple[str, ...], ...]
    plan: FaultPlan
    settings: Mapping[str, Any]
    operators: int
    freeze: float
    repeat: float
    damage: float
    rescale: bool
    changelog: str

    @staticmethod
    def drawn(rng: random.Random) -> Script:
        batches = tuple(tuple(rng.choice(NAMES) for _ in range(rng.randint(1, 25))) for _ in range(rng.randint(3, 8)))
        storm = rng.choice([0.0, 0.1, 0.4])
        return Script(
            batches,
            FaultPlan(
                before=storm,
                after=storm,
                refused=rng.choice([0.0, 0.0, 0.01]),
                outage=rng.choice([0.0, 0.02]),
                kill=rng.choice([0.0, 0.01, 0.04]),
                slow=rng.choice([0.0, 0.3]),
                hang=rng.choice([0.0, 0.1]),
            ),
            {
                "inline_bytes_max": rng.choice([0, 900, 1 << 20]),
                "checkpoint_batches": rng.choice([1, 1, 2, 3]),
                "pending_bytes_max": rng.choice([0, 2000, 1 << 20]),
                "local_recovery": rng.random() < 0.8,
                "compression": rng.choice(["lz4", "zstd", "none"]),
            },
            operators=rng.choice([1, 1, 2]),
            freeze=rng.choice([0.0, 0.0, 0.01]),
            repeat=rng.choice([0.0, 0.1]),
            damage=rng.choice([0.0, 0.5]),
            rescale=rng.random() < 0.3,
            changelog=rng.choice(["on", "on", "off", "either"]),
        )


class Process:
    """One driver process with its tasks, from its start to its end, or to where it dies."""

    def __init__(self, world: World, number: int, parallelism: int, plan: FaultPlan) -> None:
        self.world = world
        self.number = number
        self.parallelism = parallelism
        self.fs = FaultyFs(world.objects, world.rng, plan)
        self.fs.interrupt = lambda: world.freeze(self)
        self.time = VirtualTime(self.fs.attempt_s)
        self.ids = CountingIds(number + 1)
        self.uploader = Uploader(POLICY, self.time, self.time)
        self.run: Run | None = None
        mode = world.script.changelog
        self.changelog = mode if mode != "either" else world.rng.choice(["on", "off"])
        world.seen[f"changelog {mode}"] += 1

    def live(self) -> None:
        settings = job_settings(
            parallelism=self.parallelism,
            local_dir=str(self.world.local),
            materialization=MaterializationSettings(by="dagster"),
            runs_max=2,
            changelog=self.changelog,
            **self.world.script.settings,
        )
        self.run = Run(
            STORE,
            {},
            OUT,
            settings,
            operators=self.world.script.operators,
            clock=self.time,
            ids=self.ids,
            spark=self.world.spark,
            on_progress=self._checkpointed,
        )
        self.run.run(self.world.script.batches)

    def _checkpointed(self, progress: Progress) -> None:
        self.world.count(self, progress)


class World:
    """The store, the local disk, all processes; and what must hold between them."""

    def __init__(self, seed: int, rng: random.Random, local: Path) -> None:
        self.seed = seed
        self.rng = rng
        self.script = Script.drawn(rng)
        self.local = local
        self.objects: dict[str, bytes] = {}
        self.processes: list[Process] = []
        self.seen: Counter[str] = Counter()
        self.running: list[Process] = []
        self.spark = InProcess(lambda: rng.random() < self.script.repeat)
        self.done = False
        self.locks = 0

    def fail(self, why: str) -> None:
        raise AssertionError(f"STILLSTATE_TEST_SEED={self.seed}: {why}; {self.script}")

    # --- what the processes report ---

    def published(self, output: StagedOutput) -> None:
        """Invariant 3: a process publishes what a stored snapshot names that is its own, or that it took over with its own.

        One that slept meanwhile may do so after its successor did: giving a file its name twice changes nothing.
        """
        process = self.running[-1]
        assert process.run is not None
        last = process.run.committer.last
        if self._manifest(manifest_path(last.snapshot_id)).commit_id != last.commit_id:
            self.fail(f"process {process.number} publishes for snapshot {last.snapshot_id}, which is another's")
        if output not in last.outputs:
            self.fail(f"process {process.number} publishes what its snapshot does not name")
        self.seen["published"] += 1

    def count(self, process: Process, progress: Progress) -> None:
        """Invariant 6: an undisturbed checkpoint is one segment and one manifest, beside the tasks' own objects."""
        requests, process.fs.requests = process.fs.requests, Counter()
        if process.fs.faults.total() or process.fs.slept or "manifest" not in progress.phases_ms:
            process.fs.faults.clear()
            return
        if (
            process.changelog == "off"
            or self.script.settings["checkpoint_batches"] > 1
            or self.script.plan.slow
            or self.script.plan.hang
        ):
            return
        self.seen["undisturbed"] += 1
        written = Counter({key: n for key, n in requests.items() if key[0] in ("put", "create")})
        direct = written.pop(("put", "direct"), 0)
        if (written[("put", "segment")], written[("create", "manifest")]) != (1, 1 + self._opened(process)):
            self.fail(f"an undisturbed epoch wrote {dict(requests)}")
        if direct < progress.uploads:
            self.fail(f"{progress.uploads} uploads are told, and {direct} were made")

    def _opened(self, process: Process) -> int:
        """Its fencing snapshot comes before its first epoch."""
        assert process.run is not None
        return int(process.run.driver.epochs == 1)

    # --- the course of events ---

    def play(self) -> None:
        while not self.done:
            self._next_process()
        # Whoever comes last publishes what the newest snapshot names. Nobody lives beside it: it would be fenced.
        self.locks += 1
        self._live(Process(self, len(self.processes), self.processes[-1].parallelism, CALM))
        if not self.done:
            self.fail("a calm process did not reach the end")
        self.check()

    def _next_process(self) -> None:
        number = len(self.processes)
        if number > PROCESSES_MAX:
            self.fail("the job makes no progress although the storm is over")
        storm = number < 16
        parallelism = (
            self.rng.choice([1, 2, 3]) if self.script.rescale or not number else self.processes[-1].parallelism
        )
        self._live(Process(self, number, parallelism, self.script.plan if storm else CALM))
        if self.rng.random() < self.script.damage and not self.running:
            self._damage()

    def freeze(self, process: Process) -> None:
        """Called at each request: now and then the process sleeps here, and others live meanwhile."""
        if (
            self.locks
            or len(self.running) > NESTED_MAX
            or self.rng.random() >= self.script.freeze
            or len(self.processes) > 30
        ):
            return
        process.fs.slept = True
        self.seen["frozen"] += 1
        for _ in range(self.rng.randint(1, 2)):
            self._next_process()

    def _live(self, process: Process) -> None:
        self.processes.append(process)
        self.running.append(process)
        self.done = False
        sleeper = len(self.running) == 1
        try:
            process.live()
            self.done = True
        except CorruptData as error:
            self.fail(f"the primary is whole, and yet: {error}")  # invariant 5: whatever is on the local disk
        except (Killed, StillstateError) as error:
            self.seen[type(error).__name__] += 1
            if isinstance(error, Fenced) and process.fs.slept:
                self.seen["woken and fenced"] += 1
        finally:
            self._end(process)
            self.running.pop()
        self.seen["ends alone"] += sleeper

    def _end(self, process: Process) -> None:
        """Its threads end with it; now and then late attempts end first."""
        try:
            if not process.fs.dead and self.rng.random() < 0.5:
                process.time.drain()
        except Killed:
            self.seen["killed at its end"] += 1
        process.time.forget()
        totals = process.uploader.totals
        self.seen["hedged"] += totals.attempts > totals.uploads

    def _damage(self) -> None:
        """The disk of the host, between two processes: invariant 5."""
        files = sorted(f for f in self.local.rglob("*") if f.is_file())
        if not files:
            return
        victim = self.rng.choice(files)
        kind = self.rng.choice(["flip", "cut", "remove", "folder", "all"])
        self.seen[f"local {kind}"] += 1
        body = bytearray(victim.read_bytes())
        if kind == "flip" and body:
            body[self.rng.randrange(len(body))] ^= 1 << self.rng.randrange(8)
            victim.chmod(0o600)
            victim.write_bytes(bytes(body))
        elif kind == "cut":
            victim.chmod(0o600)
            victim.write_bytes(bytes(body[: len(body) // 2]))
        elif kind == "all":
            shutil.rmtree(self.local)
        else:
            victim.unlink()
            if kind == "folder":
                victim.mkdir()

    # --- laws ---

    def _manifests(self) -> list[str]:
        prefix = "/lake/state/job/"
        return sorted(
            p.removeprefix(prefix) for p in self.objects if p.startswith(prefix) and p.endswith("/manifest.json")
        )

    def _manifest(self, path: str) -> Manifest:
        return Manifest.decode(self.objects[f"/lake/state/job/{path}"], path)

    def check(self) -> None:
        """What must hold of all that is stored, once all batches are done."""
        calm = FaultyFs(self.objects, self.rng)
        root: Store = fsspec_store.FsspecStore(calm, "/lake/state/job", "lake")
        manifests = [self._manifest(path) for path in self._manifests()]
        checked: set[str] = set()
        for manifest in manifests:
            self._check_references(root, manifest)
            for segment in manifest.segments:
                if segment.path not in checked:
                    checked.add(segment.path)
                    self._check_segment(root, manifest, segment)
        self._check_ids(manifests)
        newest = manifests[-1]
        # What lies in files of shards is shown by the output: each batch's totals come from the state before it.
        for number, expected in enumerate(self._expected_states() if newest.shards is None else ()):
            chained = operator(number)
            states = read_states(root, newest, chained.uid, chained.state_schemas, 0, (1 << 64) - 1)
            (batch,) = [b for b in states.values() if b.num_rows]
            (value,) = [name for name in batch.schema.names if name.startswith("value.")]
            found = dict(zip(batch.column("key.k").to_pylist(), batch.column(value).to_pylist(), strict=True))
            if found != expected:
                self.fail(f"the state of {chained.uid} is {found}, and should be {expected}")
        lines = [f"file {n}" for n in range(len(self.script.batches))]
        if read_source_log(root, newest, 0) != lines:
            self.fail("the source's log of seen files lost or repeated a line")
        self._check_output()

    def _expected_states(self) -> Iterator[dict[str, int]]:
        """The first operator counts rows; each further one the batches in which the one before it emitted the key."""
        yield dict(Counter(itertools.chain.from_iterable(self.script.batches)))
        for _ in range(1, self.script.operators):
            yield dict(Counter(itertools.chain.from_iterable(map(set, self.script.batches))))

    def _check_segment(self, root: Store, manifest: Manifest, segment: Any) -> None:
        """Invariants 2 and 4: complete, and nothing of it was deleted by a late attempt's clean-up."""
        try:
            body = root.read(segment.path, segment.bytes)
            if len(body) != segment.bytes or sha256(body) != segment.digest:
                self.fail(f"{segment.path} is not what the manifest says")
            for part in read_index(root, segment, manifest.job_uids).parts:
                if part.kind == "state":
                    fetch_part(root, segment.path, part)
        except (StillstateError, FileNotFoundError) as error:
            self.fail(f"snapshot {manifest.snapshot_id} is not complete: {error}")

    def _check_references(self, root: Store, manifest: Manifest) -> None:
        """Invariants 2 and 4: an epoch that fails removes nothing that a snapshot before it needs.

        Flink's IncrementalStateReuseAfterFailureITCase: of a chain, one operator's files are uploaded when the other fails.
        """
        try:
            for needed in references(root, manifest):
                size = root.size(needed.path)
                if needed.bytes > 0 and size != needed.bytes:
                    self.fail(
                        f"snapshot {manifest.snapshot_id} needs {needed.bytes} bytes of {needed.path}, and there are {size}"
                    )
        except (StillstateError, FileNotFoundError) as error:
            self.fail(f"snapshot {manifest.snapshot_id} is not complete: {error}")

    def _check_ids(self, manifests: list[Manifest]) -> None:
        """Invariant 3: what a process was told is what is stored."""
        stored = {m.snapshot_id: m.commit_id for m in manifests}
        for process in self.processes:
            if process.run is not None:
                last = process.run.committer.last
                if stored.get(last.snapshot_id) != last.commit_id:
                    self.fail(f"process {process.number} was told that snapshot {last.snapshot_id} is its own")

    def _check_output(self) -> None:
        """Invariant 1: each key's count after each batch that had it, once."""
        totals: Counter[str] = Counter()
        expected: Counter[tuple[str, int]] = Counter()
        for batch in self.script.batches:
            totals.update(batch if self.script.operators == 1 else set(batch))
            expected.update((key, totals[key]) for key in set(batch))
        found: Counter[tuple[str, int]] = Counter()
        for path, body in self.objects.items():
            if path.startswith("/lake/out/part-"):
                found.update((row["k"], row["n"]) for row in pq.read_table(pa.BufferReader(body)).to_pylist())
        if found != expected:
            self.fail(f"output lost {dict(expected - found)}, and repeated {dict(found - expected)}")


class _Now:
    """The file system as whichever process is running sees it: stores are kept over processes that die."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world.running[-1].fs, name)


def _look_if_due(materializer: BackgroundMaterializer, manifest: Manifest, *, can_wait: bool) -> None:
    """In place of the thread that looks for records now and then (nobody folds here)."""
    looked_s = materializer._polled_s
    if looked_s is None or materializer._clock.monotonic_s() - looked_s >= background._POLL_S:
        materializer.look(manifest)


class _OneByOne(Executor):
    """In place of a pool of threads, whose order no seed decides."""

    def __init__(self, threads: int, thread_name_prefix: str = "") -> None:
        pass

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*arguments, **named))
        except Exception as error:  # a process that is killed does nothing more
            done.set_exception(error)
        return done


@contextmanager
def _on_faulty_stores(world: World) -> Iterator[None]:
    """`memory://` is the world's; no waits between retries, no threads, and names that a seed decides."""
    publish = ParquetSink.publish

    def publishing(self: ParquetSink, spec: Any, output: StagedOutput, spark: Any) -> None:
        world.published(output)
        publish(self, spec, output, spark)

    locked = host_objects._locked

    @contextmanager
    def undisturbed(path: Path) -> Iterator[None]:
        """Whoever sleeps with a lock of the host would be waited for, and here nobody else runs who could end the wait."""
        world.locks += 1
        try:
            with locked(path):
                yield
        finally:
            world.locks -= 1

    ids = CountingIds(1 << 20)
    with pytest.MonkeyPatch.context() as patch, without_spark(world.spark):
        patch.setattr("fsspec.filesystem", lambda scheme, **_: _Now(world))
        patch.setattr(store, "_SHARED", {})
        patch.setattr(fsspec_store, "_MEMORY_LOCK", nullcontext())
        patch.setattr(fsspec_store, "wait_random_exponential", lambda **_: wait_none())
        for module in (host_objects, commit, output_layout, sinks, staging):
            patch.setattr(module, "ThreadPoolExecutor", _OneByOne)
        patch.setattr(host_objects, "_locked", undisturbed)
        for module in (persist, task):
            patch.setattr(module, "uploader", lambda _: world.running[-1].uploader)
        patch.setattr(epoch_line, "Uploader", lambda policy, clock: Uploader(POLICY, clock, clock))
        patch.setattr(ParquetSink, "publish", publishing)
        patch.setattr(BackgroundMaterializer, "start_if_due", _look_if_due)
        for module in (persist, shard_access, task):
            patch.setattr(module, "SYSTEM_IDS", ids)
        yield


def play(seed: int, rng: random.Random, local: Path) -> World:
    """Run one seed to its end."""
    world = World(seed, rng, local)
    with _on_faulty_stores(world):
        world.play()
    return world
