"""Tests of the code itself: rules that no linter knows. Each exception is listed here with its reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from pathlib import Path

import pytest

from state_runtime.base import errors
from tests.import_map import (
    FLOORS,
    PACKAGES,
    Import,
    all_imports,
    arrows,
    circles,
    imports_of,
    module_of,
    our_files,
    room_of,
    upward,
)
from tests.literals import refilled

ROOT = Path(__file__).resolve().parent.parent
FILES = our_files()
RUNTIME = [file for file in FILES if file.is_relative_to(ROOT / "state_runtime")]
FUNCTION_LINES_MAX = 100
LINE_CHARS_MAX = 120

Rule = Callable[[Path], None]


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def every(files: Sequence[Path]) -> Callable[[Rule], Callable[[], None]]:
    """Make one test of a rule for all files: a test for each would be seven thousand, and a tenth of all tests' time."""

    def of(rule: Rule) -> Callable[[], None]:
        @wraps(rule)
        def test() -> None:
            failures = [f"{name_of(file)}: {why}" for file in files if (why := broken(rule, file))]
            assert not failures, "\n".join(failures)

        # pytest asks `__wrapped__` for the arguments.
        test.rule = test.__dict__.pop("__wrapped__")  # type: ignore[attr-defined]
        return test

    return of


def broken(rule: Rule, file: Path) -> str:
    """How a file breaks a rule; empty if it does not."""
    try:
        rule(file)
    except AssertionError as error:
        return str(error) or "no"
    return ""


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def walked(tree: ast.AST) -> tuple[ast.AST, ...]:
    """`ast.walk`, once for all rules."""
    return tuple(ast.walk(tree))


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """All imported modules with their lines, also inside functions."""
    for node in walked(tree):
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
    for node in walked(tree):
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
    "state_runtime/base/clock.py": {"datetime", "time"},
    "state_runtime/base/ids.py": {"uuid"},
    # Dates and times as user code sees them; the zone of the session.
    "state_runtime/processors/user/value_codec.py": {"datetime", "time"},
    "state_runtime/maintenance/retention/policy.py": {"datetime"},
    "state_runtime/sources/kafka.py": {"datetime"},
    "state_runtime/sources/kafka_seek.py": {"datetime"},
}
CALENDAR_ONLY = {
    "state_runtime/maintenance/retention/policy.py",
    "state_runtime/sources/kafka.py",
    "state_runtime/sources/kafka_seek.py",
}
"""They take times apart, and read no clock."""
READS_TIME_OR_CHANCE = re.compile(
    r"(time\.(time|time_ns|monotonic|perf_counter|sleep)|datetime\.(now|utcnow|today)|date\.today|uuid\.uuid\d"
    r"|os\.urandom|random\.\w+|np\.random\.\w+|numpy\.random\.\w+|pd\.Timestamp\.now)$"
)


@every(RUNTIME)
def test_time_and_randomness_come_from_clock_and_ids_only(file: Path) -> None:
    """A test can only move a clock that is handed in; a seed can only replay what it draws."""
    tree = parsed(file.read_text())
    allowed = MAY_IMPORT_THEM.get(name_of(file), set())
    used = {(module, line) for module, line in imports(tree) if module.split(".")[0] in SOURCES_OF_TIME_AND_CHANCE}
    assert not {(module, line) for module, line in used if module not in allowed}
    if allowed and name_of(file) not in CALENDAR_ONLY:
        return
    calls = {(dotted(n.func), n.lineno) for n in walked(tree) if isinstance(n, ast.Call)}
    assert not {(name, line) for name, line in calls if READS_TIME_OR_CHANCE.search(name)}


@every(RUNTIME)
def test_only_the_edges_take_the_systems_clock_and_ids(file: Path) -> None:
    """Whoever takes SYSTEM_CLOCK or SYSTEM_IDS by name cannot be driven by a test."""
    reasons = {
        "state_runtime/base/clock.py": "defines it",
        "state_runtime/base/ids.py": "defines it",
        "state_runtime/job.py": "defaults of the user's constructor",
        "state_runtime/sinks/delta.py": "the same",
        "state_runtime/driver/checkpointer.py": "a process that folds has the system's clock: only a run that has it too may start one",
        "state_runtime/snapshot/catalog.py": "default of a constructor that tools call",
        "state_runtime/snapshot/locate.py": "the same",
        "state_runtime/materialize/process.py": "a process of its own: its pipe carries values only",
        "state_runtime/task/stage.py": "runs in a Spark task: nobody can hand anything in",
        "state_runtime/task/persist.py": "the same",
        "state_runtime/task/persist_files.py": "the same",
        "state_runtime/task/shard_access.py": "the same",
        "state_runtime/importing/bootstrap.py": "the same, and defaults of a function that tools call",
        "state_runtime/materialize/spark_job.py": "the same, and defaults of a function that tools call",
        "state_runtime/importing/native.py": "defaults of a function that tools call",
        "state_runtime/maintenance/convert/spark_job.py": "the same",
        "state_runtime/store/local.py": "names of temporary files, which no result depends on",
        "state_runtime/store/port.py": "names of probe objects, which no result depends on",
    }
    uses = re.search(r"\bSYSTEM_(CLOCK|IDS)\b", file.read_text())
    assert (uses is None) or name_of(file) in reasons


