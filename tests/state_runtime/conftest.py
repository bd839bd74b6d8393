"""Fixtures of the runtime's tests; none of them starts Spark."""

from __future__ import annotations

import logging
import socket
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from model import BUCKET, CountingIds, FakeClock, s3_options


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def ids() -> CountingIds:
    return CountingIds()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The S3 protocol on a port of this machine."""
    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    s3fs.S3FileSystem(skip_instance_cache=True, **s3_options(endpoint)).mkdir(BUCKET)
    yield endpoint
    server.stop()


@pytest.fixture
def s3_location(s3_server: str) -> tuple[str, dict[str, Any]]:
    """URL and options of a fresh prefix."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}", s3_options(s3_server)


@pytest.fixture
def closed_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
