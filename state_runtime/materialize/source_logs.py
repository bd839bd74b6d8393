"""Folding the logs of files that sources have seen: their new lines become files, which take in older ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from state_runtime.changelog.reader import read_source_log
from state_runtime.changelog.segment import sha256
from state_runtime.snapshot.manifest import FileEntry, Manifest
from state_runtime.store import Store

__all__ = ["fold_source_logs"]


def fold_source_logs(
    root: Store, manifest: Manifest, writer: str, *, everything: bool, into: Store | None = None
) -> tuple[tuple[FileEntry, ...], tuple[str, ...]]:
    """The log's new lines as files, and the paths of older ones that they take in.

    A file that is not larger than what comes after it is taken in, so there are few, and a line is rewritten few times.

    Args:
        everything: take in all of them.
        into: where they are written; None is the root itself.
    """
    if manifest.source is None:
        return (), ()
    written: list[FileEntry] = []
    removed: list[str] = []
    for source in manifest.source.logs:
        new = read_source_log(root, replace(manifest, layers=()), source)
        suffix = f"/source-{source}.log"
        stored = [(n, f) for n, x in enumerate(manifest.layers) for f in x.source_logs if f.path.endswith(suffix)]
        size = sum(len(line.encode()) + 1 for line in new)
        kept = len(stored)
        while kept and (everything or (new and stored[kept - 1][1].bytes <= size)):
            kept -= 1
            size += stored[kept][1].bytes
        taken = [file for _, file in stored[kept:]]
        if not new and len(taken) < 2:
            continue
        folded = read_source_log(root, _only(manifest, taken), source)
        body = "\n".join([*folded, *new]).encode()
        path = f"tables/_sources/{manifest.snapshot_id:020d}-{writer}/source-{source}.log"
        (into or root).put(path, body)
        written.append(FileEntry(path, len(body), sha256(body)))
        removed += [file.path for file in taken]
    return tuple(written), tuple(removed)


def _only(manifest: Manifest, files: Sequence[FileEntry]) -> Manifest:
    """The manifest with no log, and only these files of its layers."""
    chosen = set(files)
    layers = (replace(x, source_logs=tuple(f for f in x.source_logs if f in chosen)) for x in manifest.layers)
    return replace(manifest, segments=(), layers=tuple(layers))
