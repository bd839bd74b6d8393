"""`delete`, `retention`, `gc` and pins on the command line: what is shown, what is asked, exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from job_roots import SECRET, JobRoot
from typer.testing import CliRunner, Result

from state_runtime.base.durations import parse_duration_s
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.settings import RetentionPolicy, RetentionSettings
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.manifest import Manifest
from stillstate.orchestration.cli import app
from stillstate.orchestration.config.spec import load_spec, to_policy, to_settings
from stillstate.orchestration.show import deletions as deletion

COMMANDS = [
    ["delete"],
    ["retention", "plan"],
    ["retention", "apply"],
    ["gc", "plan"],
    ["gc", "apply"],
    ["pin"],
    ["unpin"],
    ["pins"],
    ["rollback"],
]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def config(write_config: Callable[..., Path], flights: JobRoot) -> str:
    """Snapshots 1 … 5 of a job whose run ended; their files are not there, because nothing here reads them."""
    flights.start()
    assert flights.committer is not None
    for _ in range(4):
        commit_empty(flights.committer)
    flights.beat("stopped")
    return str(write_config())


def commit_empty(committer: Committer) -> Manifest:
    return committer.commit(committer.last)


def ids_of(flights: JobRoot) -> list[int]:
    return flights.catalog.snapshot_ids()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c))
def test_every_command_has_help_with_an_example(command: list[str]) -> None:
    result = call(*command, "--help")
    assert result.exit_code == 0
    assert f"Example: stillstate {' '.join(command)}" in result.output
    assert "--json" in result.output
    assert "--config" in result.output


def test_delete_shows_what_it_would_do_and_asks(config: str, flights: JobRoot) -> None:
    dry = call("delete", "flights", "1", "2", "--dry-run", "-c", config)
    assert dry.exit_code == 0
    assert "would delete flights: 2 snapshots" in dry.stdout
    assert json.loads(call("delete", "flights", "1", "--dry-run", "--json", "-c", config).stdout)["snapshot_ids"] == [1]
    refused = call("delete", "flights", "1", "2", "-c", config)
    assert refused.exit_code == 2
    assert "give --yes" in refused.stderr
    assert ids_of(flights) == [1, 2, 3, 4, 5]
    done = call("delete", "flights", "1", "2", "--yes", "-c", config)
    assert done.exit_code == 0
    assert "deleted 2 snapshots (1, 2)" in done.stdout
    assert ids_of(flights) == [3, 4, 5]


def test_delete_asks_in_a_terminal_and_takes_no_for_an_answer(
    config: str, flights: JobRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion.sys.stdin.__class__, "isatty", lambda self: True, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr("stillstate.orchestration.show.deletions.sys", _Terminal())
        answer = CliRunner().invoke(app, ["delete", "flights", "1", "-c", config], input="n\n")
        assert answer.exit_code == 1
        assert ids_of(flights) == [1, 2, 3, 4, 5]
        assert CliRunner().invoke(app, ["delete", "flights", "1", "-c", config], input="y\n").exit_code == 0
    assert ids_of(flights) == [2, 3, 4, 5]


class _Terminal:
    """Stands for `sys` where somebody sits before the terminal."""

    class stdin:
        @staticmethod
        def isatty() -> bool:
            return True

    @property
    def stderr(self) -> object:
        return sys.stderr


def test_a_rollback_shows_what_it_would_do_asks_and_makes_the_old_the_newest(config: str, flights: JobRoot) -> None:
    dry = call("rollback", "flights", "@2", "--dry-run", "-c", config)
    assert dry.exit_code == 0
    assert "3 newer snapshot ids (up to 5)" in dry.stdout
    assert json.loads(call("rollback", "flights", "@2", "--dry-run", "--json", "-c", config).stdout)["abandoned"] == 3
    refused = call("rollback", "flights", "@2", "-c", config)
    assert refused.exit_code == 2
    assert "give --yes" in refused.stderr
    assert ids_of(flights) == [1, 2, 3, 4, 5]
    assert json.loads(call("rollback", "flights", "@2", "--yes", "--json", "-c", config).stdout)["made"] == 6
    newest = flights.catalog.latest()
    assert newest is not None
    assert newest.abandoned == ((3, 5),)
    assert "snapshot 7 is the newest" in call("rollback", "flights", "--reset", "--yes", "-c", config).stdout
    for wrong in ([], ["@2", "--reset"], ["@77"], ["no-such-savepoint"]):
        assert call("rollback", "flights", *wrong, "--yes", "-c", config).exit_code == 2
    assert ids_of(flights) == [1, 2, 3, 4, 5, 6, 7]


def test_what_somebody_needs_is_refused_and_they_are_named(config: str, flights: JobRoot) -> None:
    newest = call("delete", "flights", "5", "--yes", "-c", config)
    assert newest.exit_code == 2
    assert "SnapshotInUse" in newest.stderr
    assert "the job's next run" in newest.stderr
    assert call("pin", "flights", "2", "--note", "the audit", "-c", config).exit_code == 0
    pinned = call("delete", "flights", "2", "--yes", "--json", "-c", config)
    assert "(the audit)" in json.loads(pinned.stderr)["error"]["message"]
    assert "the audit" in call("pins", "-c", config).stdout
    assert call("unpin", "flights", "2", "-c", config).exit_code == 0
    assert json.loads(call("pins", "--json", "-c", config).stdout) == []
    assert call("unpin", "flights", "2", "-c", config).exit_code == 2
    assert call("delete", "flights", "2", "--yes", "-c", config).exit_code == 0


def test_one_thing_is_deleted_at_a_time(config: str) -> None:
    for arguments in ([], ["1", "--root"], ["--root", "--savepoint", "x"]):
        result = call("delete", "flights", *arguments, "--yes", "-c", config)
        assert result.exit_code == 2
        assert "one of the three" in result.stderr


def test_a_whole_job_is_deleted_and_gone(config: str, flights: JobRoot) -> None:
    assert "with all of its 5 snapshots" in call("delete", "flights", "--root", "--dry-run", "-c", config).stdout
    assert call("delete", "flights", "--root", "--yes", "-c", config).exit_code == 0
    assert flights.store.list_names("") == []
    assert call("delete", "flights", "--root", "--yes", "-c", config).exit_code == 2


def test_a_live_run_keeps_its_job(config: str, flights: JobRoot) -> None:
    flights.clock.at_ms = __import__("time").time_ns() // 1_000_000
    flights.host = "elsewhere"
    flights.beat("running")
    refused = call("delete", "flights", "--root", "--yes", "-c", config)
    assert refused.exit_code == 2
    assert "on elsewhere); stop it first" in refused.stderr


def test_retention_is_planned_shown_and_applied(config: str, flights: JobRoot, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    shown = call("retention", "plan", "flights", "--keep-last", "2", "--max-share", "0.7", "--out", plan, "-c", config)
    assert shown.exit_code == 0, shown.output
    assert "2 kept, 3 deleted" in shown.stdout
    assert "last 2 of 2" in shown.stdout
    assert "no rule keeps it" in shown.stdout
    assert ids_of(flights) == [1, 2, 3, 4, 5]
    assert call("retention", "apply", plan, "-c", config).exit_code == 0
    assert ids_of(flights) == [4, 5]


def test_retention_without_rules_is_refused_and_takes_those_of_the_file(
    write_config: Callable[..., Path], config: str
) -> None:
    empty = call("retention", "plan", "flights", "-c", config)
    assert empty.exit_code == 2
    assert "empty" in empty.stderr
    write_config(extra="retention: {keep_last: 4}")
    found = json.loads(call("retention", "plan", "flights", "--json", "-c", config).stdout)
    assert (found["kept"], found["deleted"]) == (4, 1)
    assert call("retention", "plan", "flights", "--keep-last", "1", "-c", config).exit_code == 2  # a share of 4/5


@pytest.mark.parametrize(
    "arguments", [["--keep-last", "0"], ["--keep-within", "soon"], ["--keep-within", "0d"], ["--max-count", "-1"]]
)
def test_rules_that_keep_nothing_are_refused(config: str, arguments: list[str]) -> None:
    assert call("retention", "plan", "flights", *arguments, "-c", config).exit_code == 2


def test_garbage_is_planned_shown_and_collected(config: str, flights: JobRoot, tmp_path: Path) -> None:
    orphan = f"changelog/{1:020d}/{1:020d}-x.seg"
    flights.catalog.root.put(orphan, b"orphan")
    flights.catalog.root.put("notes.txt", b"mine")
    plan = str(tmp_path / "plan.json")
    young = call("gc", "plan", "flights", "--out", plan, "-c", config)
    assert young.exit_code == 0, young.output
    assert "too young to tell: 1 objects" in young.stdout
    assert "not of Stillstate, kept: 1" in young.stdout
    assert call("gc", "apply", plan, "-c", config).exit_code == 0
    assert flights.catalog.root.exists(orphan)
    assert call("gc", "plan", "flights", "--min-age", "10s", "-c", config).exit_code == 2
    found = json.loads(
        call("gc", "plan", "flights", "--min-age", "10s", "--unsafe-min-age", "--json", "-c", config).stdout
    )
    assert found["foreign"] == ["notes.txt"]


@pytest.mark.parametrize("text", ["{}", "", "no JSON", "--json"])
def test_a_file_that_is_no_plan_is_told_apart_from_a_damaged_one(config: str, tmp_path: Path, text: str) -> None:
    """What `plan --json` prints looks like one; nobody should look for damage because of it."""
    file = tmp_path / "x"
    file.write_text(text if text != "--json" else call("gc", "plan", "flights", "--json", "-c", config).stdout)
    refused = call("gc", "apply", str(file), "-c", config)
    assert refused.exit_code == 2
    assert "is not a plan" in refused.stderr
    assert "`stillstate gc plan JOB --out FILE` writes one" in refused.stderr
    assert call("retention", "apply", str(tmp_path / "none"), "-c", config).exit_code == 2


def test_a_damaged_plan_is_said_to_be_damaged(config: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    call("gc", "plan", "flights", "--out", str(plan), "-c", config)
    plan.write_bytes(plan.read_bytes()[:-9])
    assert call("gc", "apply", str(plan), "-c", config).exit_code == 5


def test_a_plan_of_nothing_says_so_without_a_table(config: str) -> None:
    shown = call("gc", "plan", "flights", "-c", config).stdout
    assert "flights: nothing to delete" in shown
    assert "kind" not in shown


def test_apply_executes_the_newest_plan_of_a_job_once(config: str, flights: JobRoot, tmp_path: Path) -> None:
    """The guide says: look at the plan, then `apply`. What is executed is what was shown, and not a second time."""
    nothing = call("retention", "apply", "flights", "-c", config)
    assert nothing.exit_code == 2
    assert "no plan was made for job 'flights'" in nothing.stderr
    call("retention", "plan", "flights", "--keep-last", "1", "--max-share", "1", "-c", config)
    shown = call("retention", "plan", "flights", "--keep-last", "3", "-c", config)
    assert "`stillstate retention apply flights` executes this plan" in shown.stdout
    assert ids_of(flights) == [1, 2, 3, 4, 5]
    assert call("retention", "apply", "flights", "-c", config).exit_code == 0
    assert ids_of(flights) == [3, 4, 5]
    assert call("retention", "apply", "flights", "-c", config).exit_code == 2
    assert "`stillstate gc apply flights` executes this plan" in call("gc", "plan", "flights", "-c", config).stdout
    assert call("gc", "apply", "flights", "-c", config).exit_code == 0


def test_a_plan_in_a_file_is_the_newest_plan_too(config: str, flights: JobRoot, tmp_path: Path) -> None:
    """Else `apply JOB` would execute one that is older than what the person has seen last."""
    call("retention", "plan", "flights", "--keep-last", "1", "--max-share", "1", "-c", config)
    out = str(tmp_path / "plan.json")
    assert out in call("retention", "plan", "flights", "--keep-last", "4", "--out", out, "-c", config).stdout
    assert call("retention", "apply", "flights", "-c", config).exit_code == 0
    assert ids_of(flights) == [2, 3, 4, 5]


def test_a_plan_of_another_job_is_not_executed_under_this_ones_name(
    write_config: Callable[..., Path], config: str, flights: JobRoot, tmp_path: Path
) -> None:
    write_config("flights", "trains")
    call("retention", "plan", "flights", "--keep-last", "3", "-c", config)
    plans = tmp_path / "logs" / "plans"
    (plans / "flights.retention.json").rename(plans / "trains.retention.json")
    refused = call("retention", "apply", "trains", "-c", config)
    assert refused.exit_code == 2
    assert "is a plan of job 'flights', not of 'trains'" in refused.stderr
    assert ids_of(flights) == [1, 2, 3, 4, 5]


def test_a_plan_that_cannot_be_kept_says_so(config: str, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    shown = call("gc", "plan", "flights", "-c", config)
    assert shown.exit_code == 0
    assert "`apply` needs `plan --out FILE`" in shown.stdout


@pytest.mark.parametrize(("made", "given"), [("gc", "retention"), ("retention", "gc")])
def test_a_plan_of_another_kind_is_told_apart_from_damage(
    config: str, flights: JobRoot, tmp_path: Path, made: str, given: str
) -> None:
    """Nobody should look for damage on the disk because of a wrong argument."""
    plan = str(tmp_path / "plan.json")
    call(made, "plan", "flights", *(["--keep-last", "3"] if made == "retention" else []), "--out", plan, "-c", config)
    refused = call(given, "apply", plan, "-c", config)
    assert refused.exit_code == 2
    assert f"give it to `stillstate {made} apply`" in refused.stderr
    assert "damaged" not in refused.stderr
    assert ids_of(flights) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("group", ["retention", "gc"])
def test_a_group_of_commands_shows_an_example(group: str) -> None:
    assert f"Example: stillstate {group} plan flights" in call(group, "--help").output


def test_durations_are_read_as_people_write_them() -> None:
    assert [parse_duration_s(t) for t in ("90s", "15min", "2m", "6h", "7d", "2w", "1y", "1.5h", "0.1s")] == [
        90,
        900,
        120,
        21_600,
        604_800,
        1_209_600,
        31_536_000,
        5_400,
        0.1,
    ]
    for wrong in ("", "5", "h", "-1d", "1 d", "1e3s", "١d", "1h30m", "-1.5h", "90S", "1.h", "9" * 400 + "s"):
        with pytest.raises(InvalidConfiguration):
            parse_duration_s(wrong)


def test_the_section_of_the_file_reaches_planner_and_driver(write_config: Callable[..., Path]) -> None:
    extra = "retention: {retained_checkpoints: 7, keep_daily: 3, keep_tags: [release], max_age_s: 60, failed_ttl_s: 5}"
    spec = load_spec(write_config(extra=extra)).job("flights")
    policy = RetentionPolicy(keep_daily=3, keep_tags=("release",), max_age_s=60, failed_ttl_s=5)
    assert to_policy(spec) == policy
    assert to_settings(spec).retention == RetentionSettings(retained_checkpoints=7, **policy.model_dump())


@pytest.mark.parametrize(
    "text", ["{keep_last: 0}", "{keep_within_s: -1}", "{max_count: 0}", "{deleted_share_max: 0}", "{keep_sometimes: 1}"]
)
def test_a_section_that_keeps_nothing_is_refused_with_its_line(write_config: Callable[..., Path], text: str) -> None:
    with pytest.raises(InvalidConfiguration, match=r"stillstate.yaml:\d+: defaults.retention"):
        load_spec(write_config(extra=f"retention: {text}"))


def test_no_secret_is_in_a_plan(write_config: Callable[..., Path], config: str, tmp_path: Path) -> None:
    write_config(extra=f"storage_options: {{key: {SECRET}}}")
    for kind, more in (("retention", ["--keep-last", "3"]), ("gc", [])):
        out = tmp_path / f"{kind}.plan"
        result = call(kind, "plan", "flights", *more, "--out", str(out), "-c", config)
        assert result.exit_code == 0, result.output
        assert SECRET not in result.output
        assert SECRET.encode() not in out.read_bytes()
