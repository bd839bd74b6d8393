"""The pages of the documentation as somebody follows them: files written and commands typed as they are printed."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import typer

from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_store
from stillstate.orchestration.cli import app
from stillstate.orchestration.starter.folder import WRITTEN, text_of
from tests.s3_server import CountingServer
from tests.typed import ROOT, Block, Shell, blocks, wait_until

DOCS = ROOT / "docs"
FOLDER = (DOCS / "guide.md").read_text().split("\n## A folder to begin with\n")[1].split("\n## ")[0]
WITHOUT_JSON = {"schema", "dagster", "metrics", "prepare"}


def block(language: str) -> str:
    """The one block of a language in the guide's section about the starter."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", FOLDER, re.MULTILINE | re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def test_init_writes_the_very_files_that_the_guide_shows() -> None:
    assert block("python") == text_of("flights_job.py.txt")
    assert block("yaml") == text_of("stillstate.yaml")


def test_all_that_init_writes_is_packaged() -> None:
    folder = ROOT / "orchestration" / "starter" / "files"
    assert {path.name for path in folder.iterdir()} == set(WRITTEN.values())


def test_the_guide_names_the_commands_without_json_and_all_have_an_example() -> None:
    def commands(group: object, name: str) -> Iterator[tuple[str, typer.core.TyperCommand]]:
        if isinstance(group, typer.core.TyperGroup):
            for word, each in group.commands.items():
                yield from commands(each, f"{name} {word}".strip())
        elif isinstance(group, typer.core.TyperCommand):
            yield name, group

    found = dict(commands(typer.main.get_command(app), ""))
    assert len(found) > 30
    assert {name for name, each in found.items() if not any("--json" in p.opts for p in each.params)} == WITHOUT_JSON
    assert not {name for name, each in found.items() if "Example: " not in (each.epilog or "")}
    (said,) = re.findall(r"have `--json`\n\((.*?) have not\)", FOLDER)
    assert set(re.findall(r"`(\w+)`", said)) == WITHOUT_JSON


def test_files_and_commands_of_a_page_are_told_apart() -> None:
    text = "Do\n\n    a b   # why\n\n    c\n\nand\n\n```python\n# x.py\nf()\n```\n\n```python\ng()\n```\n"
    found = list(blocks(text))
    assert [(each.file, each.commands()) for each in found if not each.file] == [("", ["a b", "c"])]
    assert [each for each in found if each.file] == [Block("x.py", "# x.py\nf()\n")]


@pytest.mark.parametrize("page", ["tutorial.md", "how-to.md"])
def test_each_block_of_code_on_these_pages_is_one_that_a_test_runs(page: str) -> None:
    """A fenced block is a file with a name: another one would be printed and never tried."""
    text = (DOCS / page).read_text()
    fences = re.findall(r"^```\w+$", text, re.MULTILINE)
    assert len(fences) == len([each for each in blocks(text) if each.file]) > 2


# --- typed ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def archive() -> Iterator[CountingServer]:
    with CountingServer(bucket="archive") as server:
        yield server


@pytest.fixture
def shell(tmp_path: Path, archive: CountingServer) -> Iterator[Shell]:
    """A terminal in an empty folder, with a store s3://archive; jobs that are left running are stopped at the end."""
    shell = Shell(
        tmp_path,
        AWS_ENDPOINT_URL=archive.endpoint,
        AWS_ACCESS_KEY_ID=archive.options["key"],
        AWS_SECRET_ACCESS_KEY=archive.options["secret"],
        AWS_DEFAULT_REGION="us-east-1",
    )
    yield shell
    for job in ("legs", "legs2", "shops"):
        subprocess.run(
            ["bash", "-c", f"stillstate stop {job}"],
            cwd=shell.folder, env=shell.environment, check=False, capture_output=True, timeout=120,
        )  # fmt: skip


def follow(shell: Shell, text: str, after: dict[str, Callable[[], object]] | None = None) -> None:
    """Do what a page says. After the commands that are named (each as often as it comes) something is looked at."""
    for each in blocks(text):
        if each.file:
            shell.write(each)
        for command in each.commands() if not each.file else []:
            shell.run(command)
            if after and command in after:
                after[command]()


