"""Output exactly once: staged, named by a manifest, published by moves that may be repeated."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from maintenance_root import Job
from model import SECRET

from state_runtime import JobContext, StartFrom
from state_runtime.base.actor import Actor
from state_runtime.base.errors import InvalidConfiguration, JobNotFound, MissingFile, StoreUnavailable, UserCodeError
from state_runtime.driver.rollback import execute_rollback, plan_rollback
from state_runtime.driver.start_position import StartPosition
from state_runtime.pipeline import sinks, staging
from state_runtime.pipeline.commit_log import SinkCommit
from state_runtime.pipeline.sinks import ParquetSink, foreach_epoch
from state_runtime.pipeline.staged import StagedFiles, staged_outputs
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.document import decode_document, encode_document
from state_runtime.snapshot.manifest import Manifest, StagedFile, StagedOutput
from state_runtime.snapshot.paths import manifest_path, named_for, segment_path
from state_runtime.snapshot.term_files import claim_term
from state_runtime.store import LocalStore, open_store

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])


def batch(*rows: tuple[str, int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"k": k, "n": n} for k, n in rows], schema=SCHEMA)


@pytest.fixture
def sink(tmp_path: Path) -> ParquetSink:
    return ParquetSink(str(tmp_path / "out"))


@pytest.fixture
def spec(sink: ParquetSink) -> SinkSpec:
    return sink.spec("job", "0123456789abcdef", "legs", ("unused", {}))


def stage(spec: SinkSpec, epoch: int, *rows: list[tuple[str, int]], term: int = 1) -> StagedOutput:
    """One task per list of rows."""
    acknowledged = []
    for shard, some in enumerate(rows):
        task = spec.open(term, epoch, shard, f"{shard:016x}")
        task.write(batch(*some))
        acknowledged.append(task.finish())
    return staged_outputs(acknowledged, [spec.name], epoch)[0]


def visible(tmp_path: Path) -> list[tuple[str, int, int]]:
    """What a reader sees that skips names beginning with `_`, as Spark and pyarrow do."""
    folder = tmp_path / "out"
    if not any(p.suffix == ".parquet" and not p.name.startswith("_") for p in folder.glob("*")):
        return []
    table = ds.dataset(folder, format="parquet", exclude_invalid_files=False).to_table()
    return sorted((row["k"], row["n"], row["epoch"]) for row in table.to_pylist())


def everything(tmp_path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


def test_staged_output_is_invisible_and_published_output_is_not(
    tmp_path: Path, sink: ParquetSink, spec: SinkSpec
) -> None:
    """A reader sees an epoch after its manifest, never before."""
    output = stage(spec, 5, [("a", 1)], [("b", 2), ("c", 3)])
    assert visible(tmp_path) == []
    sink.publish(spec, output, None)
    assert visible(tmp_path) == [("a", 1, 5), ("b", 2, 5), ("c", 3, 5)]
    commits = list((tmp_path / "out/_stillstate/commits/job-01234567-legs").iterdir())
    assert [c.name for c in commits] == [f"{5:020d}.json"]
    assert json.loads(commits[0].read_text().splitlines()[1])["epoch"] == 5


def test_a_sink_knows_the_newest_epoch_that_its_job_has_published(
    tmp_path: Path, sink: ParquetSink, spec: SinkSpec
) -> None:
    """A job whose root was restored from a backup goes on above it; another job's epochs in the folder count for nothing."""
    assert sink.newest_published_epoch(spec) == 0
    for epoch in (5, 12):
        sink.publish(spec, stage(spec, epoch, [("a", epoch)]), None)
    other = sink.spec("job", "another-job", "legs", ("unused", {}))
    sink.publish(other, stage(other, 40, [("a", 1)]), None)
    assert sink.newest_published_epoch(spec) == 12


def test_a_task_without_rows_stages_nothing(tmp_path: Path, sink: ParquetSink, spec: SinkSpec) -> None:
    """Empty files cost readers time, and an epoch without output leaves no trace."""
    output = stage(spec, 1, [], [])
    assert output.files == ()
    sink.publish(spec, output, None)
    assert everything(tmp_path) == {}


class Stop(Exception):
    """The process ends here."""


