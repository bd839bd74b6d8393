"""Configurations and job roots for the tests of the orchestration; no Spark, no Dagster daemon."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster_world import World
from job_roots import FakeClock, JobRoot


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
    """Write a `stillstate.yaml` with one or more jobs; `extra` is YAML below `defaults`."""

    def write(*jobs: str, extra: str = "", text: str | None = None) -> Path:
        file = tmp_path / "stillstate.yaml"
        if text is None:
            lines = ["version: 1", "defaults:", "  entry_point: nowhere.job:build", "  store: state"]
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


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def world(write_config: Callable[..., Path], clock: FakeClock, instance: dg.DagsterInstance) -> Callable[..., World]:
    def build(*jobs: str, extra: str = "") -> World:
        return World(write_config(*jobs, extra=extra), clock, instance)

    return build
