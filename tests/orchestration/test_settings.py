"""A setting is stated once, in its model: the runtime, the file, the JSON schema and the reference page have it from there."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.fields import fields_of
from state_runtime.base.settings import (
    CheckpointSettings,
    JobSettings,
    MaterializationSettings,
    RetentionPolicy,
    SettingsGroup,
)
from stillstate.orchestration.cli import app
from stillstate.orchestration.config.reference import SCHEMA_NAME, groups_below, json_schema, page, schema_text
from stillstate.orchestration.config.spec import JobSpec, RetentionSpec, Spec, load_spec, to_settings
from tests.job_settings import job_settings

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
HIDDEN = {"name", "file"}  # filled in when the file is read
SCHEMA = json_schema()
Fields = list[tuple[str, type[SettingsGroup], str]]


def fields(root: type[SettingsGroup]) -> Fields:
    return [(path, group, name) for path, group in groups_below(root) for name in group.model_fields]


def limits(group: type[SettingsGroup], name: str) -> dict[str, float]:
    found = group.model_fields[name].metadata
    return {kind: getattr(m, kind) for m in found for kind in ("ge", "gt", "le", "lt") if hasattr(m, kind)}


def choices(group: type[SettingsGroup], name: str) -> tuple[str, ...]:
    return tuple(c for c in get_args(group.model_fields[name].annotation) if isinstance(c, str))


def described(group: type[SettingsGroup]) -> dict[str, Any]:
    found: dict[str, Any] = SCHEMA if group is Spec else SCHEMA["$defs"][group.__name__]
    return found["properties"]


NUMBERS = [field for field in fields(JobSettings) if limits(*field[1:])]
CHOICES = [field for field in fields(JobSettings) if choices(*field[1:])]


def nested(path: str, name: str, value: Any) -> dict[str, Any]:
    return {path: {name: value}} if path else {name: value}


def file_with(write: Callable[..., Path], given: dict[str, Any]) -> Path:
    """Recovery's own bound is twice the heartbeat's; it is off where that is at its end."""
    job = {"entry_point": "a:b", "store": "state", **given}
    job["recovery"] = {"enabled": False, **job.get("recovery", {})}
    return write(text=yaml.safe_dump({"version": 1, "jobs": {"flights": job}}))


def taken(write: Callable[..., Path], given: dict[str, Any]) -> JobSettings:
    return to_settings(load_spec(file_with(write, given)).job("flights"))


# --- one truth -----------------------------------------------------------------------------------------------------


def test_every_number_of_the_runtime_has_two_bounds() -> None:
    for path, group, name in fields(JobSettings):
        if {int, float} & {group.model_fields[name].annotation, *get_args(group.model_fields[name].annotation)}:
            assert {kind[0] for kind in limits(group, name)} == {"g", "l"}, f"{path}.{name}"


@pytest.mark.parametrize(("path", "group", "name"), NUMBERS, ids=str)
def test_a_bound_that_python_refuses_the_file_refuses_with_the_same_sentence(
    write_config: Callable[..., Path], path: str, group: type[SettingsGroup], name: str
) -> None:
    """And the ends of the range reach the runtime; an editor's schema has the same range."""
    found = limits(group, name)
    low, high = found.get("ge", found.get("gt", 0.0)), found["le"]
    schema = described(dict(groups_below(JobSpec))[path])[name]
    for value in (high,) if "gt" in found else (low, high):
        settings = taken(write_config, nested(path, name, value))
        assert getattr(getattr(settings, path) if path else settings, name) == value
        jsonschema.validate(value, schema)
    for value in (low if "gt" in found else low - 1, high + 1):
        with pytest.raises(InvalidConfiguration) as in_python:
            group(**{name: value})
        with pytest.raises(InvalidConfiguration) as in_file:
            taken(write_config, nested(path, name, value))
        said = str(in_python.value)
        assert said.startswith(f"{group.__name__}: {name}: must be ")
        assert said.endswith(f" (got {value})")
        key = f"{path}.{name}" if path else name
        assert str(in_file.value).endswith(f"jobs.flights.{key}: " + said.split(": ", 2)[2])
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(value, schema)


@pytest.mark.parametrize(("path", "group", "name"), CHOICES, ids=str)
def test_a_choice_reaches_the_runtime_and_another_word_is_refused_with_the_same_sentence(
    write_config: Callable[..., Path], path: str, group: type[SettingsGroup], name: str
) -> None:
    for choice in choices(group, name):
        settings = taken(write_config, nested(path, name, choice))
        assert getattr(getattr(settings, path) if path else settings, name) == choice
    with pytest.raises(InvalidConfiguration) as in_python:
        group(**{name: "other"})
    with pytest.raises(InvalidConfiguration) as in_file:
        taken(write_config, nested(path, name, "other"))
    assert str(in_file.value).endswith(str(in_python.value).split(": ", 1)[1])


