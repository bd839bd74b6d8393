"""Output of epochs that a job went back behind is taken out of the place of a sink that says `on_rollback="replace"`.

ParquetSink     its files of those epochs are removed, by the protocol of compactions (pipeline/compactions.py)
others          the sink itself knows its table (`Sink.withdraw`)

A file into which a compaction has put such epochs together with others is written anew without their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from state_runtime.base.actor import Actor
from state_runtime.base.errors import InvalidPipeline, Unavailable
from state_runtime.maintenance.output.compact import Compacted, write_anew
from state_runtime.maintenance.output.plan import DataFile, Folder, Group
from state_runtime.pipeline.compactions import Compaction, agree, finish, finish_all, numbers_of
from state_runtime.pipeline.output_layout import footer_of
from state_runtime.pipeline.sinks import ParquetSink, Sink
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.store import Store

__all__ = ["withdraw_output"]

_FILES_MAX: Final = 1_000
"""Files of one document; as many as a compaction has."""
_ROUNDS_MAX: Final = 30
"""Rounds in which other compactions were faster. Each ends one of theirs."""

Left = Sequence[tuple[int, int]]
"""Closed ranges of epochs, ascending."""


def withdraw_output(sink: Sink, spec: SinkSpec, left: Left, actor: Actor) -> int:
    """Take the output of epochs out of a sink's place; see `Sink.withdraw`.

    Of a folder a crash leaves some of the files; the next call, which is the next start's, removes the rest.

    Raises:
        Unavailable: compactions by others were faster each time; start again.
    """
    if not isinstance(sink, ParquetSink):
        return sink.withdraw(spec, left)
    folder = _Folder(spec, left, actor)
    for _ in range(_ROUNDS_MAX):
        if folder.withdraw():
            return folder.removed
    raise Unavailable(f"sink {spec.name!r}: compactions of {spec.store().url} were faster each time; start again")


class _Folder:
    """The folder of a Parquet sink, with what goes.

    Attributes:
        removed: files that were removed or written anew.
    """

    def __init__(self, spec: SinkSpec, left: Left, actor: Actor) -> None:
        self._spec = spec
        self._store: Store = spec.store()
        self._writer = spec.staging_prefix.rpartition("/")[2]
        self._left = left
        self._actor = actor
        self.removed = 0

    def withdraw(self) -> bool:
        """Remove what is there. Return whether all is gone; otherwise a compaction was faster.

        Raises:
            InvalidPipeline: rows cannot be told apart; other files may be gone already.
        """
        finish_all(self._store)
        known = numbers_of(self._store).newest
        files = Folder.of(self._store.list_objects("")).files.get(self._writer, ())
        whole = [file for file in files if any(a <= file.first_epoch and file.last_epoch <= b for a, b in self._left)]
        shared = [
            file
            for file in files
            if file not in whole and any(a <= file.last_epoch and file.first_epoch <= b for a, b in self._left)
        ]
        for file in shared:
            self._check_epochs(file)
        done = [self._write_anew(file, known) for file in shared]
        done += [self._remove(whole[start : start + _FILES_MAX], known) for start in range(0, len(whole), _FILES_MAX)]
        return all(done)

    def _remove(self, files: Sequence[DataFile], known: int) -> bool:
        """Remove files that have rows of left epochs only. Return whether they are gone."""

        def made(number: int) -> Compaction:
            return Compaction(
                uid=self._actor.ids.uid(),
                at_ms=self._actor.clock.now_ms(),
                inputs=tuple(file.path for file in files),
                output=None,
                first_epoch=min(file.first_epoch for file in files),
                last_epoch=max(file.last_epoch for file in files),
                digest="",
            )

        number = agree(self._store, (file.path for file in files), known, made)
        if number is None or not finish(self._store, number):
            return False
        self.removed += len(files)
        return True

    def _write_anew(self, file: DataFile, known: int) -> bool:
        """Write a compacted file anew without the rows of left epochs. Return whether it has none of them now."""
        with pq.ParquetFile(pa.BufferReader(self._store.read(file.path, file.bytes))) as opened:
            epochs = opened.read(columns=[self._spec.epoch_column])[0].to_numpy()
        stays = self._stay(epochs)
        if stays.all():
            return True
        if not stays.any():
            return self._remove([file], known)
        ends = replace(file, first_epoch=int(epochs[stays].min()), last_epoch=int(epochs[stays].max()))
        run = Group(file.path.rpartition("/")[0], self._writer, (ends,))
        done = write_anew(self._store, self._actor, known, run, Compacted(), self._kept)
        self.removed += done.inputs
        return bool(done.inputs)

    def _kept(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        stays = self._stay(batch.column(self._spec.epoch_column).to_numpy(zero_copy_only=False))
        return batch.filter(pa.array(stays))

    def _stay(self, epochs: np.ndarray) -> np.ndarray:
        goes = np.zeros(len(epochs), bool)
        for first, last in self._left:
            goes |= (epochs >= first) & (epochs <= last)
        return ~goes

    def _check_epochs(self, file: DataFile) -> None:
        """Refuse a file that does not say of which epoch a row is."""
        column = self._spec.epoch_column
        schema = pq.read_schema(pa.BufferReader(footer_of(self._store, file.path, file.bytes)))
        if column is None or column not in schema.names:
            raise InvalidPipeline(
                f"sink {self._spec.name!r}: {file.path} in {self._store.url} has rows of epochs {file.first_epoch} to "
                f"{file.last_epoch}, put together by a compaction, and the job went back behind some of them. It has "
                "no column with the epoch, by which their rows could be told apart. Nothing of it was changed. Start "
                'with on_rollback="continue" and remove the rows yourself, or go back to a snapshot before it'
            )
