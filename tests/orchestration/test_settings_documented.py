"""The documents name every setting, with the default that it has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from state_runtime.base.limits import GIB, KIB, MIB
from stillstate.orchestration.config.launcher import LauncherSpec
from stillstate.orchestration.config.notify import NotifySpec
from stillstate.orchestration.config.sections import SECTIONS, DagsterSpec, ObservationSpec
from stillstate.orchestration.config.spec import JobSpec, load_spec
from stillstate.orchestration.config.upkeep import UPKEEP_SECTIONS

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROW = re.compile(r"^\| `([a-z_.]+)` \| ([^|]+) \| ([^|]+) \|$", re.M)
UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB}


def documented() -> dict[str, str]:
    section = (DOCS / "operations.md").read_text().split("\n## Settings\n")[1].split("\n## ")[0]
    return {key: default.strip(" `") for key, default, _ in ROW.findall(section)}


def settings() -> dict[str, object]:
    found: dict[str, object] = {}
    documented_here = ("checkpoint", "upload", "local_recovery", "materialization", "retention", "migration")
    sections = {**{name: SECTIONS[name] for name in documented_here}, **UPKEEP_SECTIONS, "launcher": LauncherSpec}
    for section, model in sections.items():
        for name, field in model.model_fields.items():
            found[f"{section}.{name}"] = field.get_default(call_default_factory=True)
    for section, model in {"observation": ObservationSpec, "dagster": DagsterSpec, "notify": NotifySpec}.items():
        for name, field in model.model_fields.items():
            found[f"{section}.{name}"] = field.get_default(call_default_factory=True) or None
    beside = ("changelog", "compression", "placement", "partial_aggregation", "task_bytes_max")
    return found | {name: JobSpec.model_fields[name].default for name in beside}


def test_the_table_of_settings_is_complete() -> None:
    assert set(documented()) == set(settings())


@pytest.mark.parametrize("key", sorted(settings()))
def test_the_table_has_the_default(key: str) -> None:
    said, default = documented()[key], settings()[key]
    if default in (None, "", [], {}):
        assert said in ("none", "the job's")
    elif isinstance(default, list):
        assert said == ", ".join(default)
    elif isinstance(default, bool | str):
        assert said == str(default).lower()
    else:
        number, _, unit = said.partition(" ")
        assert isinstance(default, int | float)
        assert float(number) * UNITS.get(unit, 1) == default


def test_the_guide_s_file_is_valid(tmp_path: Path) -> None:
    text = (DOCS / "guide.md").read_text().split("\n## stillstate.yaml\n")[1]
    (yaml,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    (tmp_path / "stillstate.yaml").write_text(yaml)
    assert load_spec(tmp_path / "stillstate.yaml").job("flights").materialization.by == "driver"


def clusters() -> list[str]:
    text = (DOCS / "operations.md").read_text().split("\n## Drivers on a cluster\n")[1].split("\n## ")[0]
    return re.findall(r"```yaml\n(.*?)```", text, re.S)


@pytest.mark.parametrize(("text", "master"), list(zip(clusters(), ("spark://", "yarn", "k8s://"), strict=True)))
def test_the_files_for_clusters_are_valid(tmp_path: Path, text: str, master: str) -> None:
    (tmp_path / "stillstate.yaml").write_text(text)
    environment = {"STATE_KEY": "a", "STATE_SECRET": "b"}
    job = load_spec(tmp_path / "stillstate.yaml", environ=environment).job("flights")
    assert job.launcher.kind == "spark-submit"
    assert job.launcher.master.startswith(master)
