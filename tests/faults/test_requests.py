"""What a checkpoint costs in requests to the primary store, counted at an S3 protocol server (moto's) (design invariant 6).

The driver loop, the tasks and the store's adapter are the real ones; only Spark is not.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from model import CountingIds, FakeClock, empty_manifest

from state_runtime import Progress
from state_runtime.base.ids import SystemIds
from state_runtime.base.limits import KIB
from state_runtime.base.settings import CheckpointSettings, MaterializationSettings, UploadSettings
from state_runtime.changelog.parts import sha256
from state_runtime.snapshot.document import FORMAT_VERSION
from state_runtime.snapshot.manifest import LayerEntry, Manifest, SegmentEntry, TableEntry
from state_runtime.snapshot.paths import segment_path
from tests.faults.engine import InProcess, Run, operator, without_spark
from tests.job_settings import job_settings
from tests.s3_server import CountingServer

EPOCHS = 3
# What a commit looks at before its create, at once: the run's term, the manifest before, and its own segment.
LOOKS = Counter({("GET", "terms"): 1, ("GET", "manifest"): 1, ("HEAD", "segment"): 1})
SMALL = Counter({("PUT", "segment"): 1, ("PUT", "manifest"): 1, ("LIST", "boundary"): 1}) + LOOKS
EVERYTHING_FITS = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[CountingServer]:
    with CountingServer() as running:
        yield running


def epochs(
    server: CountingServer,
    folder: Path,
    shards: int,
    operators: int,
    inline_bytes_max: int,
    count: int = EPOCHS,
    **changes: object,
) -> tuple[list[Counter[tuple[str, str]]], list[Progress]]:
    """Requests and numbers of each checkpoint but the first, in which every shard of every operator has changes."""
    settings = job_settings(
        parallelism=shards,
        local_dir=str(folder / "local"),
        materialization=MaterializationSettings(by="dagster"),
        checkpoint=CheckpointSettings(inline_bytes_max=inline_bytes_max),
        upload=UploadSettings(timeout_s=600),
        **changes,
    )
    marks: list[int] = []
    numbers: list[Progress] = []

    def note(progress: Progress) -> None:
        if progress.phases_ms.get("manifest") is not None:
            marks.append(len(server.requests))
            numbers.append(progress)

    spark = InProcess()
    store = f"s3://lake/{shards}-{operators}-{inline_bytes_max}-{len(changes)}"
    with without_spark(spark):
        run = Run(
            store,
            server.options,
            str(folder / "out"),
            settings,
            operators=operators,
            # It stands still: what comes by time (the heartbeat, looking for others' materializations) is not a checkpoint's.
            clock=FakeClock(),
            ids=CountingIds(),
            spark=spark,
            on_progress=note,
        )
        run.run([[f"key-{n}" for n in range(12 * shards)]] * count)
    counted = [server.counted(first, last) for first, last in itertools.pairwise(marks)]
    return counted, numbers[1:]


@pytest.mark.parametrize(
    ("shards", "operators"), [(2, 1), (2, 5), (200, 1), pytest.param(200, 5, marks=pytest.mark.long)]
)
def test_a_checkpoint_with_small_changes_is_two_puts(
    server: CountingServer, tmp_path: Path, shards: int, operators: int
) -> None:
    """Segment and manifest, and one look at the boundary: the same for 2 and 200 shards. Nothing is listed or looked at."""
    counted, numbers = epochs(server, tmp_path, shards, operators, EVERYTHING_FITS)
    assert counted == [SMALL] * (EPOCHS - 1)
    assert [(p.uploads, p.upload_attempts) for p in numbers] == [(0, 1)] * (EPOCHS - 1)
    assert [p.changed_rows for p in numbers] == [12 * shards * operators] * (EPOCHS - 1)


@pytest.mark.parametrize(
    ("shards", "operators"), [(2, 1), (2, 5), (200, 1), pytest.param(200, 5, marks=pytest.mark.long)]
)
def test_each_task_with_large_changes_adds_one_put_and_one_look(
    server: CountingServer, tmp_path: Path, shards: int, operators: int
) -> None:
    """One object a task, whatever is in it, which the commit looks at; the rest stays."""
    counted, numbers = epochs(server, tmp_path, shards, operators, 0)
    tasks = shards * operators
    assert counted == [SMALL + Counter({("PUT", "direct"): tasks, ("HEAD", "direct"): tasks})] * (EPOCHS - 1)
    assert [(p.uploads, p.upload_attempts) for p in numbers] == [(tasks, tasks + 1)] * (EPOCHS - 1)


def test_epochs_between_checkpoints_cost_no_request(server: CountingServer, tmp_path: Path) -> None:
    """Two epochs a checkpoint: the requests of one."""
    counted, numbers = epochs(server, tmp_path, 2, 2, EVERYTHING_FITS, checkpoint_batches=2, count=4)
    assert counted == [SMALL]
    assert [p.epochs for p in numbers] == [2]


def test_a_manifest_stays_small_however_long_the_log_is() -> None:
    """200 shards, 5 operators, 600 epochs since the last materialization, each with the longest names and numbers: 256 KiB."""
    ids = SystemIds()
    operators = 5
    digest = sha256(b"")
    segments = tuple(
        SegmentEntry(segment_path(99, f"{n:020d}-{ids.uid()}.seg"), 1 << 33, digest, 1 << 20, n, 1 << 33, 1 << 40)
        for n in range(10**9, 10**9 + 600)
    )
    cells = [(n << 62, ((n + 1) << 62) - 1) for n in range(4)]
    tables = tuple(
        TableEntry(
            f"tables/counts-{o}/aggregate/{ids.uid()}.parquet", 1 << 33, digest, 1 << 33, f"counts-{o}", "aggregate", *c
        )
        for o in range(operators)
        for c in cells
    )
    numbers = Progress(phases_ms=dict.fromkeys(("plan", "process", "segment", "manifest", "publish"), 1234.5678901))
    manifest = replace(
        empty_manifest("f" * 32, 200),
        format_version=FORMAT_VERSION,
        operators=tuple(operator(n).entry() for n in range(operators)),
        segments=segments,
        layers=(LayerEntry(0, 10**9, tables),),
        versions={f"counts-{n}": "".join(ids.short() for _ in range(200)) for n in range(operators)},
        progress=numbers,
        previous=numbers,
    )
    assert len(manifest.encode()) <= 256 * KIB
    assert Manifest.decode(manifest.encode(), "here") == manifest
