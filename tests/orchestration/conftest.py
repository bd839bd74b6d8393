"""Configurations and job roots for the tests of the orchestration; no Spark, no Dagster daemon."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster_world import World
from job_roots import FakeClock, JobRoot
from postgres_storage import STORAGE_ENV, DagsterStorage


@pytest.fixture(autouse=True)
def only_stable_dagster() -> Iterator[None]:
    """Whatever Dagster does not promise to keep is an error."""
    with warnings.catch_warnings():
        for category in (dg.BetaWarning, dg.PreviewWarning, dg.SupersessionWarning, DeprecationWarning):
            warnings.simplefilter("error", category)
        yield


@pytest.fixture(autouse=True)
def no_config_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STILLSTATE_CONFIG", raising=False)


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """Write a `stillstate.yaml` with one or more jobs; `extra` is YAML below `defaults`, `house` beside it."""

    def write(*jobs: str, extra: str = "", house: str = "", text: str | None = None) -> Path:
        file = tmp_path / "stillstate.yaml"
        if text is None:
            lines = [
                "version: 1",
                *house.splitlines(),
                "defaults:",
                "  entry_point: nowhere.job:build",
                "  store: state",
            ]
            lines += [f"  {line}" for line in extra.splitlines()]
            lines += ["jobs:", *(f"  {name}: {{}}" for name in jobs or ("flights",))]
            text = "\n".join(lines) + "\n"
        file.write_text(text)
        return file

    return write


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def flights(tmp_path: Path, clock: FakeClock) -> JobRoot:
    """The root of the job `flights`, where `write_config` puts the store."""
    return JobRoot(tmp_path / "state", "flights", clock)


@pytest.fixture(scope="session")
def postgres() -> Iterator[DagsterStorage | None]:
    """A real server where `make test-postgres` asks for it."""
    if os.environ.get(STORAGE_ENV) != "postgres":
        yield None
        return
    server = DagsterStorage()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def instance(postgres: DagsterStorage | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dg.DagsterInstance]:
    if postgres is None:
        with dg.DagsterInstance.ephemeral() as made:
            yield made
    else:
        with postgres.instance(tmp_path_factory.mktemp("dagster") / "home") as made:
            yield made


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`make test-postgres` plays what has an instance."""
    if os.environ.get(STORAGE_ENV) == "postgres":
        chosen = [item for item in items if "instance" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


@pytest.fixture
def world(write_config: Callable[..., Path], clock: FakeClock, instance: dg.DagsterInstance) -> Callable[..., World]:
    def build(*jobs: str, extra: str = "", house: str = "") -> World:
        return World(write_config(*jobs, extra=extra, house=house), clock, instance)

    return build