# --- layers --------------------------------------------------------------------------------------------------------

MAY_IMPORT_PYSPARK = {
    "state_runtime/job",
    "state_runtime/importing",
    "state_runtime/driver",
    "state_runtime/reading",
    "state_runtime/task",
    "state_runtime/placement",
    "state_runtime/pipeline",
    "state_runtime/processors/user",
    "state_runtime/sources",
    "state_runtime/spark",
}
MAY_IMPORT_PANDAS = {
    "state_runtime/processors/user/frames.py",
    "state_runtime/processors/user/handler_input.py",
    "state_runtime/spark/group_state.py",
}


@cache
def paths_of_modules() -> dict[str, str]:
    return {module_of(file): name_of(file) for file in FILES}


@every(FILES)
def test_imports_go_down_the_list_of_rooms_only(file: Path) -> None:
    """Whoever reads a room must know only those below it. `make map` draws all of it."""
    here, tree = name_of(file), parsed(file.read_text())
    found = [Import(here, imported, line) for imported, line in imports_of(tree, paths_of_modules())]
    assert room_of(name_of(file)) in FLOORS, "give the room a floor in tests/import_map.py"
    assert not upward(found)


def test_no_rooms_and_no_files_import_each_other() -> None:
    """A circle is one thing in several files: nobody can understand or test a part of it."""
    found = all_imports()
    assert not circles(arrows(found))
    assert not circles((i.file, i.imported) for i in found)


