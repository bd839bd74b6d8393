"""SIGKILL while a segment, a task's own object or a manifest is being written, and at requests that chance decides.

The driver is a process of its own on an S3 protocol server (moto's), which kills it while it waits for the answer to a request: before
the server has stored anything, or after.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import boto3
import pytest

from tests.conftest import ROOT
from tests.faults.playground import NAMES, World
from tests.faults.virtual import CALM
from tests.s3_server import SECRET, CountingServer, kind_of

pytestmark = pytest.mark.kill
TIMEOUT_S = 240
POINTS = [(when, kind) for kind in ("direct", "segment", "manifest") for when in ("before", "after")]


class Killer:
    """Kills the process at the n-th request that fits."""

    def __init__(self, when: str, kind: str, count: int) -> None:
        self.when, self.kind, self.left = when, kind, count
        self.process: subprocess.Popen[str] | None = None

    def __call__(self, when: str, method: str, path: str) -> None:
        writes = method == "PUT" and (not self.kind or kind_of(path) == self.kind)
        if when != self.when or not writes or self.process is None:
            return
        self.left -= 1
        if self.left == 0:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(TIMEOUT_S)


def run(server: CountingServer, world: World, killer: Killer | None) -> int:
    """One process to its end; its exit code."""
    given = {
        "options": server.options,
        "settings": dict(world.script.settings)
        | {"parallelism": 2, "local_dir": str(world.local), "materialize": False},
        "operators": world.script.operators,
        "batches": world.script.batches,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.drive", json.dumps(given)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    if killer is not None:
        killer.process = process
        server.interrupt = killer
    try:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        server.interrupt = lambda when, method, path: None
    assert process.returncode in (0, -signal.SIGKILL), errors[-2000:]
    return process.returncode


def objects_of(server: CountingServer) -> dict[str, bytes]:
    client = boto3.client(
        "s3", endpoint_url=server.options["endpoint_url"], aws_access_key_id="key", aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )  # fmt: skip
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=server.bucket)
    names = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
    return {f"/lake/{n}": client.get_object(Bucket=server.bucket, Key=n)["Body"].read() for n in names}


def test_a_driver_killed_in_the_middle_of_a_write_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """At each kind of write, before and after its effect, then four times by chance; the last process ends the job."""
    rng = random.Random(0)
    world = World(0, random.Random(0), tmp_path / "local")
    batches = tuple(tuple(rng.choice(NAMES) for _ in range(20)) for _ in range(24))
    settings = {"inline_bytes_max": 900, "checkpoint_batches": 1, "compression": "lz4"}
    world.script = replace(world.script, batches=batches, plan=CALM, settings=settings, operators=2)
    with CountingServer() as server:
        # Two of three tasks are above the threshold; the fencing snapshot is a manifest too, so the second one is an epoch's.
        world.script = replace(world.script, settings={**settings, "inline_bytes_max": 0})
        for when, kind in POINTS:
            assert run(server, world, Killer(when, kind, 2)) == -signal.SIGKILL, f"{when} {kind}"
        world.script = replace(world.script, settings=settings)
        for _ in range(4):
            assert (
                run(server, world, Killer(rng.choice(["before", "after"]), "", rng.randint(4, 14))) == -signal.SIGKILL
            )
        assert run(server, world, None) == 0
        world.objects = objects_of(server)
    world.check()
