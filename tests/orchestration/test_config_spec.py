"""`stillstate.yaml`: what is read, and that every mistake is found with its place."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from job_roots import SECRET
from pydantic import ValidationError

from state_runtime.base.errors import InvalidConfiguration, JobNotFound
from state_runtime.base.settings import (
    JobSettings,
)
from stillstate.orchestration.config.schedules import is_cron
from stillstate.orchestration.config.spec import (
    AvailableNow,
    JobSpec,
    ProcessingTime,
    Secrets,
    find_config,
    load_spec,
    to_settings,
    to_trigger,
)
from stillstate.orchestration.config.yaml_tree import FILE_BYTES_MAX

MINIMAL = "version: 1\njobs:\n  flights:\n    entry_point: a.b:c\n    store: state\n"


def problems_of(file: Path, environ: dict[str, str] | None = None) -> list[str]:
    """The error's lines without the file's name."""
    with pytest.raises(InvalidConfiguration) as caught:
        load_spec(file, environ=environ or {})
    assert caught.value.exit_code == 2
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{file}:") for line in lines), lines
    return [line.removeprefix(f"{file}:") for line in lines]


def test_a_minimal_file_gets_defaults_and_absolute_paths(write_config: Callable[..., Path]) -> None:
    spec = load_spec(write_config(text=MINIMAL))
    job = spec.job("flights")
    assert (job.name, job.store) == ("flights", str(spec.file.parent / "state"))
    assert job.recovery.enabled
    assert job.trigger is None
    assert to_trigger(job) is None
    assert to_trigger(job, until_idle=True) == {"availableNow": True}


def test_relative_log_dir_default_lies_beside_the_file(write_config: Callable[..., Path]) -> None:
    """Else the logs of a start from another folder are somewhere else."""
    spec = load_spec(write_config(text=MINIMAL))
    assert spec.job("flights").launcher.log_dir == str(spec.file.parent / "logs")


def test_defaults_are_merged_under_every_job_at_every_depth(write_config: Callable[..., Path]) -> None:
    spec = load_spec(
        write_config(
            text=(
                "version: 1\n"
                "defaults:\n"
                "  store: shared\n"
                "  recovery: {backoff_s: 3, max_attempts: 7}\n"
                "  options: {inbox: in, speed: 2}\n"
                "jobs:\n"
                "  one: {entry_point: 'a:b'}\n"
                "  two:\n"
                "    entry_point: a:b\n"
                "    store: own\n"
                "    recovery: {max_attempts: 1}\n"
                "    options: {speed: 5}\n"
            )
        )
    )
    one, two = spec.job("one"), spec.job("two")
    assert (one.recovery.backoff_s, one.recovery.max_attempts) == (3, 7)
    assert (two.recovery.backoff_s, two.recovery.max_attempts) == (3, 1)
    assert two.options == {"inbox": "in", "speed": 5}
    assert Path(one.store).name == "shared"
    assert Path(two.store).name == "own"


def test_all_mistakes_are_reported_at_once_each_with_line_and_key(write_config: Callable[..., Path]) -> None:
    file = write_config(
        text=(
            "version: 1\n"  # 1
            "defaults:\n"  # 2
            "  parallelism: many\n"  # 3
            "jobs:\n"  # 4
            "  flights:\n"  # 5
            "    entry_pont: a.b:c\n"  # 6
            "    store: state\n"  # 7
            "    store: other\n"  # 8
            "    trigger: {every: 5}\n"  # 9
            "    launcher: {kind: yarn, stop_timeout_s: 0}\n"  # 10
            "    owners: [bob]\n"  # 11
            "    path_options: [inbox]\n"  # 12
            "  UPPER: {entry_point: 'a:b', store: x}\n"  # 13
            "  empty:\n"  # 14
        )
    )
    found = problems_of(file)
    expected = [
        ("3: defaults.parallelism: ", "valid integer"),
        ("5: jobs.flights.entry_point: ", "required"),
        ("6: jobs.flights.entry_pont: ", "did you mean `entry_point`"),
        ("8: jobs.flights.store: ", "is already in line 7"),
        ("9: jobs.flights.trigger: ", "available_now"),
        ("10: jobs.flights.launcher.kind: ", "'local'"),
        ("10: jobs.flights.launcher.stop_timeout_s: ", "greater than 0"),
        ("11: jobs.flights.owners[0]: ", "team:name"),
        ("12: jobs.flights.path_options[0]: ", "no option 'inbox' under `options` of job 'flights'"),
        ("13: jobs.UPPER: ", "a job name is"),
        ("14: jobs.empty: ", "must be a mapping"),
    ]
    assert len(found) == len(expected), "\n".join(found)
    for line, (place, what) in zip(found, expected, strict=True):
        assert line.startswith(place), line
        assert what in line, line


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("", 1, "empty"),
        ("- a\n", 1, "a list"),
        ("just words\n", 1, "a single value"),
        ("version: 1\njobs: [\n", 3, "not valid YAML"),
        ("version: 1\n\tjobs: x\n", 2, "not valid YAML"),
        ("version: 1\njobs: {a: *nope}\n", 2, "not valid YAML"),
        ("a: 1\n---\nb: 2\n", 2, "not valid YAML"),
        (MINIMAL + "    options: !!python/object:os.system x\n", 6, "tag"),
        (MINIMAL + "    <<: {store: x}\n", 6, "merge keys"),
        ("version: 2\n" + MINIMAL.removeprefix("version: 1\n"), 1, "must be 1"),
        ("version: 1\njobs: {}\n", 2, "at least 1"),
        ("version: 1\njobs:\n  - x\n", 2, "mapping"),
        ("version: 1\ndefaults: 5\n" + MINIMAL.removeprefix("version: 1\n"), 2, "mapping"),
        (MINIMAL + "    recovery: {heartbeat_timeout_s: 3}\n", 6, "under twice"),
        (MINIMAL + "    recovery: {heartbeat_timeout_s: .inf}\n", 6, "finite"),
        (MINIMAL + "    trigger: {processing_time_s: soon}\n", 6, "valid number"),
        (MINIMAL + "    trigger: {available_now: false}\n", 6, "True"),
        (MINIMAL.replace("a.b:c", "a.b"), 4, "package.module:function"),
        (MINIMAL.replace("a.b:c", "os;rm:c"), 4, "package.module:function"),
        (MINIMAL.replace("store: state", "store: '${UNSET}/x'"), 5, "UNSET is not set"),
        (MINIMAL.replace("store: state", "store: '${bad name}'"), 5, "${NAME}"),
        (MINIMAL.replace("store: state", "store: s3://user:pw@bucket/x"), 5, "storage_options"),
        (
            MINIMAL + "  a-b: {entry_point: 'a:b', store: x}\n  a_b: {entry_point: 'a:b', store: x}\n",
            7,
            "only in - and _",
        ),
        (MINIMAL + "    name: other\n", 6, "unknown key"),
        (MINIMAL + "file: other\n", 6, "unknown key"),
        (MINIMAL + "    options: {n: 5}\n    path_options: [n]\n", 6, "must be a path"),
        # Which of the jobs lacks it: the line is that of the defaults.
        ("defaults: {path_options: [inbox]}\n" + MINIMAL, 1, "no option 'inbox' under `options` of job 'flights'"),
    ],
)
def test_malformed_files_name_the_line(write_config: Callable[..., Path], text: str, line: int, what: str) -> None:
    found = problems_of(write_config(text=text))
    assert len(found) == 1, found
    assert found[0].startswith(f"{line}:"), found
    assert what in found[0], found


def test_a_file_that_is_missing_a_folder_too_large_or_not_text(tmp_path: Path) -> None:
    for content, what in (
        (None, "does not exist"),
        (b"\xff\xfe", "UTF-8"),
        (b"#" * (FILE_BYTES_MAX + 1), "larger than"),
        (b"a: &a [x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\n" + _nested_aliases(), "too many values"),
        (b"a: " + b"[" * 2000, "deep"),
    ):
        file = tmp_path / "x.yaml"
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(InvalidConfiguration, match=what):
            load_spec(file)
    with pytest.raises(InvalidConfiguration, match="folder"):
        load_spec(tmp_path)


def _nested_aliases() -> bytes:
    lines = []
    for before, name in zip("bcdefgh", "cdefghi", strict=True):
        lines.append(f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]")
    return "\n".join(lines).encode()


def test_the_file_is_found_by_argument_then_environment_then_upwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "stillstate.yaml").write_text(MINIMAL)
    (tmp_path / "other.yaml").write_text(MINIMAL)
    monkeypatch.chdir(inner)
    assert find_config(environ={}) == tmp_path / "stillstate.yaml"
    assert find_config(environ={"STILLSTATE_CONFIG": str(tmp_path / "other.yaml")}) == tmp_path / "other.yaml"
    named = find_config("../../stillstate.yaml", environ={"STILLSTATE_CONFIG": "nowhere"})
    assert named.samefile(tmp_path / "stillstate.yaml")
    (tmp_path / "stillstate.yaml").unlink()
    with pytest.raises(InvalidConfiguration, match="or above it"):
        find_config(environ={})


def test_variables_are_replaced_in_paths_and_secrets_and_nowhere_else(write_config: Callable[..., Path]) -> None:
    file = write_config(
        text=MINIMAL.replace("store: state", "store: ${ROOT}/state")
        + "    storage_options: {secret: '${KEY}', nested: {list: ['${KEY:-x}', '$$5', 7]}}\n"
        "    options: {inbox: '${ROOT}/in', plain: '${ROOT}'}\n"
        "    path_options: [inbox]\n"
        "    local_dir: ~/scratch\n"
        "    scratch_dir: ${ROOT}/spark\n"
    )
    job = load_spec(file, environ={"ROOT": "data", "KEY": SECRET}).job("flights")
    assert job.store == str(file.parent / "data" / "state")
    assert job.options == {"inbox": str(file.parent / "data" / "in"), "plain": "${ROOT}"}
    assert job.storage_options["secret"] == SECRET
    assert job.storage_options["nested"] == {"list": [SECRET, "$5", 7]}
    assert Path(job.local_dir) == Path.home() / "scratch"
    assert job.scratch_dir == str(file.parent / "data" / "spark")


def test_urls_are_not_made_relative_and_dates_stay_text(write_config: Callable[..., Path]) -> None:
    file = write_config(
        text=MINIMAL.replace("store: state", "store: s3://bucket/x")
        + "    options: {day: 2013-01-01, on: yes, n: 1.5}\n"
    )
    job = load_spec(file).job("flights")
    assert job.store == "s3://bucket/x"
    assert job.options == {"day": "2013-01-01", "on": "yes", "n": 1.5}


def test_triggers(write_config: Callable[..., Path]) -> None:
    every = load_spec(write_config(text=MINIMAL + "    trigger: {processing_time_s: 0.5}\n")).job("flights")
    now = load_spec(write_config(text=MINIMAL + "    trigger: {available_now: true}\n")).job("flights")
    assert every.trigger == ProcessingTime(processing_time_s=0.5)
    assert to_trigger(every) == {"processingTime": "500 milliseconds"}
    assert now.trigger == AvailableNow(available_now=True)
    assert to_trigger(now) == {"availableNow": True}


def test_unknown_jobs_name_the_nearest(write_config: Callable[..., Path]) -> None:
    with pytest.raises(JobNotFound, match="did you mean 'flights'"):
        load_spec(write_config("flights", "trains")).job("flihgts")


def test_secrets_are_in_no_repr_error_dump_or_pickle(write_config: Callable[..., Path]) -> None:
    """A repr ends up in logs and a pickle on disks of others."""
    file = write_config(
        text=MINIMAL + f"    storage_options: {{key: {SECRET}, nested: {{token: [{SECRET}]}}}}\n    parallelism: x\n"
    )
    with pytest.raises(InvalidConfiguration) as caught:
        load_spec(file)
    assert SECRET not in str(caught.value)
    spec = load_spec(write_config(text=file.read_text().replace("    parallelism: x\n", "")))
    job = spec.job("flights")
    for text in (repr(spec), str(job), repr(job.storage_options), str(job.model_dump()), f"{job.storage_options}"):
        assert SECRET not in text
    with pytest.raises(TypeError):
        pickle.dumps(job.storage_options)
    assert job.storage_options.redact(f"denied for {SECRET}") == "denied for ***"


def test_a_secret_in_the_wrong_place_is_not_repeated(write_config: Callable[..., Path]) -> None:
    for bad in (
        MINIMAL + f"    storage_options: {SECRET}\n",
        MINIMAL.replace("store: state", f"store: s3://me:{SECRET}@bucket/x"),
        MINIMAL + f"    storage_options: {{key: '{SECRET}\n",
        MINIMAL + f"    parallelism: {SECRET}\n",
    ):
        assert SECRET not in "\n".join(problems_of(write_config(text=bad)))


def test_secrets_redact_the_longest_value_first() -> None:
    """Else a short value inside a long one leaves its ends."""
    assert Secrets({"a": "abcd", "b": "xabcdx", "c": "e"}).redact("xabcdx abcd e") == "*** *** e"


def test_reading_the_configuration_imports_neither_spark_nor_dagster() -> None:
    code = (
        "import sys, stillstate.orchestration.cli, stillstate.orchestration.config.spec, stillstate.orchestration.show.views, stillstate.orchestration.launchers, "
        "stillstate.orchestration.recovery.observe, state_runtime.snapshot.catalog; "
        "print([m for m in ('pyspark', 'dagster', 'pandas', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.stdout.strip() == "[]"


def test_the_schema_itself_never_repeats_a_value() -> None:
    """Whoever validates without `load_spec` must not leak either."""
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate({"entry_point": "a:b", "store": "x", "parallelism": SECRET})
    assert SECRET not in str(caught.value)


# --- what the runtime gets -----------------------------------------------------------------------------------------


def test_a_file_without_settings_leaves_every_default_of_the_runtime_as_it_is(
    write_config: Callable[..., Path],
) -> None:
    """Two places for one default drift apart."""
    spec = load_spec(write_config(text=MINIMAL)).job("flights")
    assert to_settings(spec) == JobSettings()


@pytest.mark.parametrize(("word", "value"), [("on", "on"), ("off", "off"), ("true", "on"), ("false", "off")])
def test_on_and_off_are_words_or_booleans(write_config: Callable[..., Path], word: str, value: str) -> None:
    """YAML 1.1 reads them as booleans, and so do many tools that write YAML."""
    assert load_spec(write_config(text=MINIMAL + f"    changelog: {word}\n")).job("flights").changelog == value


def test_local_recovery_is_switched_off_by_one_word(write_config: Callable[..., Path]) -> None:
    job = load_spec(write_config(text=MINIMAL + "    local_recovery: false\n")).job("flights")
    assert job.local_recovery.enabled is False
    assert job.local_recovery.bytes_max == JobSettings().local_recovery.bytes_max


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("materialization: {enabled: false}", "it is `by: driver` or `by: nobody` now"),
        ("materialization: {by: cron}", "must be 'driver', 'dagster' or 'nobody'"),
        ("materialization: {schedule: '0 3 * * *'}", "a schedule needs `by: dagster`; it is `by: driver`"),
        ("materialization: {by: dagster, schedule: '0 25 * * *'}", "must be a cron line of five fields"),
        ("checkpoint: {interval_s: 60, freshness_s: 90}", "a healthy job would count as stale"),
        ("checkpoint: {intervall_s: 60}", "did you mean `interval_s`?"),
        ("upload: {attempts_max: 0}", "must be greater than or equal to 1"),
        ("placement: on", "must be 'sticky' or 'off'"),
        ("changelog: maybe", "must be 'on' or 'off'"),
    ],
)
def test_mistakes_in_the_new_sections_are_named(write_config: Callable[..., Path], line: str, problem: str) -> None:
    (found,) = problems_of(write_config(text=MINIMAL + f"    {line}\n"))
    assert found.startswith("6: jobs.flights.")
    assert problem in found


@pytest.mark.parametrize("line", ["* * * * *", "0 3 * * 0", "*/15 0-6,22 1,15 */2 1-5", "59 23 31 12 7"])
def test_cron_lines_that_dagster_takes(line: str) -> None:
    assert is_cron(line)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "* * * *",
        "* * * * * *",
        "60 * * * *",
        "* 24 * * *",
        "* * 0 * *",
        "* * * 13 *",
        "5-1 * * * *",
        "*/0 * * * *",
        "a b c d e",
        "*,, * * * *",
    ],
)
def test_cron_lines_that_nobody_can_mean(line: str) -> None:
    assert not is_cron(line)


def test_observation_stands_beside_the_jobs_and_is_checked(write_config: Callable[..., Path]) -> None:
    text = "version: 1\nobservation: {{{}}}\njobs: {{a: {{entry_point: 'a:b', store: x}}}}\n"
    assert load_spec(write_config(text=text.format("interval_s: 0"))).observation.interval_s == 0
    with pytest.raises(InvalidConfiguration, match=r"tick_budget_s = 9 is under twice the timeout_s = 5"):
        load_spec(write_config(text=text.format("tick_budget_s: 9")))
    with pytest.raises(InvalidConfiguration, match=r"did you mean `interval_s`"):
        load_spec(write_config(text=text.format("intervals_s: 4")))