def test_circles_and_upward_imports_are_found() -> None:
    """A rule that cannot fail protects nothing."""
    assert circles([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")]) == [["a", "b", "c"]]
    assert not circles([("a", "b"), ("a", "c"), ("b", "c")])
    up = Import("state_runtime/base/clock.py", "state_runtime/job.py", 1)
    down = Import("state_runtime/job.py", "state_runtime/base/clock.py", 1)
    unknown = Import("state_runtime/base/clock.py", "state_runtime/new/file.py", 1)
    assert upward([up, down, unknown]) == [up, unknown]


@every(RUNTIME)
def test_only_the_spark_layer_imports_pyspark(file: Path) -> None:
    """Formats, planners and stores must work where there is no Spark."""
    tree = parsed(file.read_text())
    at_load = imports_at_load(tree)
    everywhere = {module.split(".")[0] for module, _ in imports(tree)}
    assert "pyspark" not in everywhere or room_of(name_of(file)) in MAY_IMPORT_PYSPARK
    assert "pandas" not in at_load or name_of(file) in MAY_IMPORT_PANDAS


PUBLIC_OF_PYSPARK = {
    "pyspark",
    "pyspark.accumulators",
    "pyspark.errors",
    "pyspark.sql",
    "pyspark.sql.datasource",
    "pyspark.sql.functions",
    "pyspark.sql.streaming",
    "pyspark.sql.streaming.datasource",
    "pyspark.sql.streaming.query",
    "pyspark.sql.streaming.stateful_processor",
    "pyspark.sql.types",
}
OF_THE_SPARK_ROOM = {"state_runtime.spark.jvm", "state_runtime.spark.internals", "py4j"}
"""What gives objects of Spark's JVM, or what pyspark keeps to itself."""


def foreign_privates(tree: ast.AST) -> list[str]:
    """Names with an underscore that are another object's, also as the text that `getattr` is given."""
    found = []
    for node in walked(tree):
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found += [] if own else [node.attr]
        elif (
            isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "setattr", "hasattr") and len(node.args) > 1
        ):
            found += [node.args[1].value] if isinstance(node.args[1], ast.Constant) else []
    return [name for name in found if re.match(r"_(?!_)", str(name))]


def hidden_of_spark(tree: ast.AST) -> list[str]:
    """What a file uses of pyspark and Spark that is not public."""
    modules = [module for module, _ in imports(tree)]
    found = [m for m in modules if m.split(".")[0] == "pyspark" and m not in PUBLIC_OF_PYSPARK]
    for node in walked(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pyspark":
            found += [alias.name for alias in node.names if alias.name.startswith("_") and alias.name != "__version__"]
    return found + [name for name in foreign_privates(tree) if JAVA_OF_PYSPARK.match(name)]


JAVA_OF_PYSPARK = re.compile(
    r"_(jvm|gateway|sc|active_spark_context|origin|java\w+|j[a-z]*[A-Z]\w*|j(df|sc|rdd|cols?|gd|map|seq|tc)|jreader|jwrite)$"
)
WITH_EXAMPLES = [*FILES, *sorted((ROOT / "examples").rglob("*.py"))]


@every(WITH_EXAMPLES)
def test_what_spark_keeps_to_itself_is_used_in_one_room_only(file: Path) -> None:
    """Another version has it otherwise. There each use has a guard and a public way (docs/spark-internals.md)."""
    tree = parsed(file.read_text())
    hidden = hidden_of_spark(tree)
    if room_of(name_of(file)) != "state_runtime/spark":
        inner = [m for m, _ in imports(tree) if m in OF_THE_SPARK_ROOM or m.split(".")[0] in OF_THE_SPARK_ROOM]
        assert not [*hidden, *inner]
    # In that room too: by `private`, through which a test refuses all of it.
    assert not hidden


@pytest.mark.parametrize(
    "code",
    [
        "frame._jdf.queryExecution()",
        "spark.sparkContext._jsc.sc()",
        "spark._jsparkSession.sessionState()",
        "getattr(context, '_jvm')",
        "self.context._gateway.proc",
        "from pyspark.find_spark_home import _find_spark_home",
        "from pyspark.sql import _private",
        "def f():\n    from pyspark.java_gateway import launch_gateway",
        "from state_runtime.spark.jvm import analyzed",
        "from py4j.protocol import Py4JError",
    ],
)
def test_each_way_to_what_spark_keeps_to_itself_is_found(code: str) -> None:
    """A rule that cannot fail protects nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", lambda self: code)
        assert broken(test_what_spark_keeps_to_itself_is_used_in_one_room_only.rule, ROOT / "examples" / "x.py")  # type: ignore[attr-defined]


@every(RUNTIME)
def test_the_runtime_knows_nothing_of_dagster(file: Path) -> None:
    """Every action works from the command line and from a test without it."""
    modules = {module.split(".")[0] for module, _ in imports(parsed(file.read_text()))}
    assert not modules & {"dagster", "assets", "orchestration", "stillstate", "examples", "benchmarks"}


@every([file for file in FILES if name_of(file).startswith("assets/")])
def test_assets_are_built_from_the_configuration_and_numbers_alone(file: Path) -> None:
    """What exists is said without looking at how anything is done."""
    pure = (
        "stillstate.orchestration.config",
        "stillstate.orchestration.text",
        "stillstate.orchestration.materialization",
        "stillstate.orchestration.probes",
    )
    judged = ("stillstate.orchestration.recovery.alive", "stillstate.orchestration.migration.desired")
    allowed = (*pure, *judged, "stillstate.assets")
    ours = [m for m, _ in imports(parsed(file.read_text())) if m.startswith("stillstate")]
    assert not [module for module in ours if not module.startswith(allowed)]


PURE_ROOMS = {
    "state_runtime/processors",
    "state_runtime/processors/declared",
    "state_runtime/processors/builtin",
}
PURE_FILES = {
    "state_runtime/base/durations.py",
    "state_runtime/base/errors.py",
    "state_runtime/base/fields.py",
    "state_runtime/base/limits.py",
    "state_runtime/base/progress.py",
    "state_runtime/base/settings.py",
    "state_runtime/base/steps.py",
    "state_runtime/changelog/changes.py",
    "state_runtime/changelog/segment.py",
    "state_runtime/changelog/snapshot_state.py",
    "state_runtime/changelog/versions.py",
    "state_runtime/driver/due.py",
    "state_runtime/driver/interval.py",
    "state_runtime/driver/numbers.py",
    "state_runtime/driver/shard_index.py",
    "state_runtime/driver/task_history.py",
    "state_runtime/maintenance/layout.py",
    "state_runtime/maintenance/retention/policy.py",
    "state_runtime/materialize/grid.py",
    "state_runtime/materialize/plan.py",
    "state_runtime/pipeline/compatibility.py",
    "state_runtime/pipeline/graph.py",
    "state_runtime/pipeline/staged.py",
    "state_runtime/pipeline/steps.py",
    "state_runtime/placement/assignment.py",
    "state_runtime/reading/fingerprint.py",
    "state_runtime/reading/key_parser.py",
    "state_runtime/reading/rows.py",
    "state_runtime/reading/display_schema.py",
    "state_runtime/restore/plan.py",
    "state_runtime/restore/stream.py",
    "state_runtime/snapshot/document.py",
    "state_runtime/snapshot/epoch_tasks.py",
    "state_runtime/snapshot/job_info.py",
    "state_runtime/snapshot/lineage.py",
    "state_runtime/snapshot/shard_versions.py",
    "state_runtime/snapshot/manifest.py",
    "state_runtime/snapshot/paths.py",
    "state_runtime/snapshot/shard_files.py",
    "state_runtime/snapshot/strict.py",
    "state_runtime/spark/columns.py",
    "state_runtime/state/cursors.py",
    "state_runtime/state/ddl.py",
    "state_runtime/state/key_groups.py",
    "state_runtime/state/keyhash.py",
    "state_runtime/state/pieces.py",
    "state_runtime/state/rocksdb_codec.py",
    "state_runtime/state/row_codec.py",
    "state_runtime/state/runs.py",
    "state_runtime/state/table.py",
    "state_runtime/store/paths.py",
    "state_runtime/task/acknowledgement.py",
    "state_runtime/task/listed_files.py",
}
NOT_PURE = {
    "concurrent",
    "dagster",
    "fcntl",
    "fsspec",
    "mmap",
    "os",
    "pathlib",
    "pyspark",
    "s3fs",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
}


def is_pure(file: Path) -> bool:
    return room_of(name_of(file)) in PURE_ROOMS or name_of(file) in PURE_FILES


@every([file for file in RUNTIME if is_pure(file)])
def test_formats_and_planners_do_no_io(file: Path) -> None:
    """They take values and return values; so does everything that they import, and what that imports in turn."""
    seen: dict[Path, None] = {}
    known = paths_of_modules()
    waiting = [file]
    while waiting:
        tree = parsed((reached := waiting.pop()).read_text())
        seen[reached] = None
        outside = {module.split(".")[0] for module, _ in imports(tree)} & NOT_PURE
        assert not outside, f"{name_of(file)} reaches {', '.join(sorted(outside))} through {name_of(reached)}"
        opens = [n for n in walked(tree) if isinstance(n, ast.Call) and dotted(n.func) == "open"]
        assert not opens, f"{name_of(file)} reaches open() in {name_of(reached)}"
        waiting += [ROOT / name for name, _ in imports_of(tree, known) if ROOT / name not in seen]


# --- how values are made ---------------------------------------------------------------------------------------------

FIELDS_BY_PLACE_MAX = 5


@cache
def wide_classes() -> frozenset[str]:
    """Dataclasses of ours with so many fields that nobody knows them by their places."""
    return frozenset(
        node.name
        for file in FILES
        for node in walked(parsed(file.read_text()))
        if isinstance(node, ast.ClassDef)
        and any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
        and sum(isinstance(line, ast.AnnAssign) for line in node.body) > FIELDS_BY_PLACE_MAX
    )


@every(FILES)
def test_values_of_many_fields_are_made_by_name(file: Path) -> None:
    """Of eight values in a row nobody sees that two of them are exchanged."""
    wide = wide_classes()
    found = [
        f"line {node.lineno}: {node.func.id}"
        for node in walked(parsed(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in wide
        and len(node.args) > FIELDS_BY_PLACE_MAX
    ]  # fmt: skip
    assert not found


# --- what is written -----------------------------------------------------------------------------------------------


@every(FILES)
def test_lines_of_code_fit_a_window(file: Path) -> None:
    """The formatter wraps code; a string or a comment that it cannot wrap is wrapped by hand."""
    long = {n: len(line) for n, line in enumerate(file.read_text().splitlines(), 1) if len(line) > LINE_CHARS_MAX}
    assert not long


PATH_IN_TEXT = re.compile(r"(?<![\w/.<>*{}-])((?:[a-z_0-9]+/)+[a-z_0-9-]+\.(?:py|md))\b")


def documents() -> list[Path]:
    return [
        *sorted((ROOT / "docs").rglob("*.md")),
        *(ROOT / f for f in ("README.md", "CHANGELOG.md", "benchmarks/README.md")),
    ]


@cache
def path_ends() -> frozenset[str]:
    """Every file of the project that a text may name, by each of the ends of its path."""
    names = [
        file for top in (*PACKAGES, "tests", "docs", "examples", "benchmarks") for file in (ROOT / top).rglob("*.*")
    ]
    parts = [name_of(file).split("/") for file in [*names, *ROOT.glob("*.*")]]
    return frozenset("/".join(p[at:]) for p in parts for at in range(len(p)))


@every(FILES)
def test_texts_take_no_more_lines_than_they_need(file: Path) -> None:
    """A sentence that is torn for no reason is read twice. `make format` mends it."""
    source = file.read_text()
    assert refilled(source) == source


@every([*FILES, *documents()])
def test_every_path_that_a_text_names_exists(file: Path) -> None:
    """A reader who follows it must arrive."""
    ends = path_ends()
    assert not {path for path in PATH_IN_TEXT.findall(file.read_text()) if path not in ends}


LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]+)?\)")


def anchors(file: Path) -> set[str]:
    """The headings of a document, as a link names them."""
    headings = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?ms)^```.*?^```$", "", file.read_text()))
    return {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(file: Path, text: str) -> list[str]:
    """Links of a document to files, pictures and headings that are not there."""
    found = []
    for path, heading in LINK.findall(text):
        target = (file.parent / path).resolve() if path else file
        if not target.exists() or (heading and heading not in anchors(target)):
            found.append(path + heading)
    return found


@every(documents())
def test_every_link_of_a_document_arrives(file: Path) -> None:
    """Somebody follows it at night; and a picture that is not there says nothing."""
    assert broken_links(file, file.read_text()) == []


def test_links_that_lead_nowhere_are_found() -> None:
    """A rule that cannot fail protects nothing."""
    text = "[a](operations.md#settings) ![b](images/none.png) [c](#no-such) [d](nowhere.md) [e](https://x.org/#y)"
    assert broken_links(ROOT / "docs" / "guide.md", text) == ["images/none.png", "#no-such", "nowhere.md"]


def test_every_picture_of_the_documents_is_shown_and_small() -> None:
    """What nobody shows is forgotten when it is taken anew."""
    pictures = sorted((ROOT / "docs" / "images").iterdir())
    shown = "".join(file.read_text() for file in documents())
    assert not [picture.name for picture in pictures if f"images/{picture.name})" not in shown]
    assert not {picture.name: picture.stat().st_size for picture in pictures if picture.stat().st_size >= 200_000}


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    """Who looks for what to catch reads the docstring."""
    drawn = dict(error_tree(errors.__doc__ or ""))
    classes = {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.StillstateError)}
    assert drawn == {c.__name__: "" if c is errors.StillstateError else c.__bases__[0].__name__ for c in classes}
    assert {c.__name__ for c in classes} <= set(errors.__all__)


def error_tree(text: str) -> Iterator[tuple[str, str]]:
    """Name and parent of each class that a text draws by its indentation."""
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        drawn = re.match(r"[ │├└─]*(?=[A-Z])", line)
        name = re.match(r"([A-Z][A-Za-z]+)(?=\s|$)", line[drawn.end() :]) if drawn else None
        if drawn is None or name is None or not (drawn.end() >= 4 or name[1] == "StillstateError"):
            continue
        above = [(depth, n) for depth, n in above if depth < drawn.end()]
        yield name[1], above[-1][1] if above else ""
        above.append((drawn.end(), name[1]))


# --- safety --------------------------------------------------------------------------------------------------------


@every(FILES)
def test_no_pickle_is_ever_loaded(file: Path) -> None:
    """A store is not trusted; a pickle in it would run anybody's code."""
    tree = parsed(file.read_text())
    modules = {module.split(".")[0] for module, _ in imports(tree)}
    assert not modules & {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    calls = {dotted(n.func) for n in walked(tree) if isinstance(n, ast.Call)}
    assert not {c for c in calls if c in ("eval", "exec") or c.endswith((".read_pickle", ".deserialize", "yaml.load"))}


@every(FILES)
def test_no_error_is_swallowed(file: Path) -> None:
    """No bare except; a broad one must do something with what it caught."""
    for node in walked(parsed(file.read_text())):
        if not isinstance(node, ast.ExceptHandler):
            continue
        assert node.type is not None, f"line {node.lineno}: bare except"
        if dotted(node.type) in ("Exception", "BaseException"):
            does_nothing = all(isinstance(s, ast.Pass | ast.Continue) for s in node.body)
            assert not does_nothing, f"line {node.lineno}: {dotted(node.type)} swallowed"


@every(FILES)
def test_invariants_survive_python_O(file: Path) -> None:
    """`-O` removes assert; our packages use `check` or typed errors. An assert may only narrow a type."""
    for node in walked(parsed(file.read_text())):
        if isinstance(node, ast.Assert):
            narrows = re.fullmatch(r"[\w.]+ is not None|isinstance\(.*\)", ast.unparse(node.test))
            assert narrows, f"line {node.lineno}: {ast.unparse(node)}"


@every(FILES)
def test_functions_fit_a_screen_or_two(file: Path) -> None:
    """Longer ones hide the order of their steps."""
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions(parsed(file.read_text())) if f.end_lineno}
    assert not {name: lines for name, lines in long.items() if lines > FUNCTION_LINES_MAX}


@every(FILES)
def test_public_things_say_what_they_promise(file: Path) -> None:
    """Modules and public classes have a docstring."""
    tree = parsed(file.read_text())
    assert ast.get_docstring(tree)
    missing = [
        n.name
        for n in tree.body
        if isinstance(n, ast.ClassDef) and not n.name.startswith("_") and not ast.get_docstring(n)
    ]
    assert not missing


MACHINE_PATH = re.compile(r"""["'(\s=](/(home|root|Users|work|tmp|var|opt|mnt|private|etc)/[\w.-]+|[A-Z]:\\\\\w+)""")


def is_ours(file: Path) -> bool:
    """Not of an environment that `make` makes in the checkout, nor of a build; tests name such paths on purpose."""
    folders = file.relative_to(ROOT).parts
    return not {"build", "tests"} & set(folders) and not any(folder.startswith(".venv") for folder in folders)


@every([file for file in sorted(ROOT.rglob("*.py")) if is_ours(file)])
def test_no_path_of_a_machine_is_in_the_code(file: Path) -> None:
    """It works on the machine of whoever wrote it, and nowhere else."""
    found = [line for line in file.read_text().splitlines() if MACHINE_PATH.search(line)]
    assert not found


def test_every_test_that_is_listed_as_long_exists() -> None:
    inherited = (ROOT / "tests" / "state_runtime" / "backend_contract.py").read_text("utf-8")
    for line in (ROOT / "tests" / "long.txt").read_text("utf-8").splitlines():
        test, _, _ = line.partition("[")
        file, *_, name = test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text("utf-8") + inherited, f"tests/long.txt: {line} is gone"


@every(FILES)
def test_no_todo_hides_a_failure(file: Path) -> None:
    """What is not done is refused by name, or it is an issue."""
    assert not re.findall(r"\b(TODO|FIXME|XXX|HACK)\b", file.read_text())


# --- the rules themselves ------------------------------------------------------------------------------------------

BROKEN = {
    test_time_and_randomness_come_from_clock_and_ids_only: "import time\n\nNOW = time.time()\n",
    test_only_the_edges_take_the_systems_clock_and_ids: "from state_runtime.base.clock import SYSTEM_CLOCK\n",
    test_only_the_spark_layer_imports_pyspark: "def f():\n    import pyspark\n",
    test_what_spark_keeps_to_itself_is_used_in_one_room_only: "plan = frame._jdf.queryExecution()\n",
    test_the_runtime_knows_nothing_of_dagster: "def f():\n    from dagster import asset\n",
    test_imports_go_down_the_list_of_rooms_only: "def f():\n    import stillstate.orchestration.cli\n",
    test_assets_are_built_from_the_configuration_and_numbers_alone: "from stillstate.orchestration.jobs import x\n",
    test_values_of_many_fields_are_made_by_name: "ENTRY = SegmentEntry('a', 1, '', 1, 1, 1)\n",
    test_lines_of_code_fit_a_window: "# " + "a" * 119 + "\n",
    test_texts_take_no_more_lines_than_they_need: 'F = (\n    "a sentence that "\n    "is torn"\n)\n',
    test_every_path_that_a_text_names_exists: "# see state_runtime/not/there.py\n",
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
def test_every_rule_finds_what_it_forbids(rule: Callable[[], None]) -> None:
    """A rule that cannot fail protects nothing."""
    file = ROOT / "state_runtime" / "not_there.py"
    body = BROKEN[rule]
    wide_classes()  # kept from its first call on: it must not be made of the broken text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", lambda self: body)
        assert broken(rule.rule, file)  # type: ignore[attr-defined]