@pytest.mark.parametrize(("path", "group", "name"), fields(JobSettings), ids=str)
def test_every_setting_of_the_runtime_is_reached_by_the_file(
    write_config: Callable[..., Path], path: str, group: type[SettingsGroup], name: str
) -> None:
    default = getattr(group(), name)
    if isinstance(default, SettingsGroup):
        return  # its fields are looked at themselves
    if (path, group, name) in NUMBERS:
        value: Any = limits(group, name)["le"]
    elif words := choices(group, name):
        value = next(word for word in words if word != default)
    else:
        value = not default if isinstance(default, bool) else "/elsewhere" if isinstance(default, str) else ["one"]
    settings = taken(write_config, nested(path, name, value))
    reached = getattr(getattr(settings, path) if path else settings, name)
    assert reached == (tuple(value) if isinstance(value, list) else value) != default
    assert type(getattr(settings, path) if path else settings) is group, "and not what Dagster reads beside it"


@pytest.mark.parametrize(("path", "group"), list(groups_below(Spec)), ids=str)
def test_every_field_is_in_the_schema_and_on_the_page_with_its_default(path: str, group: type[SettingsGroup]) -> None:
    properties = described(group)
    assert set(properties) - {"defaults"} == set(group.model_fields) - HIDDEN
    for name, field in group.model_fields.items():
        if name in HIDDEN:
            continue
        assert re.fullmatch(r"[A-Z`{].*\.", properties[name]["description"]), f"{path}.{name} has no sentence"
        default = field.get_default(call_default_factory=True)
        if not (field.is_required() or isinstance(default, SettingsGroup) or field.default_factory is not None):
            assert properties[name]["default"] == (list(default) if isinstance(default, tuple) else default)
    if path != "jobs.trigger":  # whose two forms are said where it is
        title = {"": "The file", "jobs": "A job"}.get(path, path.removeprefix("jobs."))
        rows = re.findall(r"^\| `(\w+)` \|", page().split(f"\n## {title}\n")[1].split("\n## ")[0], re.M)
        groups = {below for below, _ in groups_below(Spec)} - {"jobs.trigger"}
        assert set(rows) == {name for name in group.model_fields if f"{path}.{name}".strip(".") not in groups} - HIDDEN


def test_the_reference_page_is_made_from_the_models() -> None:
    """After a change of a setting: `make reference`."""
    assert (DOCS / "settings.md").read_text() == page()


def test_a_misspelt_setting_names_the_one_that_was_meant(write_config: Callable[..., Path]) -> None:
    said = "unknown key; did you mean `interval_s`?"
    with pytest.raises(InvalidConfiguration, match=re.escape(f"CheckpointSettings: intervall_s: {said}")):
        CheckpointSettings(intervall_s=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidConfiguration, match=re.escape(f"JobSettings: checkpoint.intervall_s: {said}")):
        JobSettings(checkpoint={"intervall_s": 1})  # type: ignore[arg-type]
    with pytest.raises(InvalidConfiguration, match=re.escape(f"jobs.flights.checkpoint.intervall_s: {said}")):
        taken(write_config, {"checkpoint": {"intervall_s": 1}})


def test_a_value_that_may_be_a_secret_is_in_no_message() -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        JobSettings(parallelism="hunter2", backend="hunter2")  # type: ignore[arg-type]
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(InvalidConfiguration, match=r"interval_s: must be a finite number"):
        CheckpointSettings(interval_s=value)


def test_settings_travel_to_tasks() -> None:
    settings = job_settings(checkpoint_interval_s=3, materialize=False, keep_tags=("release",))
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert JobSettings.model_validate(settings.model_dump(mode="json")) == settings


def test_a_plan_of_retention_is_stored_with_the_rules_only() -> None:
    """In this order: the digest by which a plan is executed is of these bytes."""
    rules = "keep_last keep_within_s keep_hourly keep_daily keep_weekly keep_monthly keep_yearly keep_tags max_age_s max_count"
    assert list(fields_of(RetentionPolicy.of(RetentionSpec()))) == [*rules.split(), "failed_ttl_s"]


# --- names of 0.1.0 ------------------------------------------------------------------------------------------------