def has_loaded(typed: str) -> bool:
    """Whether the page that Dagster's command named shows both jobs."""
    found = re.search(r"Its page: (http://\S+)", typed)
    if found is None:
        return False
    query = json.dumps({"query": "{ assetNodes { assetKey { path } } }"}).encode()
    request = urllib.request.Request(f"{found[1]}/graphql", query, {"Content-Type": "application/json"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=15) as response:
            nodes = json.loads(response.read())["data"]["assetNodes"]
    except OSError:
        return False
    paths = {tuple(node["assetKey"]["path"]) for node in nodes}
    return {("legs", "stream"), ("legs2", "stream")} <= paths


@pytest.mark.long
@pytest.mark.spark
def test_the_guides_folder_does_what_it_says(shell: Shell, tmp_path: Path) -> None:
    store = tmp_path / "flights" / "state" / "legs"
    until_ctrl_c = {
        "stillstate run legs": lambda typed: len(list(store.glob("snapshots/*/manifest.json"))) > 1,
        "stillstate dagster": has_loaded,
    }
    for each in blocks(FOLDER):
        for command in each.commands() if not each.file else []:
            if command in until_ctrl_c:
                shell.run_until(command, until_ctrl_c[command])
            else:
                shell.run(command)
    catalog = Catalog(open_store(str(tmp_path / "flights" / "state"), {}), "legs2")
    newest = catalog.manifest(max(catalog.snapshot_ids()))
    assert newest.progress is not None
    assert newest.progress.state_rows > 0  # what the savepoint brought: it had read all input
    assert pq.read_table(tmp_path / "flights" / "out" / "legs").num_rows == 3 * 1000 + 5 * 200
    assert (tmp_path / "flights" / "archive" / "legs").is_dir()


@pytest.mark.long
@pytest.mark.spark
def test_the_tutorial_holds_what_it_promises(shell: Shell) -> None:
    """A killed driver loses no order and counts none twice; a changed query counts on; what is taken back is read again."""
    text = (DOCS / "tutorial.md").read_text()
    orders = iter((2000, 2500, 3000, 3000))
    terms = iter((1, 2))

    def told(command: str) -> list[dict[str, object]]:
        found = json.loads(shell.run(f"{command} --json"))
        return list(found["rows"] if isinstance(found, dict) else found)

    def has_another_driver() -> None:
        term = next(terms)
        wait_until(lambda: [(job["term"], job["health"]) for job in told("stillstate jobs")] == [(term, "healthy")])

    def has_counted() -> None:
        count = next(orders)
        wait_until(lambda: sum(int(str(r["count"])) for r in told("stillstate query shops aggregate")) == count)

    follow(
        shell, text, {"stillstate jobs": has_another_driver, "stillstate query shops aggregate": has_counted}
    )  # fmt: skip
    assert (next(orders, None), next(terms, None)) == (None, None), "the page has the commands that were expected"
    newest: dict[str, tuple[int, int]] = {}
    for file in (shell.folder / "out").glob("*.parquet"):
        for row in pq.read_table(file).to_pylist():
            newest[row["shop"]] = max(newest.get(row["shop"], (0, 0)), (row["epoch"], row["orders"]))
    assert sum(orders for _, orders in newest.values()) == 3000


@pytest.mark.long
@pytest.mark.spark
def test_the_how_tos_do_what_they_say(shell: Shell, archive: CountingServer) -> None:
    """In the starter's folder, with a job that has read its input; and beside a query of Spark's that was stopped."""
    for command in ("stillstate init flights", "cd flights", "stillstate start legs"):
        shell.run(command)
    store = shell.folder / "state" / "legs"
    wait_until(lambda: len(list(store.glob("snapshots/*/manifest.json"))) > 1)
    text = (DOCS / "how-to.md").read_text()
    before, imports = text.split("\n## Import a Spark checkpoint\n")
    imports, days = imports.split("\n## Calendar days")
    seen: list[str] = []

    def has_four_shards() -> None:
        (job,) = [row for row in json.loads(shell.run("stillstate jobs --json")) if row["job"] == "legs"]
        assert (job["health"], job["parallelism"]) == ("healthy", 4)

    looked = {
        "python look.py": lambda: seen.append(shell.run("python look.py")),
        "stillstate rescale legs 4 --yes": has_four_shards,
    }
    follow(shell, before, looked)
    assert "N228" in seen[0]
    assert not store.exists(), "moved"
    moved = Catalog(open_store("s3://archive/state", archive.options), "legs")
    newest = moved.manifest(max(moved.snapshot_ids()))
    assert newest.progress is not None
    assert newest.progress.state_rows > 0

    native = (
        "from pyspark.sql import SparkSession\n"
        "from visits import per_page\n"
        "spark = SparkSession.builder.master('local[1]').config('spark.sql.shuffle.partitions', '2').getOrCreate()\n"
        "query = per_page(spark).writeStream.format('noop').outputMode('update')\n"
        "query.option('checkpointLocation', 'checkpoint').trigger(availableNow=True).start().awaitTermination()\n"
    )
    (shell.folder / "visits").mkdir()
    (shell.folder / "visits" / "1.json").write_text('{"page": "a", "seconds": 1}\n{"page": "a", "seconds": 2}\n')
    for each in blocks(imports):
        if each.file:
            shell.write(each)
            (shell.folder / "native.py").write_text(native)
            shell.run("python native.py")
        for command in each.commands() if not each.file else []:
            shell.run(command)
    imported = Catalog(open_store(str(shell.folder / "state"), {}), "visits")
    assert len(imported.snapshot_ids()) == 1
    assert not [each for each in blocks(days) if not each.file], "commands of that section would not be typed"
