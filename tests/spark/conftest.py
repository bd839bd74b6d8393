"""Fixtures for tests of whole jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..refusal import nothing_known
from ..s3_server import CountingServer
from .homes import Home


@pytest.fixture
def untried() -> Iterator[None]:
    """What pyspark and Spark keep to themselves is tried anew, and what is refused in a test only is."""
    with nothing_known():
        yield


@pytest.fixture(params=["local", "s3"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    """A local folder, or a bucket of an S3 protocol server (moto's)."""
    if request.param == "local":
        yield Home(str(tmp_path / "home"))
        return
    with CountingServer() as server:
        yield Home(f"s3://{server.bucket}", server.options)
