"""One call to a receiver: an HTTP request, or a command; each ends in time, even if the receiver does not answer."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from state_runtime.base.errors import StillstateError
from stillstate.orchestration.config.notify import NotifySpec

__all__ = ["NotTold", "tell"]

_SAID_BYTES_MAX: Final = 2000
"""Of the output of a command that fails."""


class NotTold(StillstateError):
    """A receiver did not take a message; the next tick sends it again."""

    kind = "not-told"


def tell(spec: NotifySpec, document: Mapping[str, Any], folder: Path) -> None:
    """Make one call.

    The message may have arrived although this raises: a receiver that answers too late gets it once more.

    Args:
        folder: where a command begins.

    Raises:
        NotTold: refused, failed, or not within `timeout_s`; the message has no secret.
    """
    body = json.dumps(document).encode()
    if spec.command:
        _run(spec, body, folder)
    else:
        _post(spec, body)


def _post(spec: NotifySpec, body: bytes) -> None:
    parts = urlsplit(spec.webhook)
    host = parts.hostname or ""
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    more: dict[str, Any] = {"context": ssl.create_default_context()} if parts.scheme == "https" else {}
    connection = kind(host, parts.port, timeout=spec.timeout_s, **more)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = {"Content-Type": "application/json", "User-Agent": "stillstate", **spec.headers}
    found: list[int | Exception] = []

    def request() -> None:
        try:
            connection.request("POST", path, body=body, headers=headers)
            found.append(connection.getresponse().status)
        except (OSError, http.client.HTTPException, ValueError) as error:
            found.append(error)

    # A socket's time-out holds for each step only: a receiver that sends a byte now and then would never time out.
    thread = threading.Thread(target=request, name="notify", daemon=True)
    thread.start()
    thread.join(spec.timeout_s)
    _shut(connection)
    where = f"{parts.scheme}://{parts.netloc}"
    if not found:
        raise NotTold(f"the webhook at {where} has not answered within {spec.timeout_s:g} s; it is tried again")
    outcome = found[0]
    if isinstance(outcome, Exception):
        said = spec.secrets.redact(str(outcome))
        raise NotTold(f"the webhook at {where} cannot be reached: {type(outcome).__name__}: {said}; it is tried again")
    if not 200 <= outcome < 300:
        raise NotTold(f"the webhook at {where} answered {outcome}; it is tried again")


def _shut(connection: http.client.HTTPConnection) -> None:
    """Wake a thread that still waits; its socket is no longer used."""
    held = connection.sock
    if held is not None:
        try:
            held.shutdown(socket.SHUT_RDWR)
        except OSError:
            connection.close()  # it was over already
            return
    connection.close()


def _run(spec: NotifySpec, body: bytes, folder: Path) -> None:
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                spec.command,
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                cwd=folder,
                start_new_session=True,  # its children end with it
            )
        except OSError as error:
            raise NotTold(f"the command of notify cannot be started: {error.strerror or error}") from error
        try:
            process.communicate(body, timeout=spec.timeout_s)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise NotTold(f"the command of notify took longer than {spec.timeout_s:g} s, and was ended") from error
        if process.returncode:
            size = said.seek(0, os.SEEK_END)
            said.seek(max(0, size - _SAID_BYTES_MAX))
            text = spec.secrets.redact(said.read().decode(errors="replace").strip())
            raise NotTold(f"the command of notify ended with {process.returncode}: {text}")
