"""Folding the changes of several epochs before they are written once: a row that changed in each keeps only its last
change; pure.

With a checkpoint interval, repeated updates of a key therefore cost nothing on the primary store. Changes that a task
uploaded itself are written already. They keep their place in the order of age, and changes are never folded across
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from state_runtime.base.limits import MIB
from state_runtime.base.settings import Compression
from state_runtime.changelog.changes import TaskChanges
from state_runtime.changelog.parts import PartEntry, decode_lines, decode_part, encode_lines, encode_part, sha256
from state_runtime.state.table import StateSchema, fold

__all__ = ["fold_changes"]

# One shard's changes are decoded at once; beyond this a second part begins.
_RAW_BYTES_MAX = 256 * MIB
_WHERE = "the changes that wait for a checkpoint"

_Run = list[tuple[PartEntry, bytes]]


def fold_changes(changes: Sequence[TaskChanges], compression: Compression = "lz4") -> list[TaskChanges]:
    """Return the same changes, with consecutive inline parts of one operator, state and shard folded to one.

    Tombstones and clear markers stay: they hide rows older than all of these. A single part is passed on unchanged,
    with the digest that its task computed.

    Args:
        changes: in order of age, of one run (shards do not change within it).
        compression: of folded parts.

    Raises:
        CorruptSegment: a part is not what its task acknowledged.
    """
    if len(changes) < 2:
        return list(changes)
    runs: list[_Run] = []
    open_runs: dict[tuple[str, str, str, int, int], _Run] = {}
    for task in changes:
        for part, body in zip(task.parts, task.inline, strict=True):
            key = (part.kind, part.operator, part.state, part.hash_low, part.hash_high)
            run = open_runs.get(key)
            if part.path:
                # Uploaded already. Later parts are younger, so they must not be moved before it.
                open_runs.pop(key, None)
                runs.append([(part, body)])
            elif run is not None and sum(p.raw_bytes + 1 for p, _ in run) + part.raw_bytes <= _RAW_BYTES_MAX:
                run.append((part, body))
            else:
                open_runs[key] = [(part, body)]
                runs.append(open_runs[key])
    folded = [run[0] if len(run) == 1 else _fold(run, compression) for run in runs]
    return [TaskChanges(tuple(part for part, _ in folded), tuple(body for _, body in folded))]


def _fold(run: _Run, compression: Compression) -> tuple[PartEntry, bytes]:
    first = run[0][0]
    if first.kind == "source":
        lines = [line for part, body in run for line in decode_lines(body, part, _WHERE)]
        body = encode_lines(lines)
        rows, raw_bytes = len(lines), len("\n".join(lines).encode())
    else:
        batches = [decode_part(body, part, _WHERE) for part, body in reversed(run)]
        batch = fold(batches, StateSchema.of(batches[0].schema), drop_deleted=False)
        body = encode_part(batch, compression).to_pybytes()
        rows, raw_bytes = batch.num_rows, batch.nbytes
    return replace(first, offset=0, length=len(body), digest=sha256(body), rows=rows, raw_bytes=raw_bytes), body
