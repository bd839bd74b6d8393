"""An S3 protocol server inside the test process that writes down every request."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

SECRET = "a-secret-that-must-not-travel"


@dataclass
class CountingServer:
    """Serves while it is entered; `requests` holds (method, path below the bucket) in order. `interrupt` is called
    before and after the effect of each, with the client still waiting for its answer."""

    bucket: str = "lake"
    requests: list[tuple[str, str]] = field(default_factory=list)
    interrupt: Callable[[str, str, str], None] = lambda when, method, path: None

    def __enter__(self) -> CountingServer:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        inner = DomainDispatcherApplication(create_backend_app)

        def noting(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            path = environ.get("PATH_INFO", "").lstrip("/").removeprefix(self.bucket).lstrip("/")
            query = parse_qs(environ.get("QUERY_STRING", ""))
            if "list-type" in query:
                self.requests.append(("LIST", query.get("prefix", [""])[0].rstrip("/")))
            else:
                self.requests.append((environ["REQUEST_METHOD"], path))
            noted = self.requests[-1]
            self.interrupt("before", *noted)
            body = list(inner(environ, start_response))
            self.interrupt("after", *noted)
            return body

        self._server = make_server("127.0.0.1", 0, noting, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        endpoint = f"http://127.0.0.1:{self._server.server_port}"
        credentials = {"aws_access_key_id": "key", "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=endpoint, **credentials).create_bucket(Bucket=self.bucket)
        self.options = {
            "key": "key",
            "secret": SECRET,
            "endpoint_url": endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
        }
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def counted(self, first: int, last: int | None = None) -> Counter[tuple[str, str]]:
        """Requests by method and kind of object; of other objects, by their folder below the job root."""
        return Counter((method, kind_of(path)) for method, path in self.requests[first:last])


def kind_of(path: str) -> str:
    parts = path.split("/")[2:]
    if not parts:
        return "job root"
    name = parts[-1]
    if parts[0] == "changelog":
        return "direct" if name.startswith("direct-") else "segment"
    return "manifest" if name == "manifest.json" else parts[0]
