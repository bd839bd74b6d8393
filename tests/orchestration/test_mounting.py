"""Several files in one code location that is not ours: keys, names and places among runs do not meet."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.scheduler.instigation import TickStatus
from dagster._core.test_utils import create_test_daemon_workspace_context, instance_for_test
from dagster._core.workspace.load_target import PythonFileTarget
from dagster._daemon.sensor import execute_sensor_iteration
from dagster_world import FakeLauncher
from job_roots import FakeClock, JobRoot

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.errors import InvalidConfiguration
from stillstate import StillstateResource, build_definitions
from stillstate.orchestration.config.spec import JobSpec, Spec, load_spec
from stillstate.orchestration.launchers import Launcher
from stillstate.orchestration.launchers.local import SUPERVISOR_MODULE
from stillstate.orchestration.probes.pool import ProbePool

ROOT = Path(__file__).resolve().parents[2]
MODES = ("per_job", "shared")

LOCATION = """
import dagster as dg
from stillstate import build_definitions

@dg.asset(deps=[dg.AssetKey(["north", "flights", "checkpoints"])])
def report() -> None: ...

north = build_definitions({north!r}, key_prefix="north")
south = build_definitions({south!r}, key_prefix=["south-2", "x"], group="southern")
defs = dg.Definitions.merge(north, south, dg.Definitions(assets=[report]))
"""


def write_team(folder: Path, *jobs: str, house: str = "") -> Path:
    folder.mkdir(parents=True)
    text = f"version: 1\n{house}\ndefaults: {{entry_point: 'nowhere.job:build', store: state}}\njobs:\n"
    (folder / "stillstate.yaml").write_text(text + "".join(f"  {name}: {{}}\n" for name in jobs))
    return folder / "stillstate.yaml"


@dataclass
class Teams:
    """Two files, each with a stream `flights`."""

    north: Path
    south: Path

    @staticmethod
    def write(folder: Path, mode: str) -> Teams:
        house = f"dagster: {{jobs: {mode}}}"
        return Teams(
            write_team(folder / "north", "flights", "trains", house=house),
            write_team(folder / "south", "flights", house=house),
        )


@pytest.fixture(params=MODES)
def teams(request: pytest.FixtureRequest, tmp_path: Path) -> Teams:
    return Teams.write(tmp_path, request.param)


def resource(file: Path, clock: FakeClock, roots: dict[str, JobRoot]) -> StillstateResource:
    launchers = {name: FakeLauncher(root) for name, root in roots.items()}

    class TestResource(StillstateResource):
        def clock(self) -> Clock:
            return clock

        def lookout(self) -> ProbePool:
            return ProbePool(share_s=0.0)

        def launcher(self, spec: Spec, job: JobSpec) -> Launcher:
            return launchers.setdefault(job.name, FakeLauncher())

    return TestResource(config_file=str(file))


def merged(teams: Teams) -> dg.Definitions:
    return dg.Definitions.merge(
        build_definitions(teams.north, key_prefix="north"),
        build_definitions(teams.south, key_prefix=["south-2", "x"], group="southern"),
    )


def test_two_files_merge_and_no_name_is_in_both(teams: Teams) -> None:
    defs = merged(teams)
    dg.Definitions.validate_loadable(defs)
    repository = defs.get_repository_def()
    names = [job.name for job in repository.get_all_jobs() if not job.name.startswith("__")]
    names += [s.name for s in repository.sensor_defs] + [s.name for s in repository.schedule_defs]
    assert len(set(names)) == len(names)
    assert all(name.startswith(("north_", "south_2_x_")) for name in names), names
    resources = set(repository.get_top_level_resources())
    assert resources == {f"{p}_{r}" for p in ("north", "south_2_x") for r in ("stillstate", "stillstate_spark")}


def test_every_asset_and_every_check_has_the_prefix(teams: Teams) -> None:
    graph = merged(teams).resolve_asset_graph()
    keys = graph.get_all_asset_keys()
    assert {tuple(key.path[:-2]) for key in keys} == {("north",), ("south-2", "x")}
    assert {"north/flights/checkpoints", "north/trains/stream", "south-2/x/flights/garbage"} <= {
        key.to_user_string() for key in keys
    }
    assert {key.asset_key for key in graph.asset_check_keys} <= keys
    for key in keys:
        assert graph.get(key).parent_keys <= keys
    groups = {graph.get(key).group_name for key in keys}
    assert groups == {"north_flights", "north_trains", "north_stillstate", "southern"}


def test_a_word_as_prefix_is_one_part_and_not_its_letters(teams: Teams) -> None:
    keys = build_definitions(teams.south, key_prefix="south").resolve_asset_graph().get_all_asset_keys()
    assert dg.AssetKey(["south", "flights", "stream"]) in keys


@pytest.mark.parametrize("prefix", ["", "a/b", "-a", "a b", "x" * 64])
def test_a_prefix_that_names_cannot_have_is_refused(teams: Teams, prefix: str) -> None:
    with pytest.raises(InvalidConfiguration, match="key_prefix"):
        build_definitions(teams.south, key_prefix=[prefix])


def test_a_translator_has_the_last_word_on_what_is_shown_and_none_on_keys(teams: Teams) -> None:
    def ours(spec: dg.AssetSpec) -> dg.AssetSpec:
        return spec.replace_attributes(owners=["team:south"], group_name="everything")

    specs = build_definitions(teams.south, translator=ours).resolve_all_asset_specs()
    assert {spec.group_name for spec in specs} == {"everything"}
    assert all(list(spec.owners) == ["team:south"] for spec in specs)
    with pytest.raises(InvalidConfiguration, match="the translator changed the key"):
        build_definitions(teams.south, translator=lambda spec: spec.replace_attributes(key=["other"]))


class Here:
    """Sensors of a mount with a clock and launchers of the test's."""

    def __init__(self, file: Path, prefix: str, clock: FakeClock, instance: dg.DagsterInstance, root: JobRoot) -> None:
        self.prefix, self.instance = prefix, instance
        self.resource = resource(file, clock, {"flights": root})
        self.defs = build_definitions(load_spec(file), self.resource, key_prefix=prefix)

    def tick(self, name: str) -> dg.SensorResult:
        with dg.build_sensor_context(
            instance=self.instance, resources={f"{self.prefix}_stillstate": self.resource}
        ) as context:
            result = self.defs.resolve_sensor_def(f"{self.prefix}_{name}")(context)
        assert isinstance(result, dg.SensorResult)
        return result


