"""Where the stores of a test are: a folder, or a bucket of an S3 protocol server (moto's)."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Home"]


@dataclass
class Home:
    """A place for stores; folders are renamed and removed as people do it, by the tools of the system."""

    url: str
    options: dict[str, Any] = field(default_factory=dict, repr=False)

    def place(self, path: str) -> str:
        return f"{self.url}/{path}"

    def rename(self, old: str, new: str) -> None:
        if not self.options:
            Path(self.url, new).parent.mkdir(parents=True, exist_ok=True)
            os.rename(Path(self.url, old), Path(self.url, new))
            return
        files = self._files()
        for path in files.find(f"{self._bucket}/{old}"):
            files.mv(path, f"{self._bucket}/{new}/{path.removeprefix(f'{self._bucket}/{old}/')}")

    def copy(self, source: str, target: str) -> None:
        if not self.options:
            shutil.copytree(Path(self.url, source), Path(self.url, target))
            return
        files = self._files()
        for path in files.find(f"{self._bucket}/{source}"):
            files.cp_file(path, f"{self._bucket}/{target}/{path.removeprefix(f'{self._bucket}/{source}/')}")

    def holding(self, secret: bytes) -> list[str]:
        """Paths of the objects that have these bytes in them; of a bucket."""
        files = self._files()
        return [path for path in files.find(self._bucket) if secret in files.cat_file(path)]

    def is_there(self, path: str) -> bool:
        """Whether anything is left under a path, an empty folder included."""
        if not self.options:
            return Path(self.url, path).exists()
        return bool(self._files().find(f"{self._bucket}/{path}"))

    def remove(self, path: str) -> None:
        if not self.options:
            shutil.rmtree(Path(self.url, path))
            return
        files = self._files()
        for found in files.find(f"{self._bucket}/{path}"):
            files.rm_file(found)

    def names(self) -> list[str]:
        """Paths of all objects."""
        if not self.options:
            return [p.relative_to(self.url).as_posix() for p in Path(self.url).rglob("*") if p.is_file()]
        return [path.removeprefix(f"{self._bucket}/") for path in self._files().find(self._bucket)]

    @property
    def _bucket(self) -> str:
        return self.url.removeprefix("s3://")

    def _files(self) -> Any:
        import s3fs

        return s3fs.S3FileSystem(**self.options, use_listings_cache=False, skip_instance_cache=True)
