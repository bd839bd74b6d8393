"""`stillstate metrics`: what Prometheus gets of the jobs, parsed by its own library's parser."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from black_holes import black_hole, refused
from dagster_world import FakeLauncher
from house import write_house
from job_roots import SECRET, FakeClock, JobRoot
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from state_runtime.base.errors import InvalidConfiguration, JobNotFound, StoreUnavailable
from state_runtime.snapshot.catalog import Catalog
from stillstate.orchestration.cli import app
from stillstate.orchestration.config.spec import JobSpec, Spec, load_spec
from stillstate.orchestration.launchers import Launcher
from stillstate.orchestration.metrics.collector import JobsCollector
from stillstate.orchestration.metrics.families import HEALTHS
from stillstate.orchestration.probes.newest_savepoint import SavepointsSeen
from stillstate.orchestration.probes.pool import ProbePool
from stillstate.orchestration.recovery.observe import Observation, observe
from stillstate.orchestration.running.make_savepoint import savepointer_watching
from stillstate.orchestration.upkeep.scheduled_savepoint import periodic_savepoint

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def launcher(spec: Spec, job: JobSpec) -> Launcher:
    return FakeLauncher()


def scrape(config: Path, clock: FakeClock, *jobs: str) -> dict[str, Metric]:
    collector = JobsCollector(
        lambda: load_spec(config), jobs, launcher=launcher, lookout=ProbePool(share_s=0.0), clock=clock
    )
    return parsed(generate_latest(collector.registry()).decode())


def parsed(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(families: dict[str, Metric], name: str) -> dict[str, float]:
    return {sample.labels["stream"]: sample.value for sample in families[name].samples}


def health_of(families: dict[str, Metric], job: str) -> list[str]:
    samples = [s for s in families["stillstate_job_health"].samples if s.labels["stream"] == job]
    assert [s.labels["health"] for s in samples] == list(HEALTHS)
    return [s.labels["health"] for s in samples if s.value == 1.0]


@pytest.fixture
def running(flights: JobRoot) -> JobRoot:
    flights.start()
    flights.checkpoint()
    return flights


def test_a_job_is_told_by_its_newest_snapshot_and_heartbeat(
    write_config: Callable[..., Path], running: JobRoot, clock: FakeClock
) -> None:
    head = running.catalog.latest()
    assert head is not None
    clock.advance_s(20)
    running.beat()
    found = scrape(write_config("flights", "trains"), clock)
    assert health_of(found, "flights") == ["healthy"]
    assert health_of(found, "trains") == ["never-started"]
    assert values(found, "stillstate_job_well") == {"flights": 1.0, "trains": 1.0}
    assert values(found, "stillstate_job_seen") == {"flights": 1.0, "trains": 1.0}
    assert values(found, "stillstate_checkpoint_id") == {"flights": head.snapshot_id}
    assert values(found, "stillstate_checkpoint_timestamp_seconds") == {"flights": head.created_at_ms / 1000}
    age_s = (clock.now_ms() - head.created_at_ms) / 1000
    assert values(found, "stillstate_checkpoint_age_seconds") == {"flights": pytest.approx(age_s)}
    assert values(found, "stillstate_log_bytes") == {"flights": head.log_bytes}
    assert values(found, "stillstate_term") == {"flights": 1.0}
    assert "stillstate_savepoint_age_seconds" in found
    assert found["stillstate_savepoint_age_seconds"].samples == [], "there is none: no age, and not the age 0"


def test_a_restart_is_one_run_more(write_config: Callable[..., Path], running: JobRoot, clock: FakeClock) -> None:
    config = write_config("flights")
    before = scrape(config, clock)["stillstate_runs"]
    running.start()
    after = scrape(config, clock)["stillstate_runs"]
    assert (before.type, [s.name for s in before.samples]) == ("counter", ["stillstate_runs_total"])
    assert after.samples[0].value == before.samples[0].value + 1


def test_names_end_in_their_units_and_every_family_says_what_it_is(
    write_config: Callable[..., Path], running: JobRoot, clock: FakeClock
) -> None:
    for name, family in scrape(write_config("flights"), clock).items():
        assert name.startswith("stillstate_")
        assert family.documentation.endswith(".")
        assert not name.endswith(("_ms", "_s", "_kb", "_mb", "_percent"))
        assert not (family.type == "gauge" and name.endswith("_total"))


def test_a_dead_driver_is_a_job_that_somebody_should_look_at(
    write_config: Callable[..., Path], running: JobRoot, clock: FakeClock
) -> None:
    clock.advance_s(3600)
    found = scrape(write_config("flights"), clock)
    assert health_of(found, "flights") == ["dead"]
    assert values(found, "stillstate_job_well") == {"flights": 0.0}


def test_only_the_jobs_that_were_named_are_looked_at(
    write_config: Callable[..., Path], running: JobRoot, clock: FakeClock
) -> None:
    config = write_config("flights", "trains")
    assert set(values(scrape(config, clock, "flights"), "stillstate_job_seen")) == {"flights"}
    with pytest.raises(JobNotFound, match="fligths"):
        scrape(config, clock, "fligths")


def test_stores_that_hang_or_refuse_are_jobs_that_were_not_seen_and_keep_no_other_from_being(
    tmp_path: Path, clock: FakeClock
) -> None:
    """Within the deadlines of the sensors; what is not known of them is left out."""
    with black_hole() as hole:
        house = write_house(
            tmp_path, clock, jobs=9, hanging=2, refused=2, hole=hole, closed=refused(),
            extra="observation: {timeout_s: 1, tick_budget_s: 6}",
        )  # fmt: skip
        found = scrape(house.file, clock)
    seen = values(found, "stillstate_job_seen")
    assert {name for name, value in seen.items() if value == 0.0} == {*house.hanging, *house.refused}
    assert set(values(found, "stillstate_checkpoint_id")) == set(house.healthy)
    assert health_of(found, house.hanging[0]) == ["not seen"]
    assert values(found, "stillstate_job_well")[house.refused[0]] == 0.0


def test_a_store_that_goes_away_after_the_look_leaves_savepoints_out_and_nothing_else(
    write_config: Callable[..., Path], running: JobRoot, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(catalog: Catalog) -> SavepointsSeen:
        raise StoreUnavailable("the cable is out")

    monkeypatch.setattr("stillstate.orchestration.metrics.collector.savepoints_seen", gone)
    found = scrape(write_config("flights"), clock)
    assert values(found, "stillstate_job_seen") == {"flights": 1.0}
    assert found["stillstate_savepoints"].samples == []


def test_a_savepoint_has_its_age(write_config: Callable[..., Path], flights: JobRoot, clock: FakeClock) -> None:
    flights.start("stopped")
    maker = savepointer_watching(flights.catalog, lambda: _stopped(flights, clock), clock=clock)
    made = periodic_savepoint(flights.catalog, maker, ("nightly",))
    assert not isinstance(made, str)
    clock.advance_s(90)
    found = scrape(write_config("flights"), clock)
    assert values(found, "stillstate_savepoints") == {"flights": 1.0}
    assert values(found, "stillstate_savepoint_age_seconds") == {"flights": 90.0}
    assert health_of(found, "flights") == ["stopped"]


def _stopped(root: JobRoot, clock: FakeClock) -> Observation:
    file = root.store_path.parent / "stillstate.yaml"
    file.write_text("version: 1\njobs: {flights: {entry_point: 'nowhere.job:build', store: state}}\n")
    return observe(load_spec(file).job("flights"), root.catalog, FakeLauncher(), clock)


def test_a_file_that_became_unreadable_leaves_the_jobs_of_before(
    write_config: Callable[..., Path], running: JobRoot, clock: FakeClock
) -> None:
    config = write_config("flights")
    collector = JobsCollector(lambda: load_spec(config), launcher=launcher, lookout=ProbePool(share_s=0.0), clock=clock)
    registry = collector.registry()

    def read() -> tuple[float, set[str]]:
        found = parsed(generate_latest(registry).decode())
        ok = found["stillstate_config_last_reload_successful"].samples[0].value
        return ok, set(values(found, "stillstate_job_seen"))

    assert read() == (1.0, {"flights"})
    config.write_text("version: 1\njobs: {")
    assert read() == (0.0, {"flights"})
    write_config("flights", "trains")
    assert read() == (1.0, {"flights", "trains"})


# --- the command -----------------------------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["metrics", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_the_command_prints_what_the_parser_reads_and_no_secret(
    write_config: Callable[..., Path], running: JobRoot
) -> None:
    config = str(write_config("flights", extra=f"storage_options: {{secret: {SECRET}}}"))
    code, text, _ = run("-c", config)
    assert code == 0
    assert values(parsed(text), "stillstate_job_seen") == {"flights": 1.0}
    assert SECRET not in text


def test_a_file_is_replaced_as_a_whole(
    write_config: Callable[..., Path], running: JobRoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node exporter reads at any moment: it finds the old file or the new one, and no file of another name."""
    config, out = str(write_config("flights")), tmp_path / "text" / "stillstate.prom"
    out.parent.mkdir()
    out.write_text("old 1\n")
    before = out.stat().st_ino
    moved: list[str] = []
    rename = os.rename

    def watched(source: str, target: str) -> None:
        moved.append(out.read_text())
        assert not str(source).endswith(".prom")
        assert Path(source).read_text().endswith("\n")
        rename(source, target)

    monkeypatch.setattr(os, "rename", watched)
    assert run("--out", str(out), "-c", config)[0] == 0
    assert moved == ["old 1\n"]
    assert values(parsed(out.read_text()), "stillstate_job_seen") == {"flights": 1.0}
    assert out.stat().st_ino != before
    assert [f.name for f in out.parent.iterdir()] == [out.name]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--listen", "9464"], "is no HOST:PORT"),
        (["--listen", "127.0.0.1:70000"], "is no HOST:PORT"),
        (["--listen", "127.0.0.1:1", "--out", "x.prom"], "give one of them"),
        (["--out", "no/such/folder/x.prom"], "cannot be written"),
        (["fligths"], "did you mean 'flights'"),
    ],
)
def test_a_wrong_call_says_what_to_do(
    write_config: Callable[..., Path], running: JobRoot, arguments: list[str], why: str
) -> None:
    code, _, said = run(*arguments, "-c", str(write_config("flights")))
    assert code == 2
    assert why in said


