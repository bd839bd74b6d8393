"""The folder of local copies and of Spark's scratch: private to the user who runs the job, or refused.

It holds source positions and copies of state. Other users who can write to it could read or replace them. So a folder
that another user made, or a link, is refused before anything is written below it.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from state_runtime.base.errors import InvalidConfiguration

__all__ = ["private_local_dir"]

_NEXT = "Remove it, or set `local_dir` to a folder that only you can write to"


def private_local_dir(configured: str) -> Path:
    """Return the folder's absolute path. Make it if it is missing.

    The default is in the temporary directory, which all users share: it becomes 0700. A configured folder loses the
    write permissions of all other users, and keeps its other permissions.

    Raises:
        InvalidConfiguration: it cannot be made, is a link or no folder, or belongs to another user; or all users
            can replace it, because they can write to a folder above it that has no sticky bit.
    """
    folder = Path(configured) if configured else Path(tempfile.gettempdir()) / f"stillstate-{os.getuid()}"
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check(folder, 0o022 if configured else 0o077)
    except OSError as error:
        raise InvalidConfiguration(
            f"local_dir {folder} cannot be used: {error}; choose a folder that you can write to"
        ) from error
    return folder


def _check(folder: Path, forbidden: int) -> None:
    _check_above(folder)
    # Opened without following a link, so that the checked folder is the one that is changed.
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if not folder.is_symlink():
            raise
        raise InvalidConfiguration(f"local_dir {folder} is a symbolic link; it was not followed. {_NEXT}") from error
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise InvalidConfiguration(
                f"local_dir {folder} belongs to the user with the number {status.st_uid}, not to you; it was not "
                f"used. {_NEXT}"
            )
        if status.st_mode & forbidden:
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~forbidden)
    finally:
        os.close(descriptor)


def _check_above(folder: Path) -> None:
    """Refuse a folder that all users can replace: they can write to a folder above it that has no sticky bit. Write
    permissions of groups are accepted: on many systems each user has a group, and folders are open to it."""
    for above in Path(os.path.realpath(folder.parent)).joinpath(folder.name).parents:
        status = above.stat()
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise InvalidConfiguration(
                f"local_dir {folder} lies below {above}, where all users can put another folder in its place; it "
                "was not used. Take the right to write there from others, or set `local_dir` to a folder elsewhere"
            )