FORMER = {
    "checkpoint": "heartbeat_interval_s inline_bytes_max checkpoint_interval_s checkpoint_batches checkpoint_mode "
    "aligned_timeout_s unaligned_epoch_s max_inflight_bytes pending_bytes_max tolerable_failures drain_epochs_max",
    "upload": "upload_timeout_s upload_attempts_max upload_in_flight_bytes_max upload_deadline_s upload_bytes_per_s",
    "local_recovery": "local_bytes_max local_copies_max",
    "materialization": "materialize_interval_s materialize_min_bytes materialize_ratio materialize_max_segments "
    "materialize_replay_s materialize_takeover_s materialize_cells_max materialize_cell_bytes_max",
    "recovery": "stall_timeout_s",
    "retention": "retained_checkpoints",
}


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group, names in FORMER.items() for name in names.split()]
)
def test_a_former_name_of_a_setting_warns_and_is_the_present_one(group: str, name: str) -> None:
    kind = type(getattr(JobSettings(), group))
    key = name if name in kind.model_fields else name.split("_", 1)[1]
    value = "unaligned" if key == "mode" else limits(kind, key)["le"]
    with pytest.warns(DeprecationWarning, match=rf"JobSettings\.{name} is {group}\.{key} now") as warned:
        settings: Any = JobSettings(**{name: value})
    assert warned[0].filename == __file__, "where to mend it"
    assert settings == JobSettings(**{group: kind(**{key: value})})  # type: ignore[arg-type]
    with pytest.warns(DeprecationWarning, match=name) as warned:
        assert getattr(settings, name) == value
    assert warned[0].filename == __file__


def test_the_former_switch_for_materialization_is_who_does_it() -> None:
    with pytest.warns(DeprecationWarning, match="materialize"):
        settings: Any = JobSettings(materialize=False, materialize_ratio=0.5, local_recovery=False)  # type: ignore[call-arg, arg-type]
    assert settings.materialization == MaterializationSettings(by="dagster", ratio=0.5)
    assert not settings.local_recovery.enabled
    with pytest.warns(DeprecationWarning, match=r"materialization\.by"):
        assert settings.materialize is False


# --- editors -------------------------------------------------------------------------------------------------------


def test_the_schema_is_a_schema_and_takes_the_files_that_we_have() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    files = [ROOT / "orchestration/starter/files/stillstate.yaml", ROOT / "examples/flights/stillstate.yaml"]
    (guide,) = re.findall(
        r"```yaml\n(.*?)```", (DOCS / "guide.md").read_text().split("\n## stillstate.yaml\n")[1], re.S
    )
    for text in (*(file.read_text() for file in files), guide, *clusters()):
        jsonschema.validate(yaml.safe_load(text), SCHEMA)


@pytest.mark.parametrize(
    "wrong",
    [{"paralelism": 2}, {"checkpoint": {"interval_s": "a minute"}}, {"launcher": {"kind": "yarn"}}, {"trigger": {}}],
    ids=str,
)
def test_the_schema_refuses_what_the_file_may_not_have(
    write_config: Callable[..., Path], wrong: dict[str, Any]
) -> None:
    with pytest.raises(InvalidConfiguration):
        taken(write_config, wrong)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"version": 1, "jobs": {"flights": wrong}}, SCHEMA)


def test_the_command_prints_the_schema_or_writes_it(tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, ["schema"])
    assert printed.exit_code == 0
    assert json.loads(printed.output) == SCHEMA
    file = tmp_path / "some.json"
    assert CliRunner().invoke(app, ["schema", "--output", str(file)]).exit_code == 0
    assert file.read_text() == printed.output == schema_text()
    refused = CliRunner().invoke(app, ["schema", "--output", str(tmp_path / "no" / "folder.json")])
    assert refused.exit_code == 2
    assert "cannot be written" in refused.output


def test_the_file_that_init_writes_names_the_schema_beside_it(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["init", str(tmp_path)]).exit_code == 0
    first = (tmp_path / "stillstate.yaml").read_text().split("\n")[0]
    assert first == f"# yaml-language-server: $schema={SCHEMA_NAME}"
    assert (tmp_path / SCHEMA_NAME).read_text() == schema_text()


# --- files in the documents ----------------------------------------------------------------------------------------


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


def test_former_names_beside_the_former_switch_of_local_recovery_are_understood() -> None:
    """It was a boolean beside them."""
    with pytest.warns(DeprecationWarning, match="local_bytes_max"):
        made = JobSettings(local_recovery=False, local_bytes_max=5)  # type: ignore[call-arg, arg-type]
    assert (made.local_recovery.enabled, made.local_recovery.bytes_max) == (False, 5)
    with (
        pytest.warns(DeprecationWarning, match="checkpoint_interval_s"),
        pytest.raises(InvalidConfiguration, match="checkpoint"),
    ):
        JobSettings(checkpoint=None, checkpoint_interval_s=5)  # type: ignore[call-arg, arg-type]
