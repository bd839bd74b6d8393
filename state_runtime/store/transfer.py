"""Copies of one object from a store to another: inside the store if both are of one, else through a local file,
checked."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from state_runtime.base.digests import digest_of_file
from state_runtime.base.errors import RESTORE_OR_CHOOSE, CorruptData
from state_runtime.store.fsspec_store import FsspecStore
from state_runtime.store.local import LocalStore
from state_runtime.store.port import Store

__all__ = ["is_inside", "transfer"]


def transfer(source: Store, path: str, target: Store, to: str, *, bytes_expected: int = -1, digest: str = "") -> int:
    """Copy an immutable object; readers of the target see all of it or nothing. Idempotent.

    Args:
        bytes_expected: -1 if it is not known.
        digest: SHA-256 of the object, empty if it is not known. It is compared if the bytes pass through here. A copy
            inside a store is compared by size only (this process cannot damage its bytes; `verify` reads them).

    Returns:
        Bytes of the object.

    Raises:
        FileNotFoundError: there is no such object. CorruptData: it has another size or digest; nothing was published.
        StoreUnavailable: try again.
    """
    inside = _inside(source, target)
    if inside is not None:
        size = source.size(path)
        _check(source, path, size, bytes_expected, "", "")
        inside(path, to, size)
        return size
    with tempfile.NamedTemporaryFile(prefix="stillstate-copy-") as file:
        local = Path(file.name)
        source.get_file(path, local)
        size = local.stat().st_size
        _check(source, path, size, bytes_expected, digest_of_file(local) if digest else "", digest)
        target.put_file(local, to)
    return size


def is_inside(source: Store, target: Store) -> bool:
    """Return whether objects are copied from one to the other without their bytes passing through here."""
    return _inside(source, target) is not None


def _check(store: Store, path: str, size: int, bytes_expected: int, found: str, digest: str) -> None:
    if bytes_expected not in (-1, size) or found != digest:
        raise CorruptData(
            f"{path} in {store.url} has {size:,} bytes or a digest other than its manifest says; it was not copied. "
            f"{RESTORE_OR_CHOOSE}"
        )


def _inside(source: Store, target: Store) -> Callable[[str, str, int], None] | None:
    if isinstance(source, LocalStore) and isinstance(target, LocalStore):
        return lambda path, to, size: target.copy_from(source, path, to)
    if isinstance(source, FsspecStore) and isinstance(target, FsspecStore) and source.is_of_one_system_with(target):
        return partial(target.copy_from, source)
    return None
