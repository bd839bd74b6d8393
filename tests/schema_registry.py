"""A schema registry on loopback, with the answers that the API's documentation describes."""

from __future__ import annotations

import base64
import io
import json
import ssl
import struct
import threading
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fastavro

__all__ = ["SchemaRegistry", "framed"]

NOT_FOUND = {"schemas": (40403, "Schema not found"), "subjects": (40401, "Subject not found")}


def framed(schema_id: int, schema: Mapping[str, Any], value: Any) -> bytes:
    """A record as a registry's serializer writes it."""
    out = io.BytesIO(b"\0" + struct.pack(">I", schema_id))
    out.seek(5)
    fastavro.schemaless_writer(out, dict(schema), value)
    return out.getvalue()


class SchemaRegistry:
    """The server; its schemas and what it refuses may be changed while it runs.

    Args:
        certificate: a file with key and certificate; it speaks TLS then.

    Attributes:
        answers: what `GET` returns, by path: status and JSON.
        failures: statuses that come first, whatever is asked.
        login: user and password that it asks for; None asks for none.
        headers: of each request, the newest last.
        asked: requests by path.
    """

    def __init__(self, certificate: Path | None = None) -> None:
        self._certificate = certificate
        self.answers: dict[str, tuple[int, Any]] = {}
        self.failures: list[int] = []
        self.login: tuple[str, str] | None = None
        self.headers: list[dict[str, str]] = []
        self.asked: Counter[str] = Counter()

    def add(self, schema_id: int, schema: Any, subject: str = "", **more: Any) -> None:
        """Register a schema, and make it the newest of a subject."""
        answer = {"schema": schema if isinstance(schema, str) else json.dumps(schema), **more}
        self.answers[f"/schemas/ids/{schema_id}"] = (200, answer)
        if subject:
            self.answers[f"/subjects/{subject}/versions/latest"] = (
                200,
                {"subject": subject, "version": 1, "id": schema_id, **answer},
            )

    def answer(self, path: str, authorization: str) -> tuple[int, Any]:
        if self.failures:
            return self.failures.pop(0), {"error_code": 50001, "message": "Error in the backend data store"}
        if self.login is not None:
            wanted = "Basic " + base64.b64encode(":".join(self.login).encode()).decode()
            if authorization != wanted:
                return 401, {"error_code": 401, "message": "Unauthorized"}
        if path in self.answers:
            return self.answers[path]
        code, message = NOT_FOUND.get(path.split("/")[1], (404, "HTTP 404 Not Found"))
        return 404, {"error_code": code, "message": message}

    def __enter__(self) -> SchemaRegistry:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked[self.path] += 1
                outer.headers.append(dict(self.headers.items()))
                status, said = outer.answer(self.path, self.headers.get("Authorization", ""))
                body = json.dumps(said).encode()
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", said["to"])
                self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if self._certificate is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(self._certificate)
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        scheme = "http" if self._certificate is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