def publish_and_stop(monkeypatch: pytest.MonkeyPatch, sink: ParquetSink, spec: SinkSpec, output: Any, at: int) -> bool:
    """Publish, but end before the `at`-th call of the store that changes something; whether it ended early."""
    calls = [0]

    def stopping(method: Any) -> Any:
        def call(self: LocalStore, *args: Any) -> Any:
            calls[0] += 1
            if calls[0] == at:
                raise Stop
            return method(self, *args)

        return call

    with monkeypatch.context() as patch:
        for name in ("move", "create", "put", "delete"):
            patch.setattr(LocalStore, name, stopping(getattr(LocalStore, name)))
        try:
            sink.publish(spec, output, None)
        except Stop:
            return True
    return False


def test_publishing_is_repeated_after_a_crash_at_any_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: ParquetSink, spec: SinkSpec
) -> None:
    """Between any two moves, and before the commit entry: the next run ends in the same place, once and twice."""
    stopped = True
    at = 0
    while stopped:
        at += 1
        output = stage(spec, at, *[[(f"row {at}", shard)] for shard in range(4)])
        stopped = publish_and_stop(monkeypatch, sink, spec, output, at)
        sink.publish(spec, output, None)
        done = everything(tmp_path)
        sink.publish(spec, output, None)
        assert everything(tmp_path) == done
        assert [row for row in visible(tmp_path) if row[2] == at] == [(f"row {at}", shard, at) for shard in range(4)]
    assert at == 6, "four moves and one commit entry"


def test_an_attempt_that_no_manifest_names_is_never_published(
    tmp_path: Path, sink: ParquetSink, spec: SinkSpec
) -> None:
    """A speculative twin stages the same rows under another name."""
    stage(spec, 3, [("a", 1)])
    twin = spec.open(1, 3, 0, "f" * 16)
    twin.write(batch(("a", 1)))
    output = staged_outputs([twin.finish()], [spec.name], 3)[0]
    sink.publish(spec, output, None)
    assert visible(tmp_path) == [("a", 1, 3)]


def test_output_that_is_gone_is_an_error_that_names_it(tmp_path: Path, sink: ParquetSink, spec: SinkSpec) -> None:
    """Someone emptied the folder between stage and publish: no silent loss."""
    output = stage(spec, 1, [("a", 1)])
    (tmp_path / "out" / output.files[0].staged).unlink()
    with pytest.raises(MissingFile, match=r"sink 'legs': the snapshot names .* Restore the file"):
        sink.publish(spec, output, None)


def test_two_jobs_with_one_identity_in_one_folder_are_found(sink: ParquetSink, spec: SinkSpec) -> None:
    """A copied job root that writes to the same output folder."""
    sink.publish(spec, stage(spec, 1, [("a", 1)]), None)
    other = spec.open(2, 1, 0, "e" * 16)
    other.write(batch(("b", 2)))
    with pytest.raises(MissingFile, match="two jobs with one identity write here"):
        sink.publish(spec, staged_outputs([other.finish()], [spec.name], 1)[0], None)


def test_abandoned_files_go_named_ones_and_the_current_terms_stay(tmp_path: Path, spec: SinkSpec) -> None:
    """What fenced runs staged can never be named again, except what the newest manifest names already."""
    staged = {term: stage(spec, 10 + term, [("a", term)], [("b", term)], term=term).files for term in (1, 2, 3, 4)}
    foreign = tmp_path / "out" / spec.staging_prefix / "not-a-term"
    foreign.mkdir()
    (foreign / "x").write_text("somebody's")
    other_sink = tmp_path / "out" / "_stillstate/staging/other-job/00000000000000000001"
    other_sink.mkdir(parents=True)
    (other_sink / "y").write_text("another job's")
    named = {staged[2][0].staged}
    for _ in range(2):
        spec.remove_abandoned(3, named)
        left = {path[len("out/") :] for path in everything(tmp_path)}
        assert left == {
            *named,
            *(f.staged for f in (*staged[3], *staged[4])),
            f"{spec.staging_prefix}/not-a-term/x",
            "_stillstate/staging/other-job/00000000000000000001/y",
        }


