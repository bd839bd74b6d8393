"""S3 and stores with its protocol: operations for which the general adapter needs more requests or memory or is less
careful."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from state_runtime.base.errors import StoreUnavailable
from state_runtime.base.limits import MIB
from state_runtime.store.fsspec_store import FsspecStore
from state_runtime.store.port import StoredObject

__all__ = ["S3Store"]

# S3 copies up to 5 GiB in one request, which takes minutes without an answer; each part answers within seconds.
_COPY_WHOLE_MAX = 256 * MIB
_COPY_PART_BYTES = 128 * MIB
_COPY_THREADS = 8
# s3fs would hold ten parts of 50 MiB of each file in upload.
_UPLOAD_PART_BYTES, _UPLOAD_PARTS_AT_ONCE = 16 * MIB, 4
_PARTS_MAX = 10_000


class S3Store(FsspecStore):
    """See `Store`. Listings take one request for each 1,000 objects, in any number of folders."""

    def put_file(self, local: Path, path: str) -> None:
        size = os.path.getsize(local)
        part_bytes = max(_UPLOAD_PART_BYTES, -(-size // _PARTS_MAX))
        parts = {"chunksize": part_bytes, "max_concurrency": _UPLOAD_PARTS_AT_ONCE}
        try:
            self._retried("write", path, lambda: self._fs.put_file(str(local), self.at(path), **parts))
        except FileNotFoundError as error:
            # The bucket is missing; or the upload is: it was completed, and the answer was lost.
            if not (self.exists(path) and self.size(path) == size):
                raise self._error("write", path, error) from self._shown_cause(error)

    def list_names(self, path: str) -> list[str]:
        names: set[str] = set()
        below = self._prefix(path)
        for page in self._pages(path, below, Delimiter="/"):
            found = [entry["Prefix"] for entry in page.get("CommonPrefixes", [])]
            found += [entry["Key"] for entry in page.get("Contents", [])]
            names |= {key.removeprefix(below).rstrip("/") for key in found}
        return sorted(names - {""})

    def list_objects(self, path: str) -> Iterator[StoredObject]:
        root = self._prefix("")
        for page in self._pages(path, self._prefix(path)):
            yield from _objects(page, root)

    def copy_from(self, other: FsspecStore, source: str, target: str, size: int | None = None) -> None:
        there, here = other.at(source), self.at(target)
        known = other.size(source) if size is None else size
        if known <= _COPY_WHOLE_MAX:
            self._retried("copy", source, lambda: self._copy_whole(there, here))
        else:
            self._retried("copy", source, lambda: self._copy_parts(there, here, known))

    def child(self, name: str) -> S3Store:
        return S3Store(
            self._fs,
            self.at(name),
            f"{self._shown}/{name}",
            options=self._options,
            retry_wait_max_s=self._retry_wait_max_s,
            patience=self._patience,
        )

    def _listed(self, name: str) -> StoredObject | None:
        at = self._prefix("") + name
        pages = list(self._pages(name, at, MaxKeys=1))
        return next((o for page in pages for o in _objects(page, self._prefix("")) if o.path == name), None)

    def _prefix(self, path: str) -> str:
        key = (self.at(path) if path else self._root).partition("/")[2]
        return f"{key}/" if key else ""

    def _pages(self, path: str, prefix: str, **more: Any) -> Iterator[dict[str, Any]]:
        """Yield pages of a listing; an incomplete one is an error, never a shorter listing."""
        arguments = {"Bucket": self._root.partition("/")[0], "Prefix": prefix, **more}
        while True:
            page = self._retried(
                "list", path, lambda: self._call("list_objects_v2", **arguments), missing_is_an_answer=False
            )
            yield page
            if not page.get("IsTruncated") or "MaxKeys" in more:
                return
            token = page.get("NextContinuationToken")
            if not token or token == arguments.get("ContinuationToken"):
                raise StoreUnavailable(
                    f"the listing of {path or 'the root'} in {self.url} was cut off and does not say how it goes on; "
                    "nothing is concluded from it. Try again, and look for a proxy in front of the store"
                )
            arguments["ContinuationToken"] = token

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._fs.call_s3(method, **arguments, **self._limit(0))
        return answer

    def _copy_whole(self, source: str, target: str) -> None:
        bucket, _, key = target.partition("/")
        self._call("copy_object", Bucket=bucket, Key=key, CopySource=_copy_source(source))

    def _copy_parts(self, source: str, target: str, size: int) -> None:
        """Copy part by part, several at once. A failed copy leaves nothing; a killed one leaves parts that only a
        bucket rule removes."""
        bucket, _, key = target.partition("/")
        part_bytes = max(_COPY_PART_BYTES, -(-size // _PARTS_MAX))
        upload = self._call("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"]
        place = {"Bucket": bucket, "Key": key, "UploadId": upload}

        def copy_part(number: int) -> dict[str, Any]:
            first = (number - 1) * part_bytes
            last = min(first + part_bytes, size) - 1
            answer = self._call(
                "upload_part_copy",
                **place,
                PartNumber=number,
                CopySource=_copy_source(source),
                CopySourceRange=f"bytes={first}-{last}",
            )
            return {"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]}

        try:
            with ThreadPoolExecutor(_COPY_THREADS) as pool:
                parts = list(pool.map(copy_part, range(1, -(-size // part_bytes) + 1)))
            self._call("complete_multipart_upload", **place, MultipartUpload={"Parts": parts})
        except Exception:
            if not self._was_completed(place, target, size):
                raise

    def _was_completed(self, place: dict[str, str], target: str, size: int) -> bool:
        """Remove the parts of a failed upload. Return whether they were gone because the object is complete, and only
        the answer was lost."""
        try:
            self._call("abort_multipart_upload", **place)
        except FileNotFoundError:
            return int(self._fs.info(target)["size"]) == size
        return False


def _copy_source(at: str) -> dict[str, str]:
    bucket, _, key = at.partition("/")
    return {"Bucket": bucket, "Key": key}


def _objects(page: dict[str, Any], root: str) -> Iterator[StoredObject]:
    for entry in page.get("Contents", []):
        name = entry["Key"].removeprefix(root)
        # Consoles make empty objects to represent folders.
        if name and not name.endswith("/"):
            yield StoredObject(name, int(entry["Size"]), int(entry["LastModified"].timestamp() * 1000))
