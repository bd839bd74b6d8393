"""The documents name every setting, with the default that it has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestration.config.sections import SECTIONS
from orchestration.config.spec import JobSpec, load_spec
from state_runtime.base.limits import GIB, KIB, MIB

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROW = re.compile(r"^\| `([a-z_.]+)` \| ([^|]+) \| ([^|]+) \|$", re.M)
UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB}


def documented() -> dict[str, str]:
    section = (DOCS / "operations.md").read_text().split("\n## Settings\n")[1].split("\n## ")[0]
    return {key: default.strip(" `") for key, default, _ in ROW.findall(section)}


def settings() -> dict[str, object]:
    found: dict[str, object] = {}
    for section in ("checkpoint", "upload", "local_recovery", "materialization", "retention"):
        for name, field in SECTIONS[section].model_fields.items():
            found[f"{section}.{name}"] = field.get_default(call_default_factory=True)
    return found | {name: JobSpec.model_fields[name].default for name in ("changelog", "compression", "placement")}


def test_the_table_of_settings_is_complete() -> None:
    assert set(documented()) == set(settings())


@pytest.mark.parametrize("key", sorted(settings()))
def test_the_table_has_the_default(key: str) -> None:
    said, default = documented()[key], settings()[key]
    if default in (None, "", []):
        assert said in ("none", "the job's")
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
