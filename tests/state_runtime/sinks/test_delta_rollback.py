"""A Delta table is restored to what it was before epochs that the job went back behind, or is left alone."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from state_runtime.base import faults
from state_runtime.base.errors import InvalidConfiguration, InvalidPipeline
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.sinks.delta import DeltaSink
from state_runtime.sinks.kafka import KafkaSink
from state_runtime.snapshot.manifest import StagedOutput

SCHEMA = pa.schema([("k", pa.int64()), ("n", pa.int64())])
UID = "0123456789abcdef"
KEYS = 3


class Table:
    """A table with the job that writes to it: epoch e gives the rows (e % KEYS, e) and (e % KEYS + 10, e)."""

    def __init__(self, place: Path, *, is_merged: bool = False) -> None:
        self.place = place
        self.is_merged = is_merged
        self.epoch = 0
        self.line: list[int] = []
        """The epochs whose output counts."""
        self.foreign: list[int] = []

    def opened(self) -> tuple[DeltaSink, SinkSpec]:
        sink = DeltaSink(str(self.place), merge_on=["k"] if self.is_merged else None, on_rollback="replace")
        sink.check(SCHEMA, "sink 'out'")
        sink.check_place(sink.layout(SCHEMA), (), "sink 'out'")
        return sink, sink.spec("orders", UID, "out", ("", {}))

    def staged(self, epoch: int) -> StagedOutput:
        _, spec = self.opened()
        staging = spec.open(1, epoch, 0, "attempt")
        rows = [{"k": epoch % KEYS, "n": epoch}, {"k": epoch % KEYS + 10, "n": epoch}]
        staging.write(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
        return StagedOutput("out", epoch, staging.finish().files)

    def publish(self, count: int = 1) -> None:
        for _ in range(count):
            self.epoch += 1
            self.line.append(self.epoch)
            sink, spec = self.opened()
            sink.publish(spec, self.staged(self.epoch), None)

    def withdraw(self, left: list[tuple[int, int]]) -> int:
        sink, spec = self.opened()
        taken = sink.withdraw(spec, left)
        self.line = [epoch for epoch in self.line if not any(a <= epoch <= b for a, b in left)]
        return taken

    def write_foreign(self) -> None:
        self.foreign.append(100 + len(self.foreign))
        row = pa.Table.from_pylist([{"k": self.foreign[-1], "n": 0}], schema=SCHEMA)
        write_deltalake(str(self.place), row, mode="append")

    def rows(self) -> list[tuple[int, int]]:
        return sorted((row["k"], row["n"]) for row in DeltaTable(str(self.place)).to_pyarrow_table().to_pylist())

    def expected(self) -> list[tuple[int, int]]:
        rows = [(k, n) for n in self.line for k in (n % KEYS, n % KEYS + 10)] + [(k, 0) for k in self.foreign]
        return sorted(dict(rows).items()) if self.is_merged else sorted(rows)


@pytest.mark.parametrize("is_merged", [False, True], ids=["append", "merge"])
def test_a_table_is_what_it_was_before_the_epochs_that_were_left(tmp_path: Path, is_merged: bool) -> None:
    """Also what a merge has changed: the rows of before are back."""
    table = Table(tmp_path / "t", is_merged=is_merged)
    table.publish(7)
    assert table.withdraw([(4, 7)]) == 4
    assert table.rows() == table.expected()
    assert table.withdraw([(4, 7)]) == 0
    table.publish(2)
    assert table.rows() == table.expected()
    assert table.withdraw([(4, 7), (9, 9)]) == 1
    assert table.rows() == table.expected()


@examples(40)
@given(
    steps=st.lists(
        st.one_of(st.integers(1, 3), st.integers(-4, -1), st.sampled_from(["foreign", "optimize", "vacuum"])),
        max_size=9,
    ),
    is_merged=st.booleans(),
)
def test_whatever_was_done_with_the_table_its_rows_are_those_of_the_line_or_nothing_was_changed(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int | str], is_merged: bool
) -> None:
    table = Table(tmp_path_factory.mktemp("delta") / "t", is_merged=is_merged)
    table.publish()
    refused = False
    left: list[tuple[int, int]] = []
    for step in steps:
        if step == "foreign":
            table.write_foreign()
        elif step == "optimize":
            DeltaTable(str(table.place)).optimize.compact()
        elif step == "vacuum":
            DeltaTable(str(table.place)).vacuum(dry_run=False)
        elif isinstance(step, int) and step > 0:
            table.publish(step)
        elif isinstance(step, int):
            first = max(1, table.epoch + step + 1)
            asked = [(a, b) for a, b in left if a < first] + [(first, table.epoch)]
            try:
                table.withdraw(asked)
                left = asked
            except InvalidPipeline:
                refused = True
        assert table.rows() == table.expected()
    assert refused <= bool(table.foreign)


def test_a_commit_of_another_writer_behind_the_first_such_epoch_is_never_lost(tmp_path: Path) -> None:
    table = Table(tmp_path / "t")
    table.publish(2)
    table.write_foreign()
    table.publish(2)
    assert table.withdraw([(3, 4)]) == 2, "it came before"
    assert table.rows() == table.expected()
    table.publish(2)
    table.write_foreign()
    with pytest.raises(InvalidPipeline, match=r"version \d+, WRITE\) behind output of epochs 5 to 6, which begins at"):
        table.withdraw([(5, 6)])
    assert table.rows() == table.expected()


def test_a_driver_that_slept_commits_no_epoch_that_was_left(tmp_path: Path) -> None:
    """It had moved its files, and not committed them, when the job went back."""
    table = Table(tmp_path / "t")
    table.publish(2)
    sink, spec = table.opened()
    output, reached = table.staged(3), faults.reach

    def reach(point: str) -> None:
        if point == "delta-moved":
            faults.reach = reached
            table.withdraw([(2, 3)])

    faults.reach = reach
    try:
        sink.publish(spec, output, None)
    finally:
        faults.reach = reached
    assert table.rows() == table.expected() == [(1, 1), (11, 1)]


@pytest.mark.parametrize("point", ["delta-before-commit", "delta-before-restore"])
def test_a_crash_in_between_is_repaired_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    table = Table(tmp_path / "t")
    table.publish(2)
    before = table.rows()

    def reach(name: str) -> None:
        if name == point:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(faults, "reach", reach)
        with pytest.raises(KeyboardInterrupt):
            table.withdraw([(2, 3)])
    assert table.rows() == before
    table.withdraw([(2, 3)])
    assert table.rows() == table.expected()


def test_a_table_without_the_jobs_rows_is_left_alone_and_a_driver_that_slept_too(tmp_path: Path) -> None:
    table = Table(tmp_path / "t")
    table.write_foreign()
    late = table.staged(2)
    assert table.withdraw([(1, 3)]) == 0
    sink, spec = table.opened()
    sink.publish(spec, late, None)
    assert table.rows() == table.expected()


def test_a_log_that_does_not_reach_back_is_refused(tmp_path: Path) -> None:
    table = Table(tmp_path / "t")
    table.publish(3)
    DeltaTable(str(table.place)).create_checkpoint()
    table.publish(2)
    for version in (0, 1, 2):
        (table.place / f"_delta_log/{version:020d}.json").unlink()
    before = table.rows()
    with pytest.raises(InvalidPipeline, match="does not reach back to the output of epochs 1 to 5"):
        table.withdraw([(1, 5)])
    assert table.rows() == before
    assert table.withdraw([(4, 5)]) == 2
    assert table.rows() == table.expected()


def test_a_version_whose_files_were_vacuumed_is_refused(tmp_path: Path) -> None:
    table = Table(tmp_path / "t", is_merged=True)
    table.publish(KEYS)
    table.publish(1)
    DeltaTable(str(table.place)).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    before = table.rows()
    with pytest.raises(InvalidPipeline, match="cannot be restored to version 3"):
        table.withdraw([(4, 4)])
    assert table.rows() == before


def test_a_sink_that_cannot_take_output_out_says_so_when_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidConfiguration, match=r"KafkaSink: on_rollback must be continue or refuse \(got 'replace'"
    ):
        KafkaSink("totals", bootstrap_servers="broker:9092", on_rollback="replace")
    with pytest.raises(InvalidConfiguration, match="DeltaSink: on_rollback must be continue or refuse or replace"):
        DeltaSink(str(tmp_path), on_rollback="undo")  # type: ignore[arg-type]
