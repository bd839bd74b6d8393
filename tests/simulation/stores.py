"""A bucket in memory with the calls that `FsspecStore` makes, a clock of its own, and faults drawn from the run's seed."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from state_runtime.base.errors import CorruptData, StoreUnavailable
from state_runtime.base.limits import READ_BACK_ATTEMPTS_MAX
from state_runtime.store import FsspecStore

from .turns import Actor, Killed, Turns, whoever_runs

T = TypeVar("T")


@dataclass
class StoreClock:
    """The time of the bucket. Those who live beside it may think that it is another."""

    at_ms: int = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.at_ms

    def monotonic_s(self) -> float:
        return self.at_ms / 1000


@dataclass
class WrongClock:
    """A machine's clock: it is off, and now and then jumps."""

    store: StoreClock
    off_ms: int = 0

    def now_ms(self) -> int:
        return self.store.at_ms + self.off_ms

    def monotonic_s(self) -> float:
        return self.store.at_ms / 1000


class Bucket:
    """All objects, by folder; `watch` is told of each change, after it: (what, path, body), `requested` who asks for which path, before.

    It says whether the process that asks must not wake up at this request.
    """

    def __init__(self, clock: StoreClock, name: str = "near") -> None:
        self.clock = clock
        self.name = name
        self.objects: dict[str, bytes] = {}
        self.modified_ms: dict[str, int] = {}
        self.folders: dict[str, dict[str, int]] = {}
        self.watch: Callable[[str, str, bytes], None] = lambda what, path, body: None
        self.requested: Callable[[Actor, str, bool], bool] | None = None

    def write(self, path: str, body: bytes) -> None:
        if path not in self.objects:
            self._count(path, 1)
        self.objects[path] = body
        self.modified_ms[path] = self.clock.at_ms
        self.watch("write", path, body)

    def remove(self, path: str) -> None:
        body = self.objects.pop(path)
        del self.modified_ms[path]
        self._count(path, -1)
        self.watch("delete", path, body)

    def names(self, folder: str) -> dict[str, int]:
        return self.folders.get(folder.rstrip("/"), {})

    def below(self, folder: str) -> dict[str, tuple[bytes, int]]:
        """All objects of a folder with their times, at this moment."""
        return {p: (b, self.modified_ms[p]) for p, b in self.objects.items() if p.startswith(f"{folder}/")}

    def _count(self, path: str, by: int) -> None:
        while path:
            folder, _, name = path.rpartition("/")
            below = self.folders.setdefault(folder, {})
            below[name] = below.get(name, 0) + by
            if not below[name]:
                del below[name]
                if not below:
                    del self.folders[folder]
            path = folder


@dataclass
class Faults:
    """Chances per call.

    Attributes:
        lost_request: nothing happened, and the caller gets an error. lost_answer: it happened, and the caller gets an error.
        torn_listing: the first half of a listing is older than the second.
    """

    lost_request: float = 0.0
    lost_answer: float = 0.0
    torn_listing: float = 0.0
    honours_create: bool = True


class Connection:
    """One process's way to the bucket: what fsspec gives, with faults; used by its main thread and by those beside it."""

    def __init__(self, bucket: Bucket, turns: Turns, actor: Actor, rng: random.Random, faults: Faults) -> None:
        self.bucket, self.turns, self.actor, self.rng, self.faults = bucket, turns, actor, rng, faults
        self.requested = bucket.requested
        self.storage_options = {"endpoint": bucket.name}

    def _caller(self) -> Actor:
        """The thread of the process that asks."""
        here = whoever_runs()
        return here if here.is_of(self.actor) else self.actor

    def _before(self, path: str = "", *, writes: bool = False) -> None:
        caller = self._caller()
        self.turns.pause(caller)
        if path and not self.turns.frozen and self.requested is not None and self.requested(caller, path, writes):
            self.turns.kill_process_of(caller)
            raise Killed
        if self.faults.lost_request and self.rng.random() < self.faults.lost_request:
            raise ConnectionResetError(errno.ECONNRESET, "the request was lost")

    def _after(self) -> None:
        if self.turns.frozen:
            return
        if self.actor.mortal and self.turns.kill and self.rng.random() < self.turns.kill:
            self.turns.kill_process_of(self.actor)
            raise Killed
        if self.faults.lost_answer and self.rng.random() < self.faults.lost_answer:
            raise TimeoutError(errno.ETIMEDOUT, "the answer was lost")

    def pipe_file(self, path: str, body: bytes, mode: str = "overwrite") -> None:
        self._before(path, writes=True)
        if mode == "create" and self.faults.honours_create and path in self.bucket.objects:
            raise FileExistsError(path)
        self.bucket.write(path, bytes(body))
        self._after()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        self._before(path)
        body = self._body(path)
        return body[start:end] if start or end is not None else body

    def info(self, path: str) -> dict[str, Any]:
        self._before(path)
        return self._entry(path)

    def ls(self, path: str, detail: bool = False) -> list[Any]:
        self._before(path)
        path = path.rstrip("/")
        names = sorted(self.bucket.names(path))
        if self.faults.torn_listing and len(names) > 1 and self.rng.random() < self.faults.torn_listing:
            # A listing comes page by page; between two of them the world goes on, or the connection ends.
            first = [self._entry(f"{path}/{name}") for name in names[: len(names) // 2]]
            self._before()
            later = sorted(n for n in self.bucket.names(path) if n >= names[len(names) // 2])
            entries = first + [self._entry(f"{path}/{name}") for name in later]
        else:
            entries = [self._entry(f"{path}/{name}") for name in names]
        if not entries:
            raise FileNotFoundError(path)
        return entries if detail else [e["name"] for e in entries]

    def rm_file(self, path: str) -> None:
        self._before(path, writes=True)
        self._body(path)
        self.bucket.remove(path)
        self._after()

    def cp_file(self, source: str, target: str) -> None:
        self._before(target, writes=True)
        self.bucket.write(target, self._body(source))
        self._after()

    def get_file(self, path: str, local: str) -> None:
        self._before(path)
        Path(local).write_bytes(self._body(path))

    def put_file(self, local: str, path: str) -> None:
        self._before(path, writes=True)
        self.bucket.write(path, Path(local).read_bytes())
        self._after()

    def _body(self, path: str) -> bytes:
        try:
            return self.bucket.objects[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    def _entry(self, path: str) -> dict[str, Any]:
        if path not in self.bucket.objects:
            if path in self.bucket.folders:
                return {"name": path, "type": "directory", "size": 0}
            raise FileNotFoundError(path)
        when = datetime.fromtimestamp(self.bucket.modified_ms[path] / 1000, UTC)
        return {"name": path, "type": "file", "size": len(self.bucket.objects[path]), "LastModified": when}


class QuickStore(FsspecStore):
    """The adapter of object stores, whose bounded retries cost less: what tenacity does there is told again in a loop."""

    def _retried(self, verb: str, path: str, call: Callable[[], T], *, missing_is_an_answer: bool = True) -> T:
        error: Exception | None = None
        for _ in range(READ_BACK_ATTEMPTS_MAX):
            try:
                return call()
            except (FileNotFoundError, CorruptData):
                raise  # there is a bucket: whatever is missing is an answer
            except Exception as failed:
                error = failed
        raise StoreUnavailable(f"cannot {verb} {path} in {self.url}: {error}") from error

    def child(self, name: str) -> QuickStore:
        return QuickStore(self._fs, self.at(name), f"{self._shown}/{name}", retry_wait_max_s=0.0)
