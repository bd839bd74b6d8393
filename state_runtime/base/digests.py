"""Digests of local files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

__all__ = ["digest_of_file"]


def digest_of_file(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal, read block by block. Raises OSError: the file is missing, or a link."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
