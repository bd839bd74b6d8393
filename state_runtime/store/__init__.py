"""The primary store behind one small port."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from state_runtime.errors import InvalidConfiguration
from state_runtime.store.fsspec_store import FsspecStore
from state_runtime.store.local import LocalStore
from state_runtime.store.port import Created, Store

__all__ = ["Created", "FsspecStore", "LocalStore", "Store", "open_store", "shared_store"]

# By process, URL and options. A store is a few clients; a process knows one or two.
_SHARED: dict[tuple[int, str, str], Store] = {}
_SHARED_MAX = 16

# File systems whose `pipe_file(mode="create")` is one conditional request (docs/design/0003-commit.md).
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

    Opening does no I/O. Credentials come from `storage_options` or the environment, never from the URL.

    Raises:
        InvalidConfiguration: unknown scheme, credentials inside the URL, or the library of the scheme is not installed.
    """
    if "://" not in url:
        return LocalStore(Path(url).expanduser().absolute())
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
        return LocalStore(Path(unquote(parts.path)))
    if parts.scheme != "memory" and parts.scheme not in _CONDITIONAL:
        known = ", ".join(["a path", "file", "memory", *sorted(_CONDITIONAL)])
        raise InvalidConfiguration(f"store URL {shown}: scheme {parts.scheme!r} is not known; use one of: {known}")
    import fsspec

    library = _CONDITIONAL.get(parts.scheme)
    try:
        fs = fsspec.filesystem(
            "s3" if parts.scheme == "s3a" else parts.scheme,
            **{"use_listings_cache": False, "skip_instance_cache": True, **(storage_options or {})},
        )
    except ImportError as error:
        raise InvalidConfiguration(
            f"store URL {shown} needs the package {library}; install stillstate[s3] or {library}"
        ) from error
    root = f"/{parts.netloc}{parts.path}" if parts.scheme == "memory" else f"{parts.netloc}{parts.path}"
    return FsspecStore(fs, root, shown)


def shared_store(url: str, storage_options: Mapping[str, Any] | None = None) -> Store:
    """`open_store`, once per process and place: making a client of an object store takes a tenth of a second and megabytes.

    For tasks, of which a worker process runs thousands. A process that was forked makes its own: connections cannot be shared.

    Raises:
        InvalidConfiguration: see `open_store`.
    """
    key = (os.getpid(), url, repr(sorted((storage_options or {}).items())))
    store = _SHARED.get(key)
    if store is None:
        if len(_SHARED) >= _SHARED_MAX:
            _SHARED.clear()
        store = _SHARED[key] = open_store(url, storage_options)
    return store
