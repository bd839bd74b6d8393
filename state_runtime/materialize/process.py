"""Folding in a process beside the driver, so that an epoch never waits for the interpreter or the memory that a fold
uses.

The driver's interpreter runs one thread at a time: a fold in a thread of the driver holds it while a checkpoint is
being written, and a fold of low priority holds it for long. So the driver starts `python -m
state_runtime.materialize.process` with its first fold, and talks to it by lines of JSON:

    → {"store": …, "options": {…}, "settings": {…}, "owner": …} once; by the pipe, because options may hold secrets
    → {"snapshot_id": 7}                                 one at a time
    ← {"record_id": 12}   or   {"error": "StoreUnavailable", "message": …}

The process ends when the pipe closes, even in the middle of a fold: a separate thread reads the pipe. It then leaves
the same as any killed fold: files that no manifest names.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from state_runtime.base import errors
from state_runtime.base.allocator import KEEPS_FREED_MEMORY
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import StillstateError, Unavailable
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.base.limits import MIB
from state_runtime.base.settings import JobSettings
from state_runtime.materialize.priority import give_way
from state_runtime.materialize.records import Record, read_record
from state_runtime.materialize.run import materialize
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.ownership import Ownership
from state_runtime.snapshot.term_files import Term
from state_runtime.store import Store, open_store

__all__ = ["FoldProcess", "main"]

_LOG = logging.getLogger(__name__)

_ANSWER_BYTES_MAX = MIB
_ENDS_IN_S = 2.0


class FoldProcess:
    """Folds snapshots of one job root in a child process, one at a time; from one thread at a time.

    Life cycle: nothing → (`fold`: the child is started if it does not run) → `close`, which also ends a fold under way.

    Args:
        root: the same place as `url`, for reading the child's records.
        ownership: of the run; the child proves it before it writes an object under a number.
        url, options: of the job root; the child opens it. `options` may hold secrets and are in no repr.
    """

    def __init__(
        self,
        root: Store,
        url: str,
        options: Mapping[str, Any],
        settings: JobSettings,
        ownership: Ownership | None = None,
    ) -> None:
        self._root = root
        self._first = {"store": url, "options": dict(options), "settings": settings.model_dump(mode="json")}
        if ownership is not None:
            run = dataclasses.asdict(ownership.run)
            self._first["owner"] = {"job_uid": ownership.job_uid, "run": run}
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False

    def fold(self, manifest: Manifest) -> Record:
        """Fold a snapshot's log; see `materialize`.

        Raises:
            StillstateError: the child's error, by its type. Unavailable: the child could not be started, or was killed.
        """
        child = self._running()
        try:
            _send(child, {"snapshot_id": manifest.snapshot_id})
            line = _out(child).readline(_ANSWER_BYTES_MAX)
        except OSError as error:
            self._end()
            raise Unavailable(f"the folding process ended while it was asked: {error}; a new one is started") from error
        if not line.endswith(b"\n"):
            self._end()
            raise Unavailable(
                "the folding process was killed (out of memory?); a new one is started with the next fold"
            )
        answer = json.loads(line)
        if "error" in answer:
            kind = getattr(errors, str(answer["error"]), Unavailable)
            known = isinstance(kind, type) and issubclass(kind, StillstateError)
            raise (kind if known else Unavailable)(str(answer["message"]))
        return read_record(self._root, int(answer["record_id"]))

    def close(self) -> None:
        """End the child, and a fold under way."""
        self._closed = True
        self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise Unavailable("the folding process was closed")
        if self._child is not None and self._child.poll() is None:
            return self._child
        # If the driver was started from the project's folder, the project may not be installed.
        package = str(Path(__file__).parents[2])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "state_runtime.materialize.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={
                    **KEEPS_FREED_MEMORY,
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(paths),
                    "STILLSTATE_DRIVER_PID": str(os.getpid()),
                },
            )
            _send(self._child, self._first)
        except OSError as error:
            self._end()
            raise Unavailable(f"the folding process could not be started: {error}") from error
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        _close(child.stdin)
        try:
            child.wait(_ENDS_IN_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        # Only now: a thread that waits for an answer holds the pipe until the child is gone.
        _close(child.stdout)


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        try:
            pipe.close()
        except OSError:
            _LOG.debug("the folding process had closed its pipe", exc_info=True)


def _out(child: subprocess.Popen[bytes]) -> IO[bytes]:
    assert child.stdout is not None
    return child.stdout


def _send(child: subprocess.Popen[bytes], message: Mapping[str, Any]) -> None:
    assert child.stdin is not None
    child.stdin.write(json.dumps(message).encode() + b"\n")
    child.stdin.flush()


def main() -> None:
    """Run the child: read lines, fold, answer, until the pipe closes."""
    give_way()
    # Text that a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_on, args=(lines,), daemon=True).start()
    first = json.loads(lines.get())
    root = open_store(first["store"], first["options"])
    settings = JobSettings.model_validate(first["settings"])
    owner = first.get("owner")
    ownership = Ownership(root, owner["job_uid"], Term(**owner["run"])) if owner is not None else None
    while True:
        snapshot_id = int(json.loads(lines.get())["snapshot_id"])
        answers.write(json.dumps(_folded(root, snapshot_id, settings, ownership)).encode() + b"\n")
        answers.flush()


def _read_on(lines: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        lines.put(line)
    # The driver has ended: the fold under way is of no use.
    os._exit(0)


def _folded(root: Store, snapshot_id: int, settings: JobSettings, ownership: Ownership | None) -> dict[str, Any]:
    try:
        manifest = Catalog.of_root(root).manifest(snapshot_id)
        prove = ownership.check if ownership is not None else None
        record = materialize(root, manifest, settings=settings, clock=SYSTEM_CLOCK, ids=SYSTEM_IDS, prove=prove)
    except Exception as error:
        # The driver logs it and tries again later; this process can serve the next request.
        return {"error": type(error).__name__, "message": str(error)}
    return {"record_id": record.record_id}


if __name__ == "__main__":
    main()
