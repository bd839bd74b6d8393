"""A store on any fsspec file system with an atomic `pipe_file(mode="create")`: memory (tests), S3, GCS, Azure."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from tenacity import (
    Retrying,
    retry_if_exception,
    retry_if_result,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

from state_runtime.base.errors import CorruptData, OutcomeUnknown, StoreNotCapable, StoreRefused, StoreUnavailable
from state_runtime.base.limits import KIB, MIB, READ_BACK_ATTEMPTS_MAX
from state_runtime.store.options import Patience, StoreOptions
from state_runtime.store.paths import check_relative_path
from state_runtime.store.port import Body, Created, Store, StoredObject, probe_name, warn_single_writer

__all__ = ["FsspecStore"]

T = TypeVar("T")

# The memory file system checks and then sets; one lock makes that atomic for threads of a test.
_MEMORY_LOCK = threading.Lock()
_NOT_IMPLEMENTED = {errno.ENOSYS, errno.EOPNOTSUPP}
# Errors of botocore that are neither an OSError nor transient, by name: the library is optional.
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "CredentialRetrievalError"}
# Up to this size an object is read by one request; a larger one is worth a request for its size and several streams.
_READ_AT_ONCE_MAX = 32 * MIB
# An operation is not begun again after this time, however long its attempts took.
_RETRY_FOR_S = 120.0
# Time limit of an operation on an object, so that a very slow store is an error and not a standstill.
_CALL_S, _BYTES_PER_S = 60.0, 256 * KIB


class FsspecStore(Store):
    """See `Store`.

    Args:
        fs: opened with `use_listings_cache=False, skip_instance_cache=True`: a cached listing hides other writers'
            files, and cached instances are shared with other libraries of the process.
        root: path inside the file system, without a scheme.
        shown: the URL for messages, without credentials.
        options: how it was opened; messages are cleaned of its values.
        retry_wait_max_s: upper bound of the random wait between attempts.
        patience: for a caller that prefers no answer to a late one.
    """

    def __init__(
        self,
        fs: Any,
        root: str,
        shown: str,
        *,
        options: StoreOptions | None = None,
        retry_wait_max_s: float = 2.0,
        patience: Patience | None = None,
    ) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self._shown = shown.rstrip("/")
        self._options = options if options is not None else StoreOptions("")
        self._retry_wait_max_s = retry_wait_max_s
        self._patience = patience
        # Only asynchronous file systems take a time limit: their calls are coroutines, which can be cancelled.
        self._is_async = bool(getattr(fs, "async_impl", False))

    def __repr__(self) -> str:
        return f"FsspecStore({self._shown!r})"

    @property
    def url(self) -> str:
        return self._shown

    def create(self, path: str, body: Body) -> Created:
        body = bytes(body)  # as in `put`
        if not self._options.single_writer:
            return self._create(path, body)
        # Without the store's help: look, write, look again. This sees writes of another writer before or after, but not
        # in between.
        found = self._reads_as(path, body)
        if found is None:
            created = self._create(path, body)
            found = created is Created.MINE and self._reads_as(path, body) is True
        return Created.MINE if found else Created.LOST

    def _create(self, path: str, body: bytes) -> Created:
        failed: Exception | None = None

        def attempt() -> Created | None:
            nonlocal failed
            taken = False
            try:
                self._write_once(path, body)
                return Created.MINE
            except FileExistsError:
                taken = True
            except StoreNotCapable:
                raise
            except Exception as error:  # botocore's connection and credential errors are no OSError
                # A timeout, a reset or a 5xx does not say whether the bytes were written; a 412 whose body the client
                # does not know arrives here too. Reading back answers all of them.
                failed = error
            try:
                mine = self._reads_as(path, body)
            except StoreUnavailable as error:
                if failed is not None and _is_refusal(failed) and _attempts_before(failed) == 0:
                    raise self._error("create", path, failed) from self._shown_cause(
                        failed
                    )  # it was refused at the first attempt
                raise OutcomeUnknown(
                    f"cannot tell whether {path} was written to {self.url}: {error}. "
                    "Nothing was cleaned up; start again, and the run reads it back"
                ) from error
            if mine is None and not taken:
                if failed is not None and _is_refusal(failed):
                    raise self._error("create", path, failed) from self._shown_cause(failed)
                return None  # nothing was written (or 409: two at once, and neither was): once more
            # Taken, and gone at the second look: garbage collection deleted an old object.
            return Created.MINE if mine else Created.LOST

        created: Created | None = Retrying(
            retry=retry_if_result(lambda result: result is None),
            stop=stop_after_attempt(READ_BACK_ATTEMPTS_MAX) | stop_after_delay(_RETRY_FOR_S),
            wait=wait_random_exponential(multiplier=0.05, max=self._retry_wait_max_s),
            retry_error_callback=lambda state: None,
        )(attempt)
        if created is None:
            raise OutcomeUnknown(
                f"creating {path} in {self.url} kept failing: {self._options.redact(str(failed))}; start again later"
            ) from self._shown_cause(failed)
        return created

    def _write_once(self, path: str, body: bytes, *, conditional: bool = True) -> None:
        """Write in one request.

        Raises:
            StoreNotCapable: the store does not know conditional writes, and no single writer was declared.
        """
        mode = {"mode": "create"} if conditional else {}
        try:
            with self._one_at_a_time():
                self._fs.pipe_file(self.at(path), body, **mode, **self._limit(len(body)))
        except OSError as error:
            if error.errno not in _NOT_IMPLEMENTED or not conditional:
                raise
            if not self._options.single_writer:
                raise StoreNotCapable(
                    f"{self.url} refuses conditional writes ({self._options.redact(str(error))}); use a store that has "
                    "them, or declare `single_writer: true` if nothing else ever writes to this job"
                ) from self._shown_cause(error)
            self._write_once(path, body, conditional=False)

    def _one_at_a_time(self) -> AbstractContextManager[object]:
        return nullcontext() if self._is_async else _MEMORY_LOCK

    def _reads_as(self, path: str, body: bytes) -> bool | None:
        """Return whether the object holds exactly `body`; None if there is no object.

        Raises:
            StoreUnavailable: it cannot be read.
        """
        try:
            return self._read_at_most("read back", path, len(body) + 1) == body
        except FileNotFoundError:
            return None

    def now_ms(self) -> int | None:
        if _is_in_this_process(self._fs):
            return None
        name = probe_name()
        try:
            self.put(name, b"what time is it")
            listed = self._listed(name)
        finally:
            self.delete(name)
        return listed.modified_ms if listed is not None else None

    def probe(self) -> None:
        if self._options.single_writer and not self._refuses_a_second():
            warn_single_writer(self.url)
        super().probe()

    def _refuses_a_second(self) -> bool:
        """Return whether the store honours the condition by itself."""
        name = probe_name()

        def attempt() -> bool:
            try:
                self._fs.pipe_file(self.at(name), b"second", mode="create", **self._limit(0))
            except FileExistsError:
                return True
            except OSError as error:
                if error.errno not in _NOT_IMPLEMENTED:
                    raise
            return False

        try:
            self.put(name, b"first")
            return self._retried("probe", name, attempt)
        finally:
            self.delete(name)

    def put(self, path: str, body: Body) -> None:
        body = bytes(body)  # the libraries accept nothing else; bytes are not copied
        at, limit = self.at(path), self._limit(len(body))
        self._retried("write", path, lambda: self._fs.pipe_file(at, body, **limit), missing_is_an_answer=False)

    def put_file(self, local: Path, path: str) -> None:
        at = self.at(path)
        self._retried("write", path, lambda: self._fs.put_file(str(local), at), missing_is_an_answer=not local.exists())

    def read(self, path: str, bytes_max: int) -> bytes:
        at = self.at(path)
        if bytes_max <= _READ_AT_ONCE_MAX:
            # One request that reads one byte too many, instead of one for the size and one for the bytes.
            body = self._read_at_most("read", path, bytes_max + 1)
            if len(body) > bytes_max:
                raise CorruptData(f"{path} in {self.url} has more than {bytes_max:,} bytes; it was not used")
            return body
        size = self.size(path)
        if size > bytes_max:
            raise CorruptData(f"{path} in {self.url} has {size:,} bytes, more than {bytes_max:,}; it was not read")
        return self._retried("read", path, lambda: bytes(self._fs.cat_file(at, **self._limit(size))))

    def _read_at_most(self, verb: str, path: str, length: int) -> bytes:
        """Read the first bytes of an object in one request."""
        return self._retried(verb, path, lambda: self._range(path, 0, length))

    def _range(self, path: str, start: int, end: int) -> bytes:
        """Read the bytes of a range that an object has."""
        at = self.at(path)
        try:
            return bytes(self._fs.cat_file(at, start=start, end=end, **self._limit(end - start)))
        except Exception as error:
            # S3 answers 416 to a range that begins after the end, also to any range of an empty object.
            if not _is_beyond_end(error) or int(self._fs.info(at, **self._limit(0))["size"]) > start:
                raise
            return b""

    def get_file(self, path: str, local: Path) -> None:
        self._retried("read", path, lambda: self._fs.get_file(self.at(path), str(local)))

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        body = self._retried("read", path, lambda: self._range(path, offset, offset + length))
        if len(body) != length:
            raise CorruptData(f"{path} in {self.url} ends before byte {offset + length:,}; it was cut off")
        return body

    def size(self, path: str) -> int:
        return self._retried("look at", path, lambda: int(self._fs.info(self.at(path), **self._limit(0))["size"]))

    def list_names(self, path: str) -> list[str]:
        at = self.at(path) if path else self._root
        try:
            found = self._retried("list", path, lambda: self._fs.ls(at, detail=False, **self._impatient_limit()))
        except FileNotFoundError:
            return []
        return sorted({str(name).rstrip("/").rsplit("/", 1)[-1] for name in found} - {""})

    def list_objects(self, path: str) -> Iterator[StoredObject]:
        # One level at a time: a listing of everything at once would hold millions of entries.
        folders = [self.at(path) if path else self._root]
        while folders:
            at = folders.pop()
            try:
                found = self._retried("list", path, lambda at=at: self._fs.ls(at, detail=True))  # type: ignore[misc]
            except FileNotFoundError:
                continue
            for entry in found:
                # Names come from the store and may be anything; nothing is opened by them here.
                there = str(entry["name"]).rstrip("/")
                name = there.strip("/").removeprefix(self._root.strip("/")).strip("/")
                if entry["type"] == "directory":
                    folders.append(there)
                elif name and there != at:
                    yield StoredObject(name, int(entry["size"]), _modified_ms(entry))

    def copy(self, source: str, target: str) -> None:
        self.copy_from(self, source, target)

    def copy_from(self, other: FsspecStore, source: str, target: str, size: int | None = None) -> None:
        """Copy like `copy`, from a store of the same system (`is_of_one_system_with`).

        Args:
            size: of the object, if the caller knows it: a store that copies large objects in parts need not look
                again.
        """
        self._retried("copy", source, lambda: self._fs.cp_file(other.at(source), self.at(target)))

    def is_of_one_system_with(self, other: FsspecStore) -> bool:
        """Return whether the system behind both can copy from one to the other: same library, endpoint and account."""
        return type(self._fs) is type(other._fs) and self._fs.storage_options == other._fs.storage_options

    def move(self, source: str, target: str) -> None:
        try:
            self.copy(source, target)
        except FileNotFoundError:
            if not self.exists(target):
                raise
            return
        self.delete(source)

    def delete(self, path: str) -> None:
        try:
            self._retried("delete", path, lambda: self._fs.rm_file(self.at(path), **self._limit(0)))
        except FileNotFoundError:
            return

    def child(self, name: str) -> FsspecStore:
        at = self.at(name)
        return FsspecStore(
            self._fs,
            at,
            f"{self._shown}/{name}",
            options=self._options,
            retry_wait_max_s=self._retry_wait_max_s,
            patience=self._patience,
        )

    def at(self, path: str) -> str:
        """Return the path of an object, as the file system names it."""
        return f"{self._root}/{check_relative_path(path)}"

    def _limit(self, size: int) -> dict[str, float]:
        """Return how long a call on `size` bytes may take."""
        call_s = _CALL_S + size / _BYTES_PER_S if self._patience is None else self._patience.call_s
        return {"timeout": call_s} if self._is_async else {}

    def _impatient_limit(self) -> dict[str, float]:
        """Return the limit for listings, which take longer the more names there are: none without `patience`."""
        return {} if self._patience is None else self._limit(0)

    def _retried(self, verb: str, path: str, call: Callable[[], T], *, missing_is_an_answer: bool = True) -> T:
        """Call with bounded retries and jitter. A missing object is an answer, not a fault; for a call on which no
        object can be missing, it means that the bucket is missing."""

        def attempt() -> T:
            try:
                return call()
            except CorruptData:
                raise
            except Exception as error:
                if isinstance(error, FileNotFoundError) and missing_is_an_answer:
                    raise
                raise self._error(verb, path, error) from self._shown_cause(error)

        attempts_max = READ_BACK_ATTEMPTS_MAX if self._patience is None else self._patience.attempts_max
        return Retrying(
            retry=retry_if_exception(lambda e: isinstance(e, StoreUnavailable) and not isinstance(e, StoreRefused)),
            stop=stop_after_attempt(attempts_max) | stop_after_delay(_RETRY_FOR_S),
            wait=wait_random_exponential(multiplier=0.05, max=self._retry_wait_max_s),
            reraise=True,
        )(attempt)

    def _shown_cause(self, error: BaseException | None) -> BaseException | None:
        """Return the cause that a traceback may show: nothing that repeats a value of the options."""
        at, seen = error, ""
        while at is not None:
            seen += f"{at!r} {at} "
            at = at.__cause__ or at.__context__
        return error if self._options.redact(seen) == seen else None

    def _error(self, verb: str, path: str, error: Exception) -> StoreUnavailable:
        """Convert a library's error to Stillstate's: what, where, what next; without the values of options."""
        said = self._options.redact(str(error)) or type(error).__name__
        what = f"cannot {verb} {path or 'the root'} in {self.url}: {said}. "
        if type(error).__name__ in _NO_CREDENTIALS:
            return StoreRefused(
                f"{what}No credentials were found: give storage_options `key` and `secret`, name a `storage_profile`, "
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role"
            )
        if isinstance(error, FileNotFoundError):
            return StoreRefused(f"{what}There is no such bucket. Create it first, or correct the store's URL")
        if isinstance(error, PermissionError):
            return StoreRefused(f"{what}The store refused: check the credentials, the bucket's policy and the clock")
        return StoreUnavailable(f"{what}Check the network, the endpoint and the store, then try again")


def _is_refusal(error: Exception) -> bool:
    """Return whether the same request would be refused again."""
    return isinstance(error, PermissionError | FileNotFoundError) or type(error).__name__ in _NO_CREDENTIALS


def _is_beyond_end(error: Exception) -> bool:
    """Return whether an error may be a 416, in the form of any library."""
    said = [getattr(error, name, None) for name in ("status", "status_code", "code")]
    return getattr(error, "errno", None) == errno.EINVAL or 416 in said


def _attempts_before(error: Exception) -> int:
    """Return how often the library itself had tried before this answer; the results of those attempts are not known."""
    answer = getattr(error.__cause__, "response", None) or {}
    return int(answer.get("ResponseMetadata", {}).get("RetryAttempts", 0))


def _is_in_this_process(fs: Any) -> bool:
    """Return whether a file system exists only in this process."""
    protocol = getattr(fs, "protocol", "")
    names = {protocol} if isinstance(protocol, str) else set(protocol)
    return bool(names & {"memory", "file", "local"})


def _modified_ms(entry: Mapping[str, Any]) -> int:
    """Return when an object was written, from a listing's entry; each library has another field for it."""
    for key in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = entry.get(key)
        seconds = getattr(value, "timestamp", None)
        if callable(seconds):
            return int(seconds() * 1000)
        if isinstance(value, int | float):
            return int(value * 1000)
    raise StoreNotCapable(f"listings of this store do not say when {entry.get('name')} was written; use another store")