@pytest.fixture
def served(write_config: Callable[..., Path], running: JobRoot) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "stillstate.orchestration.cli", "metrics", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "-c", str(write_config("flights"))],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        # Tests that a shell runs in the background have it ignored, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stderr is not None
        yield process.stderr.readline().split()[2], process
    finally:
        process.kill()
        process.wait()


def test_each_request_looks_and_ctrl_c_ends_it(served: tuple[str, subprocess.Popen[str]], running: JobRoot) -> None:
    url, process = served

    def terms() -> dict[str, float]:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return values(parsed(answer.read().decode()), "stillstate_term")

    assert terms() == {"flights": 1.0}
    answers: list[dict[str, float]] = []
    threads = [threading.Thread(target=lambda: answers.append(terms())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [{"flights": 1.0}] * 4
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0


def test_the_command_imports_neither_dagster_nor_spark(write_config: Callable[..., Path], running: JobRoot) -> None:
    config = str(write_config("flights"))
    code = (
        "import sys; from typer.testing import CliRunner; from stillstate.orchestration.cli import app; "
        f"done = CliRunner().invoke(app, ['metrics', '-c', {config!r}]); "
        "print(done.exit_code, [m for m in ('dagster', 'pyspark') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.strip() == "0 []", done.stderr


def test_the_documents_name_every_metric(write_config: Callable[..., Path], running: JobRoot, clock: FakeClock) -> None:
    text = (DOCS / "operations.md").read_text().split("\n## Prometheus\n")[1].split("\n## ")[0]
    for family in scrape(write_config("flights"), clock).values():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert f"`{name}`" in text, name


def test_a_configuration_that_cannot_be_read_at_first_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration):
        JobsCollector(lambda: load_spec(tmp_path / "none.yaml"))