def test_large_output_is_cut_into_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sink: ParquetSink, spec: SinkSpec
) -> None:
    """A task holds at most one file in memory."""
    monkeypatch.setattr(staging, "_FILE_BYTES_MAX", 1)
    task = spec.open(1, 1, 0, "0" * 16)
    for number in range(3):
        task.write(batch((f"r{number}", number)))
    files = task.finish()
    assert [f.rows for f in files.files] == [1, 1, 1]
    assert len({f.final for f in files.files}) == 3
    sink.publish(spec, staged_outputs([files], [spec.name], 1)[0], None)
    assert visible(tmp_path) == [("r0", 0, 1), ("r1", 1, 1), ("r2", 2, 1)]


def test_the_epoch_column_can_be_left_out(tmp_path: Path) -> None:
    """For readers that want exactly their own columns."""
    sink = ParquetSink(str(tmp_path / "out"), epoch_column=None)
    spec = sink.spec("job", "0" * 32, "legs", ("", {}))
    sink.publish(spec, stage(spec, 1, [("a", 1)]), None)
    assert ds.dataset(tmp_path / "out", format="parquet").to_table().schema.names == ["k", "n"]


def test_outputs_are_grouped_by_sink_even_without_files() -> None:
    """Each sink of an epoch has an entry, so that publishing knows its epoch."""
    file = StagedFile("a", "b", 1, 1)
    outputs = staged_outputs([StagedFiles("two", (file,)), StagedFiles("two", (file,))], ["one", "two"], 9)
    assert outputs == (StagedOutput("one", 9, ()), StagedOutput("two", 9, (file, file)))


def test_secrets_of_a_sink_are_in_no_repr(tmp_path: Path) -> None:
    """Specs travel to tasks and into tracebacks."""
    sink = ParquetSink("s3://bucket/out", storage_options={"key": "k", "secret": SECRET})
    spec = sink.spec("job", "0" * 32, "legs", ("s3://bucket", {"secret": SECRET}))
    epoch_spec = foreach_epoch(print).spec("job", "0" * 32, "calls", ("s3://bucket", {"secret": SECRET}))
    for shown in (repr(sink), str(sink), repr(spec), repr(epoch_spec)):
        assert SECRET not in shown


def test_a_sink_needs_a_place_and_a_function() -> None:
    """Found when the job is built."""
    with pytest.raises(InvalidConfiguration, match="give it a path or a URL"):
        ParquetSink("")
    with pytest.raises(InvalidConfiguration, match="needs a function"):
        foreach_epoch(None)  # type: ignore[arg-type]