@pytest.fixture
def both(teams: Teams, clock: FakeClock, instance: dg.DagsterInstance) -> Callable[..., tuple[Here, JobRoot]]:
    def build(prefix: str) -> tuple[Here, JobRoot]:
        file = getattr(teams, prefix)
        root = JobRoot(file.parent / "state", "flights", clock)
        root.start()
        root.checkpoint()
        return Here(file, prefix, clock, instance, root), root

    return build


def test_sensors_publish_to_the_keys_of_their_mount(both: Callable[..., Any]) -> None:
    here, _ = both("north")
    keys = {event.asset_key.to_user_string() for event in here.tick("stillstate_progress").asset_events}
    assert keys == {"north/flights/checkpoints", "north/flights/stream", "north/stillstate/overview"}
    assert {e.asset_key.path[0] for e in here.tick("stillstate_recovery").asset_events} == {"north"}
    assert {e.asset_key.path[0] for e in here.tick("stillstate_materialization").asset_events} == {"north"}
    assert {e.asset_key.path[0] for e in here.tick("stillstate_checks").asset_events} == {"north"}
    assert {e.asset_key.path[0] for e in here.tick("stillstate_desired_state").asset_events} == {"north"}


def test_streams_of_one_name_in_two_files_do_not_take_each_others_runs_for_their_own(
    both: Callable[..., Any], clock: FakeClock
) -> None:
    """A recovery of the one must not count as an attempt of the other, nor hold its place in the queue."""
    (north, _), (south, _) = both("north"), both("south")
    clock.advance_s(3600)
    (request,) = north.tick("stillstate_recovery").run_requests or ()
    assert request.tags["stillstate/job"] == "north/flights"
    job = north.defs.resolve_job_def(str(request.job_name))
    result = job.execute_in_process(
        instance=north.instance, run_config=dict(request.run_config), tags=dict(request.tags), raise_on_error=False
    )
    assert result.success
    clock.advance_s(3600)
    (other,) = south.tick("stillstate_recovery").run_requests or ()
    assert (other.run_key, other.tags["stillstate/job"]) == ("south/flights:1:1", "south/flights")
    assert result.dagster_run.tags["stillstate/job"] == "north/flights"


