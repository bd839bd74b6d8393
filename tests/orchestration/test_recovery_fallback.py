"""A damaged newest snapshot: what is said, what the policy allows, and the click by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import dagster as dg
import pytest
from dagster_world import FakeLauncher, World
from maintenance_root import Job

from state_runtime.base.actor import Actor
from state_runtime.base.errors import StoreUnavailable
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.maintenance.copy.make_savepoint import SavepointWork, savepoint_of_stopped
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.fencing import open_run
from state_runtime.snapshot.manifest import Manifest, StagedFile, StagedOutput
from state_runtime.snapshot.paths import manifest_path
from state_runtime.snapshot.term_files import write_status
from state_runtime.store import open_store
from stillstate.assets.mount import Mount
from stillstate.orchestration.config.start_options import AS_IT_IS, StartOptions
from stillstate.orchestration.launchers import FirstCheckpoint, Launched, LaunchFailed
from stillstate.orchestration.recovery.fallback import Damage, FallbackPolicy, decide_fallback, look_for_damage

FOUND = Damage(newest=1241, where="segment X", restorable=1238, looked_at=4, epochs=3, published=True)


@pytest.mark.parametrize(
    ("policy", "published", "goes_back"),
    [
        ("never", False, False),
        ("same_output", False, True),
        ("same_output", True, False),
        ("same_output", None, False),
        ("older", True, True),
        ("older", None, True),
    ],
)
def test_a_job_goes_back_only_as_far_as_its_policy_allows(
    policy: FallbackPolicy, published: bool | None, goes_back: bool
) -> None:
    chosen = decide_fallback(replace(FOUND, published=published), policy, "recover_flights")
    assert (chosen.back_to == 1238, chosen.is_refused) == (goes_back, not goes_back)


def test_the_choice_is_explained() -> None:
    said = decide_fallback(FOUND, "never", "recover_flights").explained
    assert "newest 1241 damaged in segment X; 1238 restorable; loses 3 epochs" in said
    assert "their output was published" in said
    assert "launch recover_flights with from_snapshot: 1238" in said
    one = decide_fallback(replace(FOUND, epochs=1), "never", "recover_flights").explained
    assert "loses 1 epoch, which is read again; its output was published" in one


def test_without_a_sound_snapshot_no_policy_goes_back() -> None:
    chosen = decide_fallback(replace(FOUND, restorable=None), "older", "recover_flights")
    assert (chosen.back_to, chosen.is_refused) == (None, True)
    assert "not one of the 4 newest" in chosen.explained


def test_a_sound_newest_snapshot_is_started_from() -> None:
    """The error was of one read: a restart reads again."""
    assert decide_fallback(Damage(newest=7), "never", "recover_flights").is_refused is False


# -- what is found --------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Snapshots 1 (of the start) to 5, with real segments, where `write_config` puts the store of the job `job`."""
    made = Job(open_store(str(tmp_path / "state")))
    made.checkpoints(4)
    made.beat()
    return made


def found(job: Job) -> Damage:
    return look_for_damage(Catalog(job.store, "job", job.clock), job.clock, SYSTEM_IDS)


