"""Tests of the code itself: rules that no linter knows. Each exception is listed here with its reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("state_runtime", "assets", "orchestration")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
RUNTIME = [file for file in FILES if file.is_relative_to(ROOT / "state_runtime")]
FUNCTION_LINES_MAX = 100


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def every(files: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", files, ids=name_of)


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """All imported modules with their lines, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno


def imports_at_load(tree: ast.Module) -> set[str]:
    """Top-level packages that are imported when the module is; not those in functions or for type checkers."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        found |= {module.split(".")[0] for module, _ in imports(node) if not isinstance(node, ast.FunctionDef)}
    return found


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an expression, empty if it is something else."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


# --- time and randomness -------------------------------------------------------------------------------------------

SOURCES_OF_TIME_AND_CHANCE = {"time", "datetime", "uuid", "random", "secrets"}
MAY_IMPORT_THEM = {
    "state_runtime/clock.py": {"time"},
    "state_runtime/ids.py": {"uuid"},
    # Dates and times as user code sees them; the zone of the session.
    "state_runtime/processors/codec.py": {"datetime", "time"},
    "state_runtime/maintenance/retention.py": {"datetime"},
}
CALENDAR_ONLY = {"state_runtime/maintenance/retention.py"}
"""They take times apart, and read no clock."""
READS_TIME_OR_CHANCE = re.compile(
    r"(time\.(time|time_ns|monotonic|perf_counter|sleep)|datetime\.(now|utcnow|today)|date\.today|uuid\.uuid\d"
    r"|os\.urandom|random\.\w+|np\.random\.\w+|numpy\.random\.\w+|pd\.Timestamp\.now)$"
)


@every(RUNTIME)
def test_time_and_randomness_come_from_clock_and_ids_only(file: Path) -> None:
    """A test can only move a clock that is handed in; a seed can only replay what it draws."""
    tree = ast.parse(file.read_text())
    allowed = MAY_IMPORT_THEM.get(name_of(file), set())
    used = {(module, line) for module, line in imports(tree) if module.split(".")[0] in SOURCES_OF_TIME_AND_CHANCE}
    assert not {(module, line) for module, line in used if module not in allowed}
    if allowed and name_of(file) not in CALENDAR_ONLY:
        return
    calls = {(dotted(n.func), n.lineno) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    assert not {(name, line) for name, line in calls if READS_TIME_OR_CHANCE.search(name)}


@every(RUNTIME)
def test_only_the_edges_take_the_systems_clock_and_ids(file: Path) -> None:
    """Whoever takes SYSTEM_CLOCK or SYSTEM_IDS by name cannot be driven by a test."""
    reasons = {
        "state_runtime/clock.py": "defines it",
        "state_runtime/ids.py": "defines it",
        "state_runtime/job.py": "defaults of the user's constructor",
        "state_runtime/checkpointer.py": "a process that folds has the system's clock: only a run that has it too may start one",
        "state_runtime/snapshot/catalog.py": "default of a constructor that tools call",
        "state_runtime/snapshot/locate.py": "the same",
        "state_runtime/materialize/process.py": "a process of its own: its pipe carries values only",
        "state_runtime/task.py": "runs in a Spark task: nobody can hand anything in",
        "state_runtime/persist.py": "the same",
        "state_runtime/persist_files.py": "the same",
        "state_runtime/shard_access.py": "the same",
        "state_runtime/reading/bootstrap.py": "the same, and defaults of a function that tools call",
        "state_runtime/materialize/job.py": "the same, and defaults of a function that tools call",
        "state_runtime/importing/spark.py": "defaults of a function that tools call",
        "state_runtime/maintenance/convert_job.py": "the same",
        "state_runtime/store/local.py": "names of temporary files, which no result depends on",
        "state_runtime/store/port.py": "names of probe objects, which no result depends on",
    }
    uses = re.search(r"\bSYSTEM_(CLOCK|IDS)\b", file.read_text())
    assert (uses is None) or name_of(file) in reasons


# --- layers --------------------------------------------------------------------------------------------------------

MAY_IMPORT_PYSPARK = {
    "state_runtime/job.py",
    "state_runtime/checkpointer.py",
    "state_runtime/driver.py",
    "state_runtime/gathering.py",
    "state_runtime/task.py",
    "state_runtime/pipeline.py",
    "state_runtime/session.py",
    "state_runtime/epoch_plan.py",
    "state_runtime/placement.py",
    "state_runtime/importing/spark.py",
    "state_runtime/maintenance/convert_job.py",
    "state_runtime/materialize/job.py",
    "state_runtime/reading/bootstrap.py",
    "state_runtime/reading/catalogs.py",
    "state_runtime/reading/spark_source.py",
    "state_runtime/operators.py",
    "state_runtime/run.py",
    "state_runtime/sql.py",
    "state_runtime/streams.py",
    "state_runtime/watermark.py",
    # What user code of pyspark's StatefulProcessor gets and gives.
    "state_runtime/processors/stateful.py",
    "state_runtime/processors/codec.py",
    "state_runtime/processors/refusals.py",
    "state_runtime/processors/rows.py",
}
MAY_IMPORT_PANDAS = {"state_runtime/processors/frames.py", "state_runtime/processors/flavours.py"}


@every(RUNTIME)
def test_only_the_spark_layer_imports_pyspark(file: Path) -> None:
    """Formats, planners and stores must work where there is no Spark."""
    tree = ast.parse(file.read_text())
    at_load = imports_at_load(tree)
    assert "pyspark" not in at_load or name_of(file) in MAY_IMPORT_PYSPARK
    assert "pandas" not in at_load or name_of(file) in MAY_IMPORT_PANDAS
    lazily = {module.split(".")[0] for module, _ in imports(tree)} - at_load
    assert "pyspark" not in lazily or name_of(file) == "state_runtime/sinks.py"


@every(RUNTIME)
def test_the_runtime_knows_nothing_of_dagster(file: Path) -> None:
    """Every action works from the command line and from a test without it."""
    modules = {module.split(".")[0] for module, _ in imports(ast.parse(file.read_text()))}
    assert not modules & {"dagster", "assets", "orchestration", "examples", "benchmarks"}


PURE = {
    "state_runtime/seating.py",
    "state_runtime/snapshot/lineage.py",
    "state_runtime/snapshot/manifest.py",
    "state_runtime/snapshot/document.py",
    "state_runtime/snapshot/paths.py",
    "state_runtime/snapshot/strict.py",
    "state_runtime/changelog/segment.py",
    "state_runtime/state/table.py",
    "state_runtime/state/ddl.py",
    "state_runtime/state/keyhash.py",
    "state_runtime/state/rowcodec.py",
    "state_runtime/materialize/plan.py",
    "state_runtime/restore/plan.py",
    "state_runtime/restore/stream.py",
    "state_runtime/reading/fingerprint.py",
    "state_runtime/reading/rows.py",
    "state_runtime/reading/shown.py",
    "state_runtime/settings.py",
    "state_runtime/progress.py",
    "state_runtime/tally.py",
    "state_runtime/interval.py",
    "state_runtime/changelog/folding.py",
    "state_runtime/limits.py",
    "state_runtime/aggregates.py",
    "state_runtime/processors/grouping.py",
    "state_runtime/processors/columns.py",
    "state_runtime/windows.py",
    "state_runtime/processors/aggregate.py",
    "state_runtime/processors/distinct.py",
    "state_runtime/processors/distinct_tables.py",
    "state_runtime/processors/partials.py",
    "state_runtime/processors/ranges.py",
    "state_runtime/processors/sessions.py",
    "state_runtime/processors/window_state.py",
    "state_runtime/processors/windows.py",
    "state_runtime/processors/vectorized.py",
    "state_runtime/processors/latest.py",
    "state_runtime/processors/deduplicate.py",
}


@every([ROOT / name for name in sorted(PURE)])
def test_formats_and_planners_do_no_io(file: Path) -> None:
    """They take values and return values."""
    tree = ast.parse(file.read_text())
    modules = {module for module, _ in imports(tree)}
    assert not modules & {
        "os",
        "pathlib",
        "shutil",
        "socket",
        "subprocess",
        "tempfile",
        "threading",
        "state_runtime.store",
    }
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Call) and dotted(n.func) == "open"]


# --- safety --------------------------------------------------------------------------------------------------------


@every(FILES)
def test_no_pickle_is_ever_loaded(file: Path) -> None:
    """A store is not trusted; a pickle in it would run anybody's code."""
    tree = ast.parse(file.read_text())
    modules = {module.split(".")[0] for module, _ in imports(tree)}
    assert not modules & {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    calls = {dotted(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    assert not {c for c in calls if c in ("eval", "exec") or c.endswith((".read_pickle", ".deserialize", "yaml.load"))}


@every(FILES)
def test_no_error_is_swallowed(file: Path) -> None:
    """No bare except; a broad one must do something with what it caught."""
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ExceptHandler):
            continue
        assert node.type is not None, f"line {node.lineno}: bare except"
        if dotted(node.type) in ("Exception", "BaseException"):
            does_nothing = all(isinstance(s, ast.Pass | ast.Continue) for s in node.body)
            assert not does_nothing, f"line {node.lineno}: {dotted(node.type)} swallowed"


@every(FILES)
def test_invariants_survive_python_O(file: Path) -> None:
    """`-O` removes assert; our packages use `check` or typed errors. An assert may only narrow a type."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Assert):
            narrows = re.fullmatch(r"[\w.]+ is not None|isinstance\(.*\)", ast.unparse(node.test))
            assert narrows, f"line {node.lineno}: {ast.unparse(node)}"


@every(FILES)
def test_functions_fit_a_screen_or_two(file: Path) -> None:
    """Longer ones hide the order of their steps."""
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions(ast.parse(file.read_text())) if f.end_lineno}
    assert not {name: lines for name, lines in long.items() if lines > FUNCTION_LINES_MAX}


@every(FILES)
def test_public_things_say_what_they_promise(file: Path) -> None:
    """Modules and public classes have a docstring."""
    tree = ast.parse(file.read_text())
    assert ast.get_docstring(tree)
    missing = [
        n.name
        for n in tree.body
        if isinstance(n, ast.ClassDef) and not n.name.startswith("_") and not ast.get_docstring(n)
    ]
    assert not missing


MACHINE_PATH = re.compile(r"""["'(\s=](/(home|root|Users|work|tmp|var|opt|mnt|private|etc)/[\w.-]+|[A-Z]:\\\\\w+)""")


@every([f for f in sorted(ROOT.rglob("*.py")) if ".venv" not in f.parts and "build" not in f.parts and "tests" not in f.parts])  # fmt: skip
def test_no_path_of_a_machine_is_in_the_code(file: Path) -> None:
    """It works on the machine of whoever wrote it, and nowhere else."""
    found = [line for line in file.read_text().splitlines() if MACHINE_PATH.search(line)]
    assert not found


@every(FILES)
def test_no_todo_hides_a_failure(file: Path) -> None:
    """What is not done is refused by name, or it is an issue."""
    assert not re.findall(r"\b(TODO|FIXME|XXX|HACK)\b", file.read_text())


# --- the rules themselves ------------------------------------------------------------------------------------------

BROKEN = {
    test_time_and_randomness_come_from_clock_and_ids_only: "import time\n\nNOW = time.time()\n",
    test_only_the_edges_take_the_systems_clock_and_ids: "from state_runtime.clock import SYSTEM_CLOCK\n",
    test_only_the_spark_layer_imports_pyspark: "def f():\n    import pyspark\n",
    test_the_runtime_knows_nothing_of_dagster: "def f():\n    from dagster import asset\n",
    test_formats_and_planners_do_no_io: "def f(path):\n    return open(path)\n",
    test_no_pickle_is_ever_loaded: "import pickle\n",
    test_no_error_is_swallowed: "try:\n    f()\nexcept Exception:\n    pass\n",
    test_invariants_survive_python_O: "assert 1 + 1 == 2\n",
    test_functions_fit_a_screen_or_two: "def f():\n" + "    g()\n" * 100,
    test_public_things_say_what_they_promise: '"""Module."""\n\n\nclass Public:\n    x = 1\n',
    test_no_path_of_a_machine_is_in_the_code: 'PATH = "/' + 'home/somebody"\n',
    test_no_todo_hides_a_failure: "# TO" + "DO: later\n",
}


@pytest.mark.parametrize("rule", list(BROKEN), ids=lambda rule: rule.__name__)
def test_every_rule_finds_what_it_forbids(rule: Callable[[Path], None]) -> None:
    """A rule that cannot fail protects nothing."""
    file = ROOT / "state_runtime" / "not_there.py"
    body = BROKEN[rule]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", lambda self: body)
        with pytest.raises(AssertionError):
            rule(file)
