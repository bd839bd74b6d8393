"""`published.json` in a job root: the newest output that is certainly published. A hint that is always true.

A run writes it when it ends, in any way as long as its process lives, and after it has published the pending output of
an earlier run. If it lists the output of the newest snapshot, a start has nothing to publish: it needs no file of the
output folder, nor the folder itself, which may already be another one.

If it is missing, or lists other output (the run was killed), the sink itself must know: a Parquet sink by its commit
log. It is not written with each checkpoint, because that would be one more request each time
(docs/design/0024-publishing.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from state_runtime.base.limits import SMALL_JSON_BYTES_MAX
from state_runtime.snapshot.document import decode_document, encode_document
from state_runtime.snapshot.manifest import StagedOutput
from state_runtime.snapshot.paths import PUBLISHED_FILE
from state_runtime.store import Store

__all__ = ["Published", "is_published", "record_published"]


@dataclass(frozen=True)
class Published:
    """The content of `published.json`.

    Attributes:
        epoch: the newest published epoch, for people.
        outputs: SHA-256 of all outputs of the snapshot that named them, made by `_digest`.
    """

    epoch: int
    outputs: str


def is_published(root: Store, outputs: Sequence[StagedOutput]) -> bool:
    """Return whether a job root says that all these outputs of one snapshot were published; True if they have no files.

    Raises:
        CorruptManifest, UnsupportedFormat: the document is there and cannot be read; remove it, and the sinks decide.
    """
    named = [output for output in outputs if output.files]
    if not named:
        return True
    try:
        data = root.read(PUBLISHED_FILE, SMALL_JSON_BYTES_MAX)
    except FileNotFoundError:
        return False
    found = decode_document("published", Published, data, f"{root.url}/{PUBLISHED_FILE}")
    return found.outputs == _digest(named)


def record_published(root: Store, outputs: Sequence[StagedOutput]) -> None:
    """Record that all these outputs of one snapshot were published; nothing is written if they have no files.

    A delayed writer may put an older statement over a newer one. Both are true; a start that looks for the newer one
    asks the sinks instead.
    """
    named = [output for output in outputs if output.files]
    if named:
        body = Published(max(output.epoch for output in named), _digest(named))
        root.put(PUBLISHED_FILE, encode_document("published", body))


def _digest(outputs: Sequence[StagedOutput]) -> str:
    # Names of staged files hold the attempt that staged them, so no two outputs have one digest.
    lines = "".join(f"{o.sink} {o.epoch} {f.staged} {f.final} {f.bytes}\n" for o in outputs for f in o.files)
    return hashlib.sha256(lines.encode()).hexdigest()