def spoil(job: Job, path: str) -> None:
    body = bytearray(job.root.read(path, 1 << 20))
    body[len(body) // 3] ^= 1
    job.root.delete(path)
    job.root.put(path, bytes(body))


def newest_segment(manifest: Manifest) -> str:
    return manifest.segments[-1].path


def test_a_sound_root_has_no_damage(job: Job) -> None:
    assert found(job) == Damage(newest=5)


def test_the_newest_snapshot_below_the_damage_is_found_with_what_it_loses(job: Job) -> None:
    segment = newest_segment(job.catalog.manifest(4))
    spoil(job, segment)
    damage = found(job)
    assert (damage.newest, damage.restorable, damage.looked_at) == (5, 3, 3)
    assert damage.where.startswith(segment)
    assert damage.epochs == 2
    assert damage.published is False


def test_output_of_lost_epochs_counts_as_published(job: Job) -> None:
    staged = StagedOutput("legs", 9, (StagedFile("a", "b", 10, 1),))
    job.committer.commit(replace(job.committer.last, kind="checkpoint", outputs=(staged,)))
    job.rows[6] = job.rows[5]
    job.checkpoint()
    spoil(job, newest_segment(job.catalog.manifest(7)))
    assert found(job).published is False, "snapshot 6 is sound, and its output stays"
    spoil(job, newest_segment(job.catalog.manifest(6)))
    assert (found(job).restorable, found(job).published) == (4, True)


def saved(job: Job, name: str, *, independent: bool) -> str:
    """A savepoint of the newest snapshot; its folder below the root."""
    job.clock.advance_s(1)
    job.beat("stopped")
    work = SavepointWork(job.root, "h:1", job.clock, job.ids, wait=lambda seconds: False)
    record = savepoint_of_stopped(work, name, independent=independent)
    assert record.state == "COMPLETED", record.message
    return f"savepoints/{name}/"


def overwrite(job: Job, path: str) -> None:
    """One byte of a file, also in what has the same file by a link."""
    with (Path(job.root.url) / path).open("r+b") as file:
        file.seek(20)
        byte = file.read(1)
        file.seek(20)
        file.write(bytes([byte[0] ^ 1]))


def test_every_snapshot_is_a_candidate_the_newest_epoch_first(job: Job) -> None:
    """Savepoints too: with bytes of its own it serves where the root is damaged, and nothing is published twice. What
    is newer and was not taken is told with the reason."""
    saved(job, "older", independent=True)
    job.checkpoint()
    saved(job, "own", independent=True)
    saved(job, "linked", independent=False)
    saved(job, "1234", independent=True)
    overwrite(job, newest_segment(job.catalog.manifest(6)))
    damage = found(job)
    assert (damage.restorable, damage.savepoint, damage.epochs, damage.published) == (6, "own", 0, False)
    passed = [text.partition(":")[0] for text in damage.passed_over]
    assert sorted(passed) == ["savepoint 1234 (6)", "savepoint linked (6)"]
    said = decide_fallback(damage, "same_output", "recover_job")
    assert said.back_to == "own"
    assert "6 (savepoint own) restorable; loses no epoch; not taken: savepoint" in said.explained
    assert "from_savepoint: own" in decide_fallback(damage, "never", "recover_job").explained
    overwrite(job, f"savepoints/own/{newest_segment(job.catalog.manifest(6))}")
    damage = found(job)
    assert (damage.restorable, damage.savepoint) == (5, ""), "the root's own before a savepoint of the same snapshot"
    overwrite(job, newest_segment(job.catalog.manifest(5)))
    damage = found(job)
    assert (damage.restorable, damage.savepoint, damage.epochs) == (5, "older", 1)


def test_a_savepoint_of_a_manifest_that_cannot_be_read_may_lack_output(job: Job) -> None:
    """The snapshot is whole there, but a savepoint does not say what its job had still to publish."""
    saved(job, "own", independent=True)
    spoil(job, manifest_path(5))
    damage = found(job)
    assert (damage.restorable, damage.savepoint, damage.epochs, damage.published) == (5, "own", 0, None)
    assert decide_fallback(damage, "same_output", "recover_job").is_refused
    assert "whether its output was published is unknown" in decide_fallback(damage, "older", "").explained


def test_what_the_job_was_taken_back_from_is_no_candidate(job: Job) -> None:
    """Somebody decided against those snapshots; they are no past of the newest one."""
    info = job.catalog.job_info()
    job.committer = open_run(job.catalog, info, job.committer.last, actor=Actor(job.clock, job.ids, "h", 1), back_to=3)
    job.rows[6] = job.rows[3]
    job.checkpoint()
    spoil(job, newest_segment(job.catalog.manifest(7)))
    spoil(job, manifest_path(6))
    damage = found(job)
    assert damage.restorable == 3
    assert [text[:4] for text in damage.passed_over] == ["6: d", "5: 7", "4: 7"]


def test_of_a_manifest_that_cannot_be_read_nobody_knows_what_was_published(job: Job) -> None:
    spoil(job, manifest_path(5))
    damage = found(job)
    assert (damage.restorable, damage.epochs, damage.published) == (4, None, None)


def test_a_store_that_is_away_is_no_damage(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a black-out would send every job back to older snapshots."""
    segment = newest_segment(job.catalog.manifest(5))
    store = type(job.root)
    whole = store.get_file

    def away(self: object, path: str, *more: object, **named: object) -> object:
        if path == segment:
            raise StoreUnavailable("it does not answer")
        return whole(self, path, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "get_file", away)
    with pytest.raises(StoreUnavailable):
        found(job)


# -- the run --------------------------------------------------------------------------------------------------------


def recovered(here: World, job: Job, **config: object) -> tuple[dg.ExecuteInProcessResult, FakeLauncher]:
    here.clock.at_ms = job.clock.at_ms + 3_600_000
    launcher = here.launchers["job"] = FakeLauncher()
    launcher.start = partial(start, launcher)  # type: ignore[method-assign]
    done = here.defs.resolve_job_def("recover_job").execute_in_process(
        run_config={"ops": {"recover_job_driver": {"config": config}}}, instance=here.instance, raise_on_error=False
    )
    return done, launcher


def start(launcher: FakeLauncher, options: StartOptions = AS_IT_IS, *, cause: str = "") -> Launched:
    launcher.begins.append(options.begin.from_snapshot)
    launcher.causes.append(cause)
    return Launched(job="job", term=2, state="running", pid=7, host="h", log="/logs/x.log")


def said(done: dg.ExecuteInProcessResult) -> str:
    return " ".join(
        str(event.step_failure_data.user_failure_data) for event in done.all_events if event.is_step_failure
    )


def test_a_run_of_a_damaged_job_explains_and_starts_nothing_by_default(world: Callable[..., World], job: Job) -> None:
    spoil(job, newest_segment(job.catalog.manifest(5)))
    spoil(job, manifest_path(5))
    done, launcher = recovered(world("job"), job)
    assert not done.success
    assert "4 restorable" in said(done)
    assert "from_snapshot: 4" in said(done)
    assert launcher.begins == []


def test_a_run_goes_back_as_the_policy_says_and_the_new_run_says_why(world: Callable[..., World], job: Job) -> None:
    spoil(job, manifest_path(5))
    done, launcher = recovered(world("job", extra="recovery: {fallback: older}"), job)
    assert done.success
    assert launcher.begins == [4]
    assert "newest 5 damaged" in launcher.causes[0]


def test_a_run_goes_back_to_a_savepoint_and_says_so(world: Callable[..., World], job: Job) -> None:
    saved(job, "own", independent=True)
    job.beat()
    spoil(job, manifest_path(5))
    done, launcher = recovered(world("job", extra="recovery: {fallback: older}"), job)
    assert done.success
    assert launcher.begins == ["own"]
    assert "5 (savepoint own) restorable" in launcher.causes[0]
    shown = done.output_for_node("recover_job_driver")
    assert "savepoint own" in shown["explained"]
    assert shown["restored_from"].endswith("/job/savepoints/own")


def test_a_person_goes_back_with_one_click(world: Callable[..., World], job: Job) -> None:
    done, launcher = recovered(world("job"), job, from_snapshot=3)
    assert done.success
    assert launcher.begins == [3]
    saved(job, "own", independent=True)
    done, launcher = recovered(world("job"), job, from_savepoint="own")
    assert done.success
    assert launcher.begins == ["own"]


def test_a_click_does_not_take_a_job_back_that_runs(world: Callable[..., World], job: Job) -> None:
    here = world("job")
    here.clock.at_ms = job.clock.at_ms
    launcher = here.launchers["job"] = FakeLauncher()
    done = here.defs.resolve_job_def("recover_job").execute_in_process(
        run_config={"ops": {"recover_job_driver": {"config": {"from_snapshot": 3}}}}, instance=here.instance
    )
    assert done.output_for_node("recover_job_driver")["outcome"] == "nothing to do"
    assert launcher.begins == []


class DiesOfDamage(FakeLauncher):
    """A launcher whose drivers find the damage as they restore, and say so in their last heartbeat; unless they are
    told to go back."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    def start(self, options: StartOptions = AS_IT_IS, *, cause: str = "") -> Launched:
        self.job.start()
        launched = start(self, options, cause=cause)
        self.job.beat("running")
        if options.begin.from_snapshot is None:
            self.job.beat("failed")
            status = self.job.catalog.status()
            assert status is not None
            write_status(self.job.root, replace(status, message="a segment is damaged", error_kind="corrupt"))
        return replace(launched, term=self.job.committer.term.term)

    def wait_for_checkpoint(self, launched: Launched, timeout_s: float) -> FirstCheckpoint:
        if self.begins[-1] is None:
            raise LaunchFailed("the driver ended before its first checkpoint: a segment is damaged", 5)
        return FirstCheckpoint(snapshot_id=None, how="it runs")


@pytest.mark.parametrize("policy", ["never", "older"])
def test_damage_that_is_found_by_the_restart_after_a_kill_is_looked_into(
    world: Callable[..., World], job: Job, policy: FallbackPolicy
) -> None:
    """The attempt that brought the killed driver back, and found the damage, is not the one that looks for it. The
    policy decides; what a person has to decide stands in `driver_alive` and in the overview."""
    here = world("job", extra=f"recovery: {{fallback: {policy}}}")
    here.clock.at_ms = job.clock.at_ms = max(job.clock.at_ms, time.time_ns() // 1_000_000)
    launcher = here.launchers["job"] = DiesOfDamage(job)
    spoil(job, newest_segment(job.catalog.manifest(5)))
    verdicts, keys_seen = [], []
    for _ in range(20):
        for moved in (here.clock, job.clock):
            moved.advance_s(60)
        result = here.tick("stillstate_recovery")
        verdicts += [e for e in result.asset_events if isinstance(e, dg.AssetCheckEvaluation)]
        for request in result.run_requests or []:
            keys_seen.append(request.run_key)
            assert request.job_name is not None
            here.defs.resolve_job_def(request.job_name).execute_in_process(
                run_config=dict(request.run_config),
                instance=here.instance,
                tags=dict(request.tags),
                raise_on_error=False,
            )
        if policy == "older" and launcher.begins == [None, 4]:
            return
    assert keys_seen == ["job:1:1", "job:2:1", "job:2:gave-up"]
    assert launcher.begins == [None]
    told = verdicts[-1].description or ""
    assert verdicts[-1].severity is dg.AssetCheckSeverity.ERROR
    events = here.tick("stillstate_progress").asset_events
    (overview,) = [e for e in events if isinstance(e, dg.AssetMaterialization) and e.asset_key == Mount().overview()]
    ill = overview.metadata["ill"]
    assert isinstance(ill, dg.TableMetadataValue)
    for text in (told, str(ill.records[0].data["why"])):
        assert "4 restorable; loses" in text
    assert "damaged" in str(ill.records[0].data["why"])
