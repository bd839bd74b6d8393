"""`stillstate convert` and `import-spark`: what they print, refuse, and end with. The golden job root of format 2 is the source."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from job_roots import SECRET
from rich.console import Console
from typer.testing import CliRunner, Result

from state_runtime.maintenance.convert import snapshot as convert_module
from state_runtime.snapshot.locate import open_place
from stillstate.orchestration.cli import app
from stillstate.orchestration.commands.places import named_place
from stillstate.orchestration.show.progress import PhaseBar

GOLDEN = Path(__file__).parents[1] / "state_runtime" / "golden" / "format-2"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)  # where no stillstate.yaml is
    shutil.copytree(GOLDEN, tmp_path / "golden")
    return str(tmp_path / "golden")


@pytest.mark.parametrize("command", ["convert", "import-spark"])
def test_the_commands_have_help_with_an_example(command: str) -> None:
    text = call(command, "--help").output
    assert f"Example: stillstate {command}" in text
    assert "--json" in text


def test_a_conversion_says_what_it_did_and_is_not_done_twice(source: str, tmp_path: Path) -> None:
    target = str(tmp_path / "target")
    done = call("convert", source, target, "--to", "canonical", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["format"], told["snapshot_id"], told["repeated"], told["states_compared"]) == (
        "canonical",
        5,
        False,
        4,
    )
    assert open_place(target).manifest.snapshot_format == "canonical"
    again = call("convert", f"{source}@5", target, "--to", "canonical")
    assert again.exit_code == 0
    assert "was converted before; nothing was done" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("SOURCE", "SOURCE/x", "--to", "canonical"), 2, "choose a folder of its own"),
        (("SOURCE@77", "TARGET", "--to", "canonical"), 2, "has no snapshot 77"),
        (("SOURCE@x", "TARGET", "--to", "canonical"), 2, "is not a snapshot id"),
        (("nowhere", "TARGET", "--to", "canonical"), 2, "neither a job root nor a savepoint"),
        (("SOURCE", "TARGET", "--to", "parquet"), 2, "canonical"),
    ],
)
def test_what_is_wrong_is_said(
    source: str, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    given = [a.replace("SOURCE", source).replace("TARGET", str(tmp_path / "t")) for a in arguments]
    result = call("convert", *given)
    assert result.exit_code == code
    assert message in result.output
    assert not (tmp_path / "t").exists()


def test_a_difference_ends_with_the_code_of_damage(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_module, "compare_here", lambda *_: ["operator 'op', state 'count': 2 rows"])
    monkeypatch.setitem(convert_module.convert.__kwdefaults__ or {}, "compare", convert_module.compare_here)
    result = call("convert", source, str(tmp_path / "t"), "--to", "canonical", "--json")
    assert result.exit_code == 5
    error = json.loads(result.stderr)["error"]
    assert error["kind"] == "corrupt"
    assert "state 'count': 2 rows" in error["message"]
    assert not list((tmp_path / "t").glob("snapshots/*/manifest.json"))


def test_a_job_of_the_configuration_is_a_place(write_config: Callable[..., Path]) -> None:
    """With the options of its store, for itself and for places in the same bucket; never shown."""
    text = (
        "version: 1\njobs:\n  flights:\n    entry_point: nowhere.job:build\n    store: s3://bucket/state\n"
        f"    storage_options: {{secret: {SECRET}}}\n"
    )
    config = write_config(text=text)
    mine = named_place("flights@12", config)
    assert mine.text == "s3://bucket/state/flights@12"
    assert mine.options["secret"] == SECRET
    assert SECRET not in repr(mine)
    assert named_place("s3://bucket/archive/x", config).options["secret"] == SECRET
    for elsewhere in ("/data/elsewhere", "s3://another/archive/x"):
        place = named_place(elsewhere, config)
        assert (place.text, dict(place.options)) == (elsewhere, {})


def test_without_a_configuration_places_are_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named_place("s3://bucket/state/flights", None).text == "s3://bucket/state/flights"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ck", "t"), "--job (of stillstate.yaml) or with --entry-point"),
        (("ck", "--entry-point", "m:f"), "say where the snapshot goes"),
        (("ck", "t", "--entry-point", "m:f", "--option", "x"), "--option 'x' is not NAME=VALUE"),
        (("ck", "t", "--entry-point", "m:f", "--operator", "first=a"), "needs Spark's operator id"),
    ],
)
def test_an_import_that_cannot_be_is_refused_before_spark_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    from state_runtime.spark import session

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "build_session", lambda *_: pytest.fail("it was started"))
    result = call("import-spark", *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_bar_is_only_shown_to_people() -> None:
    with PhaseBar("convert", Console(file=None, force_terminal=False, quiet=False, stderr=True)) as bar:
        bar.show("fold", 1, 2)
        bar.show("copy", 3, 3)
    assert bar._bar.disable
