"""An S3 protocol server on loopback that counts the requests it gets, by method."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["CountingServer", "counting_s3"]


@dataclass(frozen=True)
class CountingServer:
    """A running server with one empty bucket.

    Attributes:
        counts: requests so far by method; a LIST is a GET of the bucket, and counted as its own kind.
    """

    bucket: str
    storage_options: dict[str, Any]
    counts: Callable[[], dict[str, int]]


@contextmanager
def counting_s3() -> Iterator[CountingServer]:
    """Start a server (moto's) on a free port; it holds everything in memory and ends with the block."""
    # Tools of the development install: whoever reads results needs none of them.
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, type: str, message: str, *args: Any) -> None:
            """A line for every request would bury the table."""

    # All servers of a process have the same buckets: moto keeps them in module variables.
    bucket = f"benchmark-{uuid.uuid4().hex[:12]}"
    lock, seen = threading.Lock(), Counter[str]()
    application = DomainDispatcherApplication(create_backend_app)

    def counted(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with lock:
            seen[_kind(environ)] += 1
        return application(environ, start_response)

    def counts() -> dict[str, int]:
        with lock:
            return dict(seen)

    server = make_server("127.0.0.1", 0, counted, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, name="s3", daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        region = "us-east-1"
        client = boto3.client(
            "s3", endpoint_url=endpoint, aws_access_key_id="key", aws_secret_access_key="secret", region_name=region
        )
        client.create_bucket(Bucket=bucket)
        options = {
            "key": "key",
            "secret": "secret",
            "endpoint_url": endpoint,
            "client_kwargs": {"region_name": region},
        }
        yield CountingServer(bucket, options, counts)
    finally:
        server.shutdown()
        thread.join()


def _kind(environ: dict[str, Any]) -> str:
    """The method, and LIST for a listing."""
    path = str(environ.get("PATH_INFO", "")).strip("/")
    return "LIST" if environ["REQUEST_METHOD"] == "GET" and "/" not in path else str(environ["REQUEST_METHOD"])
