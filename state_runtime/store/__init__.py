"""The primary store behind one small port."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.store.fsspec_store import FsspecStore
from state_runtime.store.local import LocalStore
from state_runtime.store.options import Patience, StoreOptions
from state_runtime.store.port import Body, Created, SharedObject, Store, StoredObject
from state_runtime.store.s3 import S3Store
from state_runtime.store.transfer import transfer

__all__ = [
    "Body",
    "Created",
    "FsspecStore",
    "LocalStore",
    "Patience",
    "S3Store",
    "SharedObject",
    "Store",
    "StoreOptions",
    "StoredObject",
    "open_store",
    "open_watched_store",
    "shared_store",
    "transfer",
]

# By process, URL and digest of the options. A store is a few clients; a process uses one or two stores.
_SHARED: dict[tuple[int, str, str], Store] = {}
_SHARED_MAX = 16
# File systems of watchers, by process, scheme, options and patience: hundreds of jobs share few accounts.
_WATCHED: dict[tuple[int, str, str, Patience], Any] = {}
_WATCHED_MAX = 256

# File systems whose `pipe_file(mode="create")` is one conditional request (docs/design/0021-s3-and-fencing.md).
_CONDITIONAL = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
}


def open_store(url: str, storage_options: Mapping[str, Any] | None = None) -> Store:
    """Open the folder at `url`: a path, `file:///path`, `memory://name`, or an object store's URL.

    Opening sends no request. Credentials come from `storage_options` (`store/options.py` has their names) or the
    environment, never from the URL. For a local folder only `single_writer` counts.

    Raises:
        InvalidConfiguration: unknown scheme, credentials inside the URL, no bucket, wrong options, or the library of
            the scheme is not installed.
    """
    return _open(url, storage_options, None)


def open_watched_store(url: str, storage_options: Mapping[str, Any] | None, patience: Patience) -> Store:
    """Do the same as `open_store`, for a caller that only watches many stores: calls end early, and stores of one
    account share their connections. Never for a driver: a call that ends early is not repeated.

    Raises:
        InvalidConfiguration: see `open_store`.
    """
    return _open(url, storage_options, patience)


def _open(url: str, storage_options: Mapping[str, Any] | None, patience: Patience | None) -> Store:
    if "://" not in url:
        return LocalStore(Path(url).expanduser().absolute(), single_writer=_single_writer(storage_options))
    parts = urlsplit(url)
    shown = (
        urlunsplit((parts.scheme, parts.hostname or "", parts.path, "", ""))
        if "@" not in url
        else f"{parts.scheme}://…"
    )
    if "@" in url or ":" in parts.netloc or parts.query or parts.fragment:
        raise InvalidConfiguration(
            f"the store URL {shown} holds credentials or parameters; put them into storage_options"
        )
    if parts.scheme == "file":
        return LocalStore(Path(unquote(parts.path)), single_writer=_single_writer(storage_options))
    if parts.scheme != "memory" and parts.scheme not in _CONDITIONAL:
        known = ", ".join(["a path", "file", "memory", *sorted(_CONDITIONAL)])
        raise InvalidConfiguration(f"store URL {shown}: scheme {parts.scheme!r} is not known; use one of: {known}")
    if not parts.netloc:
        raise InvalidConfiguration(f"store URL {shown} names no bucket; write {parts.scheme}://bucket/folder")
    options = StoreOptions.of(parts.scheme, storage_options, patience)
    if patience is None:
        fs = _file_system(parts.scheme, options, shown)
    else:
        fs = _watched_file_system(parts.scheme, options, shown, patience)
    root = f"/{parts.netloc}{parts.path}" if parts.scheme == "memory" else f"{parts.netloc}{parts.path}"
    kind = S3Store if options.is_s3 else FsspecStore
    return kind(fs, root, shown, options=options, patience=patience)


def _single_writer(storage_options: Mapping[str, Any] | None) -> bool:
    return bool((storage_options or {}).get("single_writer", False))


def _file_system(scheme: str, options: StoreOptions, shown: str) -> Any:
    import fsspec

    library = _CONDITIONAL.get(scheme, "fsspec")
    # A cached listing hides other writers' files, and cached instances are shared with other libraries of the process.
    given = {**options.library, "use_listings_cache": False, "skip_instance_cache": True}
    try:
        fs = fsspec.filesystem("s3" if scheme == "s3a" else scheme, **given)
    except ImportError as error:
        raise InvalidConfiguration(f"store URL {shown} needs the package {library}; install {library}") from error
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidConfiguration(
            f"store URL {shown}: {library} refuses the storage options: {options.redact(str(error))}"
        ) from None
    if options.is_s3:
        fs.retries = 1  # its own attempts would multiply those of botocore and of Stillstate
    return fs


def _watched_file_system(scheme: str, options: StoreOptions, shown: str, patience: Patience) -> Any:
    # No lock: a thread that holds it while a library looks for credentials would keep all others waiting. Sometimes two
    # file systems are made where one would do.
    key = (os.getpid(), scheme, options.digest, patience)
    fs = _WATCHED.get(key)
    if fs is None:
        if len(_WATCHED) >= _WATCHED_MAX:
            _WATCHED.clear()
        fs = _WATCHED.setdefault(key, _file_system(scheme, options, shown))
    return fs


def shared_store(url: str, storage_options: Mapping[str, Any] | None = None) -> Store:
    """Do the same as `open_store`, once per process and place: making a client of an object store takes a tenth of a
    second and megabytes.

    For tasks, of which a worker process runs thousands. A forked process makes its own: connections cannot be shared.

    Raises:
        InvalidConfiguration: see `open_store`.
    """
    # The key outlives the store in dumps of memory, so it is a digest.
    key = (os.getpid(), url, StoreOptions("", dict(storage_options or {})).digest)
    store = _SHARED.get(key)
    if store is None:
        if len(_SHARED) >= _SHARED_MAX:
            _SHARED.clear()
        store = _SHARED[key] = open_store(url, storage_options)
    return store
