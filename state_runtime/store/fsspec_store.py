"""A store on any fsspec file system with an atomic `pipe_file(mode="create")`: memory (tests), S3, GCS, Azure."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from state_runtime.errors import CorruptData, OutcomeUnknown, StoreNotCapable, StoreRefused, StoreUnavailable
from state_runtime.limits import MIB, READ_BACK_ATTEMPTS_MAX
from state_runtime.snapshot.paths import check_relative_path
from state_runtime.store.port import Created, Store

__all__ = ["FsspecStore"]

T = TypeVar("T")

# The memory file system checks and then sets; one lock makes that atomic for threads of a test.
_MEMORY_LOCK = threading.Lock()
_NOT_IMPLEMENTED = {errno.ENOSYS, errno.EOPNOTSUPP}
# Errors of botocore that are neither an OSError nor passing, by name: the library is optional.
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError"}
# Up to here an object is read by one request; beyond it several streams are worth a request for the size.
_READ_AT_ONCE_MAX = 32 * MIB


class FsspecStore(Store):
    """See `Store`.

    Args:
        fs: opened with `use_listings_cache=False, skip_instance_cache=True`: a cached listing hides other writers'
            files, and cached instances are shared with other libraries of the process.
        root: path inside the file system, without a scheme.
        shown: the URL for messages, without credentials.
        retry_wait_max_s: upper bound of the random wait between attempts.
    """

    def __init__(self, fs: Any, root: str, shown: str, *, retry_wait_max_s: float = 2.0) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self._shown = shown.rstrip("/")
        self._retry_wait_max_s = retry_wait_max_s

    def __repr__(self) -> str:
        return f"FsspecStore({self._shown!r})"

    @property
    def url(self) -> str:
        return self._shown

    def create(self, path: str, body: bytes) -> Created:
        at = self._at(path)
        ambiguous: Exception | None = None
        for _ in range(READ_BACK_ATTEMPTS_MAX):
            try:
                with _MEMORY_LOCK:
                    self._fs.pipe_file(at, body, mode="create")
                return Created.MINE
            except FileExistsError:
                existing = True
            except Exception as error:  # botocore's connection and credential errors are no OSError
                if getattr(error, "errno", None) in _NOT_IMPLEMENTED:
                    raise StoreNotCapable(
                        f"{self.url} refuses conditional writes ({error}); use a store that has them"
                    ) from error
                # A timeout, a reset or a 5xx says nothing about whether the bytes landed; 412 without a body shape
                # that the client knows arrives here too. Reading back answers all of them.
                existing, ambiguous = False, error
            try:
                stored = self._retried("read back", path, lambda: self._fs.cat_file(at))
            except FileNotFoundError:
                if existing:
                    # Someone deleted the name in between: garbage collection, which only takes old names.
                    return Created.LOST
                continue
            except StoreUnavailable as error:
                raise OutcomeUnknown(
                    f"cannot tell whether {path} was written to {self.url}: {error}. "
                    "Nothing was cleaned up; start again, and the run reads it back"
                ) from error
            return Created.MINE if stored == body else Created.LOST
        raise OutcomeUnknown(
            f"creating {path} in {self.url} kept failing: {ambiguous}; start again later"
        ) from ambiguous

    def put(self, path: str, body: bytes) -> None:
        at = self._at(path)
        try:
            self._retried("write", path, lambda: self._fs.pipe_file(at, body))
        except FileNotFoundError as error:
            raise StoreRefused(
                f"cannot write {path} to {self.url}: there is no such bucket. Create it first"
            ) from error

    def put_file(self, local: Path, path: str) -> None:
        self._retried("write", path, lambda: self._fs.put_file(str(local), self._at(path)))

    def read(self, path: str, bytes_max: int) -> bytes:
        at = self._at(path)
        if bytes_max <= _READ_AT_ONCE_MAX:
            # One request that asks for a byte too many, instead of one for the size and one for the bytes.
            try:
                body = self._retried("read", path, lambda: bytes(self._fs.cat_file(at, start=0, end=bytes_max + 1)))
            except StoreUnavailable:
                if self.size(path) > 0:
                    raise
                return b""  # S3 answers 416 to any range of an empty object
            if len(body) > bytes_max:
                raise CorruptData(f"{path} in {self.url} has more than {bytes_max:,} bytes; it was not used")
            return body
        size = self.size(path)
        if size > bytes_max:
            raise CorruptData(f"{path} in {self.url} has {size:,} bytes, more than {bytes_max:,}; it was not read")
        return self._retried("read", path, lambda: bytes(self._fs.cat_file(at)))

    def get_file(self, path: str, local: Path) -> None:
        self._retried("read", path, lambda: self._fs.get_file(self._at(path), str(local)))

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        at = self._at(path)
        try:
            body = self._retried("read", path, lambda: bytes(self._fs.cat_file(at, start=offset, end=offset + length)))
        except StoreUnavailable:
            # S3 answers 416 (an OSError) to a range that begins behind the end.
            size = self.size(path)
            if offset + length <= size:
                raise
            raise CorruptData(f"{path} in {self.url} ends after {size:,} bytes; it was cut off") from None
        if len(body) != length:
            raise CorruptData(f"{path} in {self.url} ends after {offset + len(body):,} bytes; it was cut off")
        return body

    def size(self, path: str) -> int:
        return self._retried("look at", path, lambda: int(self._fs.info(self._at(path))["size"]))

    def list_names(self, path: str) -> list[str]:
        at = self._at(path) if path else self._root
        try:
            found = self._retried("list", path, lambda: self._fs.ls(at, detail=False))
        except FileNotFoundError:
            return []
        return sorted({str(name).rstrip("/").rsplit("/", 1)[-1] for name in found} - {""})

    def move(self, source: str, target: str) -> None:
        try:
            self._retried("copy", source, lambda: self._fs.cp_file(self._at(source), self._at(target)))
        except FileNotFoundError:
            if not self.exists(target):
                raise
            return
        self.delete(source)

    def delete(self, path: str) -> None:
        try:
            self._retried("delete", path, lambda: self._fs.rm_file(self._at(path)))
        except FileNotFoundError:
            return

    def child(self, name: str) -> FsspecStore:
        at = self._at(name)
        return FsspecStore(self._fs, at, f"{self._shown}/{name}", retry_wait_max_s=self._retry_wait_max_s)

    def uri(self, path: str) -> str:
        return f"{self._shown}/{path}" if path else self._shown

    def _at(self, path: str) -> str:
        return f"{self._root}/{check_relative_path(path)}"

    def _retried(self, verb: str, path: str, call: Callable[[], T]) -> T:
        """Bounded retries with jitter; a missing object is an answer, not a fault."""

        def attempt() -> T:
            try:
                return call()
            except FileNotFoundError:
                raise
            except CorruptData:
                raise
            except Exception as error:
                refused = isinstance(error, PermissionError) or type(error).__name__ in _NO_CREDENTIALS
                kind = StoreRefused if refused else StoreUnavailable
                raise kind(
                    f"cannot {verb} {path} in {self.url}: {error}. Check the network, the permissions and the bucket"
                ) from error

        return Retrying(
            retry=retry_if_exception(lambda e: isinstance(e, StoreUnavailable) and not isinstance(e, StoreRefused)),
            stop=stop_after_attempt(READ_BACK_ATTEMPTS_MAX),
            wait=wait_random_exponential(multiplier=0.05, max=self._retry_wait_max_s),
            reraise=True,
        )(attempt)
