"""An S3 protocol server inside the test process that writes down every request, and answers some of them badly."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import boto3
from moto.s3.models import s3_backends
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

SECRET = "a-secret-that-must-not-travel"


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request, seen from the client.

    Attributes:
        how: a status with its S3 code ("503 SlowDown"), "reset", "hang", "cut" (half of the body and then a reset), or "unconditional" (the
            condition of a write is passed over).
        stored: whether the request had its effect before.
        message: in the answer's body.
    """

    how: str
    stored: bool = False
    message: str = "injected"

    def answer(
        self, inner: Any, environ: dict[str, Any], start_response: Any, released: threading.Event
    ) -> Iterable[bytes]:
        if self.how == "unconditional":
            environ.pop("HTTP_IF_NONE_MATCH", None)
            return list(inner(environ, start_response))
        taken: list[Any] = []
        body = b""
        if self.stored or self.how == "cut":
            body = b"".join(inner(environ, lambda *answer: taken.append(answer)))
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if self.how == "cut":
            start_response(*taken[0][:2])
            return _then_reset(body[: len(body) // 2], environ)
        if self.how == "hang":
            released.wait(60)
        if self.how in ("hang", "reset"):
            return _then_reset(b"", environ)
        status, _, code = self.how.partition(" ")
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{self.message}</Message></Error>".encode()
        start_response(f"{status} {code}", [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
        return [text]


def _then_reset(body: bytes, environ: dict[str, Any]) -> Iterator[bytes]:
    if body:
        yield body
    connection: socket.socket = environ["werkzeug.socket"]
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError("injected")


class _OneContinue(WSGIRequestHandler):
    """http.server and werkzeug would each send a "100 Continue", and at the second one aiohttp forgets its read timeout."""

    def handle_expect_100(self) -> bool:
        return True


@dataclass
class CountingServer:
    """Serves while it is entered; it begins empty. One of a bucket's name at a time in a process.

    `requests` holds (method, path below the bucket) in order. `interrupt` is called before and after the effect of each, with the
    client still waiting for its answer; `fault` says what goes wrong with a request. Without `conditions_known` a conditional write
    is answered with 501.
    """

    bucket: str = "lake"
    requests: list[tuple[str, str]] = field(default_factory=list)
    interrupt: Callable[[str, str, str], None] = lambda when, method, path: None
    fault: Callable[[str, str], Fault | None] = lambda method, path: None
    conditions_known: bool = True
    released: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> CountingServer:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        inner = DomainDispatcherApplication(create_backend_app)
        self.released.clear()

        def noting(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            path = environ.get("PATH_INFO", "").lstrip("/").removeprefix(self.bucket).lstrip("/")
            query = parse_qs(environ.get("QUERY_STRING", ""))
            if "list-type" in query:
                self.requests.append(("LIST", query.get("prefix", [""])[0].rstrip("/")))
            else:
                self.requests.append((environ["REQUEST_METHOD"], path))
            noted = self.requests[-1]
            self.interrupt("before", *noted)
            fault = self.fault(*noted)
            if not self.conditions_known and "HTTP_IF_NONE_MATCH" in environ:
                fault = Fault("501 NotImplemented")
            if fault is not None:
                return fault.answer(inner, environ, start_response, self.released)
            body = list(inner(environ, start_response))
            self.interrupt("after", *noted)
            return body

        self._server = make_server("127.0.0.1", 0, noting, threaded=True, request_handler=_OneContinue)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.endpoint = endpoint = f"http://127.0.0.1:{self._server.server_port}"
        credentials = {"aws_access_key_id": "key", "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
        # moto's buckets are the process's: that of a test before, and what it set on it, would still be there. Buckets of other names
        # are of servers that run beside this one.
        for regions in s3_backends.values():
            for backend in regions.values():
                if backend.buckets.pop(self.bucket, None) is not None:
                    s3_backends.bucket_accounts.pop(self.bucket)
        boto3.client("s3", endpoint_url=endpoint, **credentials).create_bucket(Bucket=self.bucket)
        self.requests.clear()
        self.options = {
            "key": "key",
            "secret": SECRET,
            "endpoint_url": endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
        }
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
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