@pytest.mark.parametrize("mode", MODES)
def test_a_foreign_code_location_mounts_two_teams_and_its_sensors_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: FakeClock, mode: str
) -> None:
    """Dagster's own daemon loop over its own server of that location, which is a process of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    teams = Teams.write(tmp_path, mode)
    clock.at_ms = SYSTEM_CLOCK.now_ms()
    for file in (teams.north, teams.south):
        root = JobRoot(file.parent / "state", "flights", clock)
        root.start()
        root.checkpoint()
        root.beat("finished")
    file = tmp_path / "location.py"
    file.write_text(LOCATION.format(north=str(teams.north), south=str(teams.south)))
    target = PythonFileTarget(str(file), "defs", str(tmp_path), "foreign")
    with instance_for_test() as instance, create_test_daemon_workspace_context(target, instance) as workspace:
        list(execute_sensor_iteration(workspace, logging.getLogger("daemon"), None, None))
        entry = workspace.create_request_context().get_code_location_entries()["foreign"]
        assert entry.load_error is None
        assert entry.code_location is not None
        (repository,) = entry.code_location.get_repositories().values()
        report = repository.asset_graph.get(dg.AssetKey("report"))
        assert report.parent_keys == {dg.AssetKey(["north", "flights", "checkpoints"])}
        for sensor in repository.get_sensors():
            (tick,) = instance.get_ticks(sensor.get_remote_origin_id(), sensor.selector_id)
            assert tick.error is None, (sensor.name, tick.error)
            assert tick.status is not TickStatus.FAILURE
        stored = {key.to_user_string() for key in instance.all_asset_keys()}
    for prefix in ("north", "south-2/x"):
        things = {f"{prefix}/flights/checkpoints", f"{prefix}/flights/stream", f"{prefix}/stillstate/overview"}
        assert things <= stored


def test_a_defs_yaml_mounts_a_file(tmp_path: Path) -> None:
    """As Dagster finds it in a project's folder: a component by its public name."""
    defs = tmp_path / "src" / "project" / "defs"
    write_team(defs / "north", "flights", "trains")
    write_team(defs / "files", "flights")
    for package in (defs.parent, defs):
        (package / "__init__.py").write_text("")
    (tmp_path / "dg.toml").write_text('directory_type = "project"\n[project]\nroot_module = "project"\n')
    attributes = "{key_prefix: [north], group: northern}"
    (defs / "north" / "defs.yaml").write_text(f"type: stillstate.StillstateComponent\nattributes: {attributes}\n")
    (defs / "south").mkdir()
    (defs / "south" / "defs.yaml").write_text(
        "type: stillstate.StillstateComponent\nattributes: {config: ../files/stillstate.yaml, key_prefix: [south]}\n"
    )
    done = python(
        "import dagster as dg; from pathlib import Path; "
        f"defs = dg.load_from_defs_folder(path_within_project=Path({str(tmp_path)!r})); "
        "dg.Definitions.validate_loadable(defs); "
        "print(sorted({k.path[0] for k in defs.resolve_asset_graph().get_all_asset_keys()}))",
        tmp_path / "src",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['north', 'south']"


def test_the_guides_definitions_load_as_printed_beside_packages_with_our_folders_names(tmp_path: Path) -> None:
    """Dagster loads a file from the folder it was started in, where a project has its own `assets` and `orchestration`."""
    text = (ROOT / "docs/guide.md").read_text().split("\n### In a Dagster of your own\n")[1]
    (block,) = re.findall(r"```python\n(.*?)```", text.split("\n## ")[0], re.S)
    (tmp_path / "definitions.py").write_text(block)
    write_team(tmp_path / "streams", "legs")
    write_packages_with_our_folders_names(tmp_path)
    listed = subprocess.run(
        [sys.executable, "-m", "dagster", "job", "list", "-f", "definitions.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DAGSTER_HOME": str(tmp_path)},
    )
    assert listed.returncode == 0, listed.stderr
    assert "Job: streams_start_legs" in listed.stdout


@pytest.mark.parametrize("module", [SUPERVISOR_MODULE, "stillstate.orchestration.cli"])
def test_what_a_driver_is_started_with_is_ours_in_any_folder(tmp_path: Path, module: str) -> None:
    """`python -m` looks into the working folder first, which is the user's."""
    write_packages_with_our_folders_names(tmp_path)
    found = subprocess.run(
        [sys.executable, "-c", f"import importlib.util; print(importlib.util.find_spec({module!r}).origin)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert found.stdout.startswith(str(ROOT)), found.stderr


def write_packages_with_our_folders_names(folder: Path) -> None:
    for name in ("assets", "orchestration"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("")
        (folder / name / "supervisor.py").write_text("raise SystemExit('this is the user s own package')")


def test_the_public_names_are_what_they_say_and_cost_no_import_of_dagster_or_spark(tmp_path: Path) -> None:
    done = python(
        "import sys, stillstate; first = sorted({'dagster', 'pyspark'} & set(sys.modules)); "
        "print(first, all(getattr(stillstate, n) is not None for n in stillstate.__all__))",
        tmp_path,
    )
    assert done.stdout.strip() == "[] True", done.stderr
    with pytest.raises(ImportError, match="cannot import name 'build_definition'"):
        from stillstate import build_definition  # noqa: F401


def python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(part) for part in (ROOT, *path))
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=120,
    )