def test_a_function_sink_stages_below_the_job_root_and_settles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a repetition delivers must be what the first call got; it goes when no restart needs it any more."""
    calls: list[tuple[Any, int]] = []
    sink = foreach_epoch(lambda frame, epoch: calls.append((frame, epoch)))
    spec = sink.spec("job", "0" * 32, "calls", (str(tmp_path / "store/job"), {}))
    output = stage(spec, 4, [("a", 1)])
    monkeypatch.setattr(sinks, "read_staged", lambda spark, spec, output: [f.staged for f in output.files])
    spark: Any = object()
    sink.publish(spec, output, spark)
    sink.publish(spec, output, spark)
    assert calls == [([output.files[0].staged], 4)] * 2
    assert list(everything(tmp_path)) == [f"store/job/{output.files[0].staged}"]
    sink.settle(spec, output)
    sink.settle(spec, output)
    assert everything(tmp_path) == {}


def test_an_epoch_without_rows_is_staged_for_whoever_wants_to_be_told(tmp_path: Path) -> None:
    """A file without rows, with the columns of the stream: what publishes and repeats it is as for any other."""
    url, schema = str(tmp_path / "job"), pa.schema([("k", pa.string()), ("n", pa.int64())])
    spec = foreach_epoch(print, empty_epochs=True).spec("job", "0" * 32, "calls", (url, {}))
    assert spec.empty_epochs
    (file,) = spec.stage_nothing(3, 7, "a" * 16, schema).files
    assert file.rows == 0
    assert pq.read_table(tmp_path / "job" / file.staged).schema.equals(schema)
    assert not foreach_epoch(print).spec("job", "0" * 32, "calls", (url, {})).empty_epochs


def gone_back(job: Job, target: Manifest, way: str) -> Manifest:
    """Go back to a snapshot, by `rollback` or by a start from it; returns what is the newest then."""
    catalog = Catalog.of_root(job.root, job.clock)
    if way == "rollback":
        plan = plan_rollback(catalog, f"@{target.snapshot_id}", takeover=True)
        execute_rollback(catalog, plan, Actor(job.clock, job.ids, "h", 1))
    else:
        beginning = StartPosition(catalog, from_snapshot=target.snapshot_id, clock=job.clock, ids=job.ids)
        beginning.look()
        beginning.open(lambda info: target, host="h", pid=1)
    found = catalog.latest()
    assert found is not None
    return found


@pytest.mark.parametrize("newest", ["a checkpoint", "a checkpoint that was settled in part", "a fencing snapshot"])
@pytest.mark.parametrize("way", ["rollback", "start"])
def test_going_back_names_no_output_for_publishing_that_was_published_and_removed(
    tmp_path: Path, newest: str, way: str
) -> None:
    """The newest manifest cannot be read, so whether the output of the one before was published is told by its staged
    files: a later checkpoint removes them. Named all the same, no start could deliver them, and the job was lost. Below
    a fencing snapshot they are there, and are delivered."""
    job = Job(open_store(str(tmp_path)))
    sink = foreach_epoch(print)
    spec = sink.spec(job.name, job.committer.info.uid, "calls", (str(tmp_path / job.name), {}))

    output = stage(spec, 2, [("a", 1)], [("b", 1)])
    target = job.committer.commit(replace(job.committer.last, kind="checkpoint", epoch=2, outputs=(output,)))
    if newest == "a fencing snapshot":
        job.start()
        assert job.committer.last.outputs == target.outputs
    else:
        job.committer.commit(replace(target, epoch=3, outputs=(stage(spec, 3, [("a", 2)]),)))
        sink.settle(spec, output if newest == "a checkpoint" else replace(output, files=output.files[1:]))
    job.root.put(manifest_path(job.committer.last.snapshot_id), b"")
    found = gone_back(job, target, way)
    assert found.outputs == (target.outputs if newest == "a fencing snapshot" else ())
    assert all(job.root.exists(file.staged) for output in found.outputs for file in output.files)
    for output in found.outputs:
        sink.publish_again(spec, output, spark=None)


@pytest.mark.parametrize("way", ["rollback", "start"])
def test_a_staged_file_that_was_lost_is_never_taken_as_delivered(tmp_path: Path, way: str) -> None:
    """The newest manifest cannot be read, and may be the fencing snapshot of a run that delivered nothing. So a staged
    file of the one before that is not there was not removed by a checkpoint for certain: to go on would lose it."""
    job = Job(open_store(str(tmp_path)))
    sink = foreach_epoch(print)
    spec = sink.spec(job.name, job.committer.info.uid, "calls", (str(tmp_path / job.name), {}))
    output = stage(spec, 2, [("a", 1)], [("b", 1)])
    target = job.committer.commit(replace(job.committer.last, kind="checkpoint", epoch=2, outputs=(output,)))
    job.start()
    job.root.put(manifest_path(job.committer.last.snapshot_id), b"")
    job.root.delete(output.files[1].staged)
    found = gone_back(job, target, way)
    assert found.outputs == target.outputs
    with pytest.raises(MissingFile, match=r"epoch 2.*--from-snapshot"):
        sink.publish_again(spec, output, spark=None)


def test_a_segment_of_a_later_epoch_shows_that_output_was_delivered(tmp_path: Path) -> None:
    """Starts that ended before their first snapshot have used up terms, so the numbers alone no longer tell whether
    the newest snapshot, which cannot be read, is a checkpoint. An epoch begins only after what was before is delivered.
    In a folder that was copied without its terms the numbers tell nothing either."""
    job = Job(open_store(str(tmp_path)))
    sink = foreach_epoch(print)
    spec = sink.spec(job.name, job.committer.info.uid, "calls", (str(tmp_path / job.name), {}))
    output, term = stage(spec, 2, [("a", 1)]), job.committer.term.term
    target = job.committer.commit(replace(job.committer.last, kind="checkpoint", epoch=2, outputs=(output,)))
    newest = job.committer.commit(replace(target, epoch=3, outputs=()))
    sink.settle(spec, output)
    job.root.put(manifest_path(newest.snapshot_id), b"")

    def pending() -> tuple[StagedOutput, ...]:
        found = Catalog.of_root(job.root, job.clock).latest_to_go_back_from()
        assert found is not None
        return found.outputs

    assert pending() == ()
    claim_term(job.root, actor=Actor(job.clock, job.ids, "h", 1))
    assert pending() == (output,)
    job.root.put(segment_path(term, f"{named_for(target.snapshot_id, 'direct-calls')}-{job.ids.uid()}.seg"), b"")
    assert pending() == (output,)
    job.root.put(segment_path(term, f"{newest.snapshot_id:020d}-{job.ids.uid()}.seg"), b"")
    assert pending() == ()

    for folder in ("terms", "changelog"):
        for found in [*job.root.list_objects(folder)]:
            job.root.delete(found.path)
    assert pending() == (output,)


def test_a_staged_file_that_is_lost_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    """Of output that may not have been delivered: to go on without it would lose it."""
    sink = foreach_epoch(print)
    spec = sink.spec("job", "0" * 32, "calls", (str(tmp_path), {}))
    output = StagedOutput("calls", 3, (StagedFile("outputs/calls/1/gone.parquet", "", 10, 1),))
    with pytest.raises(MissingFile, match=r"gone\.parquet.*epoch 3.*--from-snapshot"):
        sink.publish_again(spec, output, spark=None)


def test_a_job_s_code_can_tell_roots_apart_that_count_the_same_epochs(tmp_path: Path) -> None:
    """Where the epoch is a transaction's number: a table that knows only that drops the rows of a root made anew."""
    context = JobContext("job", str(tmp_path))
    with pytest.raises(JobNotFound):
        context.root_id()
    job = Job(open_store(str(tmp_path)), prefix=5)
    first = context.root_id()
    assert first == context.job().root_id() == job.catalog.job_info().uid
    job.start()
    assert context.root_id() == first
    shutil.rmtree(tmp_path / "job")
    Job(open_store(str(tmp_path)), prefix=6)
    assert context.root_id() != first
    start = StartFrom(str(tmp_path / "job"))
    fork = StartPosition(Catalog(open_store(str(tmp_path)), "fork"), start_from=start, clock=job.clock, ids=job.ids)
    fork.look()
    fork.open(lambda info: job.committer.last, host="h", pid=1)
    assert len({first, context.root_id(), JobContext("fork", str(tmp_path)).root_id()}) == 3


