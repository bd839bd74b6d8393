"""Folds the logs of files that sources have seen: their new lines become files, which replace older ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from state_runtime.base.limits import SOURCE_LOG_PART_BYTES_MAX
from state_runtime.changelog.parts import sha256
from state_runtime.changelog.reader import stream_source_log
from state_runtime.changelog.source_log import joined_texts, source_log_path
from state_runtime.snapshot.manifest import FileEntry, Manifest
from state_runtime.store import Store

__all__ = ["fold_source_logs"]


def fold_source_logs(
    root: Store, manifest: Manifest, writer: str, *, everything: bool, into: Store | None = None
) -> tuple[tuple[FileEntry, ...], tuple[str, ...]]:
    """Write the log's new lines as files; return them, and the paths of older files that are merged into them.

    A file that is not larger than the data after it is merged, so there are few files, and a line is rewritten few
    times. A file of at least half the maximum size stays as it is, and so do all files before it. So the cost of a fold
    depends on the new data, not on the length of the log.

    Args:
        everything: merge all files but these.
        into: where they are written; None is the root itself.
    """
    if manifest.source is None:
        return (), ()
    written: list[FileEntry] = []
    removed: list[str] = []
    for source in manifest.source.logs:
        newest = replace(manifest, layers=())
        size = sum(len(text.encode()) + 1 for text in stream_source_log(root, newest, source))
        is_new = size > 0
        suffix = f"/source-{source}.log"
        stored = [f for x in manifest.layers for f in x.source_logs if f.path.endswith(suffix)]
        kept = len(stored)
        while kept and stored[kept - 1].bytes < SOURCE_LOG_PART_BYTES_MAX // 2:
            if not (everything or (is_new and stored[kept - 1].bytes <= size)):
                break
            kept -= 1
            size += stored[kept].bytes
        taken = stored[kept:]
        if not is_new and len(taken) < 2:
            continue
        texts = chain(stream_source_log(root, _only(manifest, taken), source), stream_source_log(root, newest, source))
        for number, body in enumerate(joined_texts(texts)):
            path = source_log_path(manifest.snapshot_id, writer, number, source)
            (into or root).put(path, body)
            written.append(FileEntry(path, len(body), sha256(body)))
        removed += [file.path for file in taken]
    return tuple(written), tuple(removed)


def _only(manifest: Manifest, files: Sequence[FileEntry]) -> Manifest:
    """Return the manifest without its log, and with only these files in its layers."""
    chosen = set(files)
    layers = (replace(x, source_logs=tuple(f for f in x.source_logs if f in chosen)) for x in manifest.layers)
    return replace(manifest, segments=(), layers=tuple(layers))
