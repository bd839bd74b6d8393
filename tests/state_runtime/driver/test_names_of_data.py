"""What tasks write says in its name which snapshot it is for: collection asks no clock whether it is under way."""

from __future__ import annotations

from pathlib import Path

import pytest
from inflight_chains import STEPS
from inflight_laws import under
from inflight_root import BATCHES
from inflight_world import World, finish
from model import seeds

from state_runtime.base.settings import CheckpointSettings, JobSettings, MaterializationSettings, RetentionSettings
from state_runtime.maintenance.layout import kind_of
from state_runtime.snapshot.paths import named_snapshot_of
from state_runtime.store import open_store
from state_runtime.task import persist_files


@pytest.mark.parametrize("changelog", ["on", "off"])
def test_what_a_run_writes_is_named_for_the_snapshot_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changelog: str
) -> None:
    [(_, draw)] = seeds(1)
    monkeypatch.setattr(persist_files, "SMALL_FILE_BYTES_MAX", 0)
    world = World(tmp_path, draw, [list(batch) for batch in BATCHES], STEPS)
    under(world, monkeypatch)
    settings = JobSettings(
        parallelism=2,
        local_dir=str(tmp_path / "local"),
        checkpoint=CheckpointSettings(inline_bytes_max=0, mode="unaligned"),
        changelog=changelog,
        retention=RetentionSettings(retained_checkpoints=0),
        materialization=MaterializationSettings(by="dagster"),
    )
    newest = finish(world, settings)
    root = open_store(str(tmp_path / "store")).child("job")
    kinds = ("direct", "segment") if changelog == "on" else ("shard-file", "listing")
    found = {o.path: kind_of(o.path) for o in root.list_objects("") if kind_of(o.path) in kinds}
    assert set(found.values()) == set(kinds)
    assert {path for path in found if not 0 < (named_snapshot_of(path) or 0) <= newest.snapshot_id} == set()
    assert "rows-" in "".join(found) or changelog == "off"
