"""A small job that is killed with SIGKILL at random moments and started again: `make soak-kill`.

    python -m tests.soak.kill --cycles 1000 --seed 7
    python -m tests.soak.kill --life 7-12            # one life again: the same draws, other moments

A *cycle* is a process that opens the job, goes on from its newest snapshot and is killed while it works. Each has its own settings:
parallelism, changelog, backend, checkpoint interval, sizes; now and then the local disk is damaged or gone in between. The driver loop,
the tasks, the store, local copies, folding, retention and the commit protocol are the real ones, on a real disk; Spark's planning and
shuffle are stood in for (tests/faults/engine.py), because a JVM for each of a thousand cycles would take hours.

A *life* is a job with a store of its own: some cycles, then one that is left alone, and then the laws: the state of every operator and
the rows of the output are those of the input counted afresh, and every snapshot that is left verifies in full. In every second life
epochs end wherever a seed says, with rows in flight; its cycles change between aligned and unaligned checkpoints.

Processes are forked off one that has imported everything and used none of it, so that a cycle takes as long as its work.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "state_runtime"), str(ROOT / "tests" / "state_runtime" / "driver")]

import pyarrow.parquet as pq  # noqa: E402
from inflight_world import deadlines  # noqa: E402
from rich.progress import Progress as Bar  # noqa: E402

from state_runtime.base.clock import SYSTEM_CLOCK  # noqa: E402
from state_runtime.base.ids import SYSTEM_IDS  # noqa: E402
from state_runtime.base.settings import JobSettings  # noqa: E402
from state_runtime.driver.epoch_budget import BudgetPlanner  # noqa: E402
from state_runtime.maintenance.verify.roots import verify_root  # noqa: E402
from state_runtime.reading.snapshot import open_snapshot_for_reading  # noqa: E402
from state_runtime.snapshot.catalog import Catalog  # noqa: E402
from state_runtime.store import open_store  # noqa: E402
from state_runtime.task import slicing  # noqa: E402
from tests.faults.engine import JOB, InProcess, Run, operator, without_spark  # noqa: E402
from tests.job_settings import job_settings  # noqa: E402
from tests.soak.forks import ended, forked, given_up, hear_children, killed  # noqa: E402

KEYS = [f"key-{n}" for n in range(40)]
CYCLES_OF_A_LIFE = 25
KILL_S_MAX = 1.5
"""The moment is drawn below this: a start, a few batches and now and then the end, on two cores."""
CYCLE_S_MAX = 120.0
"""A cycle that is left alone and takes longer than this hangs."""
REPORT = ROOT / "tests" / "soak" / "reports" / "kill.json"


@dataclass
class Life:
    """One job: its folder, its input, and what was done to it.

    Attributes:
        name: seed and number; what is drawn follows from it.
        operators: how long the chain is.
        leaves_rows: whether its epochs may end before their batch.
    """

    name: str
    folder: Path
    rng: random.Random
    operators: int
    leaves_rows: bool
    batches: list[list[str]] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def store(self) -> str:
        return str(self.folder / "store")

    @property
    def out(self) -> str:
        return str(self.folder / "out")

    @property
    def local(self) -> Path:
        return self.folder / "local"

    def more_input(self) -> None:
        """A few batches of a few rows; now and then a large one."""
        for _ in range(self.rng.randint(1, 6)):
            rows = self.rng.choice([1, 5, 30, 400])
            self.batches.append([self.rng.choice(KEYS) for _ in range(rows)])

    def settings(self) -> JobSettings:
        """Of one cycle."""
        rng = self.rng
        chosen: dict[str, Any] = {
            "parallelism": rng.choice([1, 2, 3, 5]),
            "changelog": rng.choice(["on", "on", "off"]),
            "backend": rng.choice(["arrow", "rocksdb"]),
            "checkpoint_batches": rng.choice([1, 1, 2, 4]),
            "inline_bytes_max": rng.choice([0, 900, 1 << 18]),
            "pending_bytes_max": rng.choice([0, 2000, 1 << 24]),
            "compression": rng.choice(["lz4", "zstd", "none"]),
            "local_recovery": rng.random() < 0.8,
            "materialize_max_segments": rng.choice([2, 8, 256]),
            "runs_max": rng.choice([2, 8]),
            "retained_checkpoints": rng.choice([2, 5, 100]),
            "checkpoint_mode": rng.choice(["unaligned", "unaligned", "aligned"]) if self.leaves_rows else "aligned",
        }
        for name in ("parallelism", "changelog", "backend", "checkpoint_batches", "checkpoint_mode"):
            self.seen[f"{name} {chosen[name]}"] += 1
        return job_settings(local_dir=str(self.local), **chosen)

    def damage(self) -> None:
        """What may happen to a host's disk between two processes."""
        files = sorted(f for f in self.local.rglob("*") if f.is_file()) if self.local.exists() else []
        if not files or self.rng.random() < 0.7:
            return
        kind = self.rng.choice(["flip", "cut", "remove", "all"])
        self.seen[f"local disk: {kind}"] += 1
        if kind == "all":
            shutil.rmtree(self.local)
            return
        victim = self.rng.choice(files)
        if kind == "remove":
            victim.unlink()
            return
        body = bytearray(victim.read_bytes())
        if body and kind == "flip":
            body[self.rng.randrange(len(body))] ^= 1 << self.rng.randrange(8)
        victim.chmod(0o600)
        victim.write_bytes(bytes(body if kind == "flip" else body[: len(body) // 2]))


# --- what forked processes do --------------------------------------------------------------------------------------


def drive(life: Life, settings: JobSettings) -> None:
    """One run to the end of the input."""
    spark = InProcess()
    if life.leaves_rows:
        BudgetPlanner.plan = deadlines(random.Random(life.rng.random()))  # type: ignore[method-assign]
        slicing._FIRST_ROWS, slicing._ROWS_MIN, slicing._GROWTH, slicing._LEAST_S = 5, 1, 1, 0.0
    with without_spark(spark):
        run = Run(
            life.store,
            {},
            life.out,
            settings,
            operators=life.operators,
            clock=SYSTEM_CLOCK,
            ids=SYSTEM_IDS,
            spark=spark,
        )
        run.run(life.batches)


def check(life: Life) -> None:
    """The laws, at the end of a life.

    Raises:
        AssertionError: one does not hold.
    """
    states = [state_of(life, number) for number in range(life.operators)]
    output = output_of(life)
    if life.leaves_rows:
        # What an operator further down gets depends on where epochs ended; of the first that is not so.
        assert states[0] == expected_states(life)[0]
        assert states[-1].keys() == states[0].keys()
        newest: dict[str, int] = {}
        for key, count in output:
            newest[key] = max(count, newest.get(key, 0))
        assert newest == states[-1], f"readers see {newest}, and the state is {states[-1]}"
        assert not (twice := {row: n for row, n in output.items() if n > 1}), f"the output has twice: {twice}"
    else:
        assert states == (expected := expected_states(life)), f"the states are {states}, and should be {expected}"
        assert output == (wanted := expected_output(life)), (
            f"output lost {dict(wanted - output)}, and repeated {dict(output - wanted)}"
        )
    root = Catalog(open_store(life.store), JOB).root
    report = verify_root(root, level="full", clock=SYSTEM_CLOCK, ids=SYSTEM_IDS)
    assert report.complete
    assert not report.findings, report.findings


def state_of(life: Life, number: int) -> dict[str, int]:
    """What the n-th operator counted, in the newest snapshot."""
    (state,) = open_snapshot_for_reading(f"{life.store}/{JOB}").states(operator(number).uid)
    rows = [row for batch in state.batches() for row in batch.to_pylist()]
    return {row["k"]: next(v for name, v in row.items() if name != "k") for row in rows}


def expected_states(life: Life) -> list[dict[str, int]]:
    """The first operator counts rows; each further one the batches in which the one before it emitted the key."""
    rows = Counter(key for batch in life.batches for key in batch)
    batches = Counter(key for batch in life.batches for key in set(batch))
    return [dict(rows), *(dict(batches) for _ in range(life.operators - 1))]


def expected_output(life: Life) -> Counter[tuple[str, int]]:
    """Each key's count after each batch that had it, once."""
    totals: Counter[str] = Counter()
    expected: Counter[tuple[str, int]] = Counter()
    for batch in life.batches:
        totals.update(batch if life.operators == 1 else set(batch))
        expected.update((key, totals[key]) for key in set(batch))
    return expected


def output_of(life: Life) -> Counter[tuple[str, int]]:
    found: Counter[tuple[str, int]] = Counter()
    for file in Path(life.out).glob("*.parquet"):
        found.update((row["k"], row["n"]) for row in pq.read_table(file).to_pylist())
    return found


# --- lives ---------------------------------------------------------------------------------------------------------


def live(name: str, folder: Path, cycles: int) -> Life:
    """One life, to its end.

    Raises:
        AssertionError: a law does not hold, or a process that was left alone failed or hung; the folder stays.
    """
    rng = random.Random(name)
    life = Life(name, folder, rng, operators=rng.choice([1, 1, 2]), leaves_rows=rng.random() < 0.5)
    for _ in range(cycles):
        life.more_input()
        settings = life.settings()
        pid = forked(lambda settings=settings: drive(life, settings))  # type: ignore[misc]
        code = ended(pid, rng.uniform(0.0, KILL_S_MAX))
        if code is None:
            killed(pid)
            life.seen["killed"] += 1
        else:
            assert code == 0, f"a driver ended with {code}; its error is above"
            life.seen["came to its end first"] += 1
        life.damage()
    pid = forked(lambda: drive(life, life.settings()))
    code = ended(pid, CYCLE_S_MAX)
    if code is None:
        given_up(pid)
    assert code == 0, f"the last driver, which was left alone, {'hung' if code is None else f'ended with {code}'}"
    catalog = Catalog(open_store(life.store), JOB)
    snapshots = [catalog.manifest(snapshot_id) for snapshot_id in catalog.snapshot_ids()]
    life.seen["snapshots"] += snapshots[-1].snapshot_id if snapshots else 0
    life.seen["snapshots left that have rows in flight"] += sum(s.open_batch is not None for s in snapshots)
    pid = forked(lambda: check(life))
    code = ended(pid, CYCLE_S_MAX)
    if code is None:
        given_up(pid)
    assert code == 0, "a law does not hold; it is told above"
    return life


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=1000, help="processes that are started to be killed (1000)")
    parser.add_argument("--seed", type=int, default=None, help="what is drawn; a new one each time by default")
    parser.add_argument("--life", default="", help="play one life again, by the name in the report or in the error")
    parser.add_argument("--report", type=Path, default=REPORT, help="JSON with the counts")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    names = [given.life] if given.life else [f"{seed}-{n}" for n in range(-(-given.cycles // CYCLES_OF_A_LIFE))]
    seen: Counter[str] = Counter()
    hear_children()
    begun_s = time.monotonic()
    with Bar() as bar:
        task = bar.add_task("lives", total=len(names))
        for name in names:
            folder = Path(tempfile.mkdtemp(prefix=f"soak-kill-{name}-"))
            try:
                life = live(name, folder, CYCLES_OF_A_LIFE)
            except AssertionError as error:
                print(f"life {name}: {error}\nIts files stay in {folder}; again: --life {name}", file=sys.stderr)
                return 1
            seen += life.seen + Counter({"batches": len(life.batches), "cycles": CYCLES_OF_A_LIFE})
            shutil.rmtree(folder)
            bar.advance(task)
            if not bar.console.is_terminal:
                print(f"life {name}: {CYCLES_OF_A_LIFE} cycles, all laws held", file=sys.stderr, flush=True)
    report = Report(seed, len(names), round(time.monotonic() - begun_s, 1), dict(sorted(seen.items())))
    if not given.life:
        given.report.parent.mkdir(parents=True, exist_ok=True)
        given.report.write_text(json.dumps(asdict(report), indent=2) + "\n")
    print(json.dumps(asdict(report), indent=2))
    return 0


@dataclass(frozen=True)
class Report:
    """What was played; every life held all laws."""

    seed: int
    lives: int
    seconds: float
    counts: dict[str, int]


if __name__ == "__main__":
    sys.exit(main())