def test_an_error_of_the_users_function_is_theirs_and_says_what_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is durable; the same rows come again with the same id."""

    def fail(frame: Any, epoch: int) -> None:
        raise KeyError("no such table")

    sink = foreach_epoch(fail)
    spec = sink.spec("job", "0" * 32, "calls", (str(tmp_path), {}))
    output = stage(spec, 4, [("a", 1)])
    monkeypatch.setattr(sinks, "read_staged", lambda spark, spec, output: None)
    spark: Any = object()
    with pytest.raises(UserCodeError, match=r"KeyError.*epoch 4\. The checkpoint is durable") as caught:
        sink.publish(spec, output, spark)
    assert isinstance(caught.value.__cause__, KeyError)
    assert everything(tmp_path), "nothing was removed"


def test_names_of_files_are_made_of_snapshot_shard_and_attempt(spec: SinkSpec) -> None:
    """So that they sort by epoch, and no two attempts ever meet."""
    output = stage(spec, 12, [("a", 1)], [("b", 2)])
    assert [f.final for f in output.files] == [
        f"part-job-01234567-legs-{12:020d}-{shard:05d}-{shard:016x}-000.parquet" for shard in (0, 1)
    ]


# --- published is published --------------------------------------------------------------------------------------------


def refused(*_: Any) -> None:
    raise AssertionError("a file is moved that was published")


def test_what_the_commit_log_has_is_not_published_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: ParquetSink, spec: SinkSpec
) -> None:
    """Readers have compacted or archived the files since: nothing is moved, and nothing is missing."""
    output = stage(spec, 7, [("a", 1)], [("b", 2)])
    sink.publish_again(spec, output, None)
    for file in output.files:
        (tmp_path / "out" / file.final).unlink()
    monkeypatch.setattr(LocalStore, "move", refused)
    sink.publish_again(spec, output, None)
    assert visible(tmp_path) == []


def test_a_slow_run_whose_output_was_published_and_taken_away_loses_nothing(
    tmp_path: Path, sink: ParquetSink, spec: SinkSpec
) -> None:
    """It slept between manifest and publication; the run that took over has published, and a reader took the files."""
    output = stage(spec, 7, [("a", 1)])
    sink.publish(spec, output, None)
    (tmp_path / "out" / output.files[0].final).unlink()
    sink.publish(spec, output, None)


@pytest.mark.parametrize("again", [False, True])
def test_an_entry_that_another_version_wrote_is_the_same_entry(
    tmp_path: Path, sink: ParquetSink, spec: SinkSpec, again: bool
) -> None:
    """Its header has another format number: what counts is which files it names."""
    output = stage(spec, 7, [("a", 1)])
    sink.publish(spec, output, None)
    (path,) = (tmp_path / "out/_stillstate/commits").glob("*/*.json")
    entry = decode_document("sink-commit", SinkCommit, path.read_bytes(), "here")
    path.write_bytes(encode_document("sink-commit", entry, 3))
    (sink.publish_again if again else sink.publish)(spec, output, None)
    assert visible(tmp_path) == [("a", 1, 7)]


def test_files_are_published_several_at_a_time_and_never_more_than_sixteen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: ParquetSink, spec: SinkSpec
) -> None:
    """On an object store a file is three requests; 200 of them one after the other hold the next epoch up."""
    output = stage(spec, 1, *[[(f"row {n}", n)] for n in range(40)])
    together, lock = threading.Barrier(16), threading.Lock()
    under_way, most, begun = 0, 0, 0
    move = LocalStore.move

    def watched(self: LocalStore, source: str, target: str) -> None:
        nonlocal under_way, most, begun
        with lock:
            under_way, begun = under_way + 1, begun + 1
            most, is_first = max(most, under_way), begun <= 16
        if is_first:
            together.wait(timeout=30)
        move(self, source, target)
        with lock:
            under_way -= 1

    monkeypatch.setattr(LocalStore, "move", watched)
    sink.publish(spec, output, None)
    assert most == 16
    assert len(visible(tmp_path)) == 40


def test_nothing_is_moved_any_more_once_publishing_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: ParquetSink, spec: SinkSpec
) -> None:
    """The run ends with that error, and the next one publishes: none of the moves may come after that. No entry is written."""
    output = stage(spec, 1, *[[(f"row {n}", n)] for n in range(40)])
    lock, moving = threading.Lock(), 0
    move = LocalStore.move

    def failing(self: LocalStore, source: str, target: str) -> None:
        nonlocal moving
        with lock:
            moving += 1
        try:
            if source == output.files[3].staged:
                raise StoreUnavailable("no answer")
            move(self, source, target)
        finally:
            with lock:
                moving -= 1

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "move", failing)
        with pytest.raises(StoreUnavailable, match="no answer"):
            sink.publish(spec, output, None)
        assert moving == 0
    before = everything(tmp_path)
    assert not list((tmp_path / "out/_stillstate").glob("commits/*/*"))
    assert everything(tmp_path) == before
    sink.publish_again(spec, output, None)
    assert len(visible(tmp_path)) == 40


def test_what_was_not_begun_when_publishing_failed_is_not_begun_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: ParquetSink, spec: SinkSpec
) -> None:
    """A store that is away would be asked for every file, and the run would wait for each of the answers."""
    output = stage(spec, 1, *[[(f"row {n}", n)] for n in range(40)])
    begun: list[str] = []
    has_ended = threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            has_ended.set()
            super().shutdown(wait=wait)

    def failing(self: LocalStore, source: str, target: str) -> None:
        begun.append(source)
        if source != output.files[0].staged:
            has_ended.wait()
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(sinks, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(LocalStore, "move", failing)
    with pytest.raises(StoreUnavailable, match="no answer"):
        sink.publish(spec, output, None)
    assert len(begun) <= 17


def test_staged_files_of_terms_before_the_owners_are_not_removed(tmp_path: Path, spec: SinkSpec) -> None:
    """They may be those of the root that this one is a copy of."""
    staged = {term: stage(spec, 10 + term, [("a", term)], term=term).files for term in (1, 2, 3)}
    spec.remove_abandoned(3, set(), since_term=2)
    assert {path[len("out/") :] for path in everything(tmp_path)} == {f.staged for f in (*staged[1], *staged[3])}
