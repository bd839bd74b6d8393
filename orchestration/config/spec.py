"""`stillstate.yaml`: the desired state of every job, checked completely before anything acts on it.

Reading has four steps, all pure but the first: YAML with places (`yaml_tree`), defaults merged under every job,
environment variables and relative paths resolved, and the strict schema below. Every problem of the file is reported at
once, one per line, as `file:line: key: problem`.

`${NAME}` and `${NAME:-default}` are replaced in storage options, in `notify` and in paths (`store`, `local_dir`,
`scratch_dir`, `launcher.log_dir` and the options that `path_options` names), and nowhere else; `$$` is a plain `$`.
Values of storage options and of `notify` are never shown: not in a repr, an error, metadata or the command line's
output.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import ErrorDetails

from state_runtime.base.errors import InvalidConfiguration, JobNotFound
from state_runtime.base.settings import JobSettings, RetentionPolicy, SettingsGroup, group_at, refusal, unknown_key
from state_runtime.driver.trigger import every_s
from state_runtime.snapshot.locate import Place
from stillstate.orchestration.config.launcher import LauncherSpec, contradictions, with_absolute_paths
from stillstate.orchestration.config.notify import NotifySpec
from stillstate.orchestration.config.secrets import SecretMapping, Secrets
from stillstate.orchestration.config.sections import (
    AvailableNow,
    CheckpointSpec,
    DagsterSpec,
    MaterializationSpec,
    MigrationSpec,
    ObservationSpec,
    ProcessingTime,
    RecoverySpec,
    RetentionSpec,
    SparkSpec,
    Trigger,
)
from stillstate.orchestration.config.upkeep import (
    ChecksSpec,
    DrillSpec,
    GarbageSpec,
    OutputSpec,
    SavepointsSpec,
    VerificationSpec,
)
from stillstate.orchestration.config.yaml_tree import Key, Located, Problems, Scalar, read_tree

if TYPE_CHECKING:
    # It is defined beside the pipeline, which imports pyspark; the Dagster code location must load without it.
    from state_runtime.job import JobContext

__all__ = [
    "CONFIG_ENV",
    "CONFIG_NAME",
    "AvailableNow",
    "CheckpointSpec",
    "JobSpec",
    "LauncherSpec",
    "MaterializationSpec",
    "MigrationSpec",
    "ObservationSpec",
    "ProcessingTime",
    "RecoverySpec",
    "RetentionSpec",
    "Secrets",
    "SparkSpec",
    "Spec",
    "StartFromSpec",
    "find_config",
    "identifier",
    "load_spec",
    "to_context",
    "to_policy",
    "to_settings",
    "to_trigger",
]

CONFIG_ENV: Final = "STILLSTATE_CONFIG"
CONFIG_NAME: Final = "stillstate.yaml"

_PATH_KEYS: Final[tuple[tuple[str, ...], ...]] = (
    ("store",),
    ("local_dir",),
    ("scratch_dir",),
    ("launcher", "log_dir"),
    ("start_from", "place"),
    ("migration", "to_store"),
)
_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|(?P<bad>\{[^}]*\}?))")


Owner = Annotated[str, Field(pattern=r"^(team:[A-Za-z0-9_][A-Za-z0-9_ .-]*|[^@\s]+@[^@\s]+\.[^@\s]+)$")]
JobName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]


class StartFromSpec(SettingsGroup, arbitrary_types_allowed=True):
    """The snapshot that a job without snapshots begins with; a job that has snapshots ignores it."""

    place: str = Field(min_length=1)
    """`<store>/<job>`, `<store>/<job>@<id>`, or the folder of a savepoint."""
    mode: Literal["NO_CLAIM", "CLAIM"] = "NO_CLAIM"
    """`NO_CLAIM` leaves the place as it is; `CLAIM` takes it over, and removes it after the job's first checkpoint."""
    storage_options: SecretMapping | None = Field(default=None, repr=False)
    """Storage options of the place; absent: the job's."""


class JobSpec(JobSettings, arbitrary_types_allowed=True):
    """One job, below its name in `jobs`."""

    name: SkipJsonSchema[str] = ""  # filled in by `load_spec`, which also resolves the paths
    entry_point: str = Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")
    """The function that builds the job, as `package.module:function`."""
    store: str = Field(min_length=1)
    """Path or URL; the job's root is `<store>/<job>`."""
    storage_options: SecretMapping = Field(default_factory=Secrets, repr=False)
    """Options of the store's library. `${NAME}` is replaced from the environment; values are never shown."""
    start_from: StartFromSpec | None = None
    storage_profile: str = Field(default="", max_length=200)
    """S3: a profile of the AWS configuration."""
    single_writer: bool = False
    """Continue with a store that cannot refuse a second writer."""
    options: dict[str, Any] = Field(default={})
    """Options of the job; the entry point gets them."""
    path_options: list[str] = Field(default=[])
    """Names of `options` that are paths: `${NAME}` is replaced in them, and they are relative to the file."""
    trigger: Trigger | None = None
    """`{processing_time_s: <seconds>}` or `{available_now: true}`; absent: as fast as possible."""
    spark: SparkSpec = Field(default_factory=SparkSpec)
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec)
    materialization: MaterializationSpec = Field(default_factory=MaterializationSpec)
    recovery: RecoverySpec = Field(default_factory=RecoverySpec)
    retention: RetentionSpec = Field(default_factory=RetentionSpec)
    migration: MigrationSpec = Field(default_factory=MigrationSpec)
    savepoints: SavepointsSpec = Field(default_factory=SavepointsSpec)
    garbage: GarbageSpec = Field(default_factory=GarbageSpec)
    output: OutputSpec = Field(default_factory=OutputSpec)
    verification: VerificationSpec = Field(default_factory=VerificationSpec)
    drill: DrillSpec = Field(default_factory=DrillSpec)
    checks: ChecksSpec = Field(default_factory=ChecksSpec)
    launcher: LauncherSpec = Field(default_factory=LauncherSpec)
    description: str = Field(default="", max_length=10_000)
    """Text for people, shown in Dagster."""
    owners: list[Owner] = Field(default=[], max_length=10)
    """E-mail addresses, or `team:name`, shown in Dagster."""

    @model_validator(mode="after")
    def _into_options(self) -> JobSpec:
        # Opening the store needs both, but gets only the options.
        more: dict[str, Any] = {"profile": self.storage_profile} if self.storage_profile else {}
        if self.single_writer:
            more["single_writer"] = True
        if more:
            object.__setattr__(self, "storage_options", Secrets({**self.storage_options, **more}))
        return self

    def redact(self, text: str) -> str:
        """Return a text without the credentials of any store that the job names."""
        start = self.start_from.storage_options if self.start_from is not None else None
        for options in (self.storage_options, start, self.migration.to_storage_options):
            text = text if options is None else options.redact(text)
        return text

    @property
    def identifier(self) -> str:
        """Return the name as Dagster names and groups allow it."""
        return identifier(self.name)


class Spec(SettingsGroup):
    """The whole file."""

    version: Literal[1]
    """Version of the file's form."""
    jobs: dict[JobName, JobSpec] = Field(min_length=1)
    """The jobs by their names: 1 to 63 of a-z, 0-9, _ and -, starting with a letter or digit."""
    observation: ObservationSpec = Field(default_factory=ObservationSpec)
    dagster: DagsterSpec = Field(default_factory=DagsterSpec)
    notify: NotifySpec | None = None
    file: SkipJsonSchema[Path] = Path()

    def job(self, name: str) -> JobSpec:
        """Return the job of that name.

        Raises:
            JobNotFound: no job has this name; the message names the existing ones.
        """
        if name not in self.jobs:
            near = difflib.get_close_matches(name, self.jobs, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            known = ", ".join(sorted(self.jobs))
            raise JobNotFound(f"{self.file} has no job {name[:80]!r}; {hint}its jobs are: {known}")
        return self.jobs[name]


def identifier(job: str) -> str:
    """Return a job name as Dagster allows it in names: `plane-delays` → `plane_delays`."""
    return job.replace("-", "_")


def find_config(explicit: str | Path | None = None, *, environ: Mapping[str, str] | None = None) -> Path:
    """Find the file: the argument, else `$STILLSTATE_CONFIG`, else `stillstate.yaml` here or in a parent folder.

    Raises:
        InvalidConfiguration: none of these exists; the message names the searched places.
    """
    named = str(explicit) if explicit else (os.environ if environ is None else environ).get(CONFIG_ENV, "")
    if named:
        file = Path(named).expanduser().absolute()
        if file.is_file():
            return file
        origin = "--config" if explicit else f"${CONFIG_ENV}"
        what = "is a folder, not a file" if file.is_dir() else "does not exist"
        raise InvalidConfiguration(f"{file}: the file that {origin} names {what}; name an existing one")
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / CONFIG_NAME).is_file():
            return folder / CONFIG_NAME
    raise InvalidConfiguration(
        f"there is no {CONFIG_NAME} in {here} or above it; create one, name it with --config FILE, or set ${CONFIG_ENV}"
    )


def load_spec(file: str | Path | None = None, *, environ: Mapping[str, str] | None = None) -> Spec:
    """Read and check the whole configuration.

    Args:
        file: see `find_config`.
        environ: environment for `${NAME}`; the process's own by default.

    Raises:
        InvalidConfiguration: with every problem found, one `file:line: key: message` per line.
    """
    environ = os.environ if environ is None else environ
    path = find_config(file, environ=environ)
    problems = Problems(path)
    root = _merge_defaults(read_tree(path, problems), problems)
    root = _resolve(root, path.parent, environ, problems)
    spec = _validate(root, path, problems)
    problems.raise_if_any()
    if spec is None:
        raise InvalidConfiguration(f"{path}: the configuration is not valid")
    return spec


def to_trigger(spec: JobSpec, *, until_idle: bool = False) -> dict[str, Any] | None:
    """Return the trigger as Spark's `DataStreamWriter.trigger` takes it; None runs as fast as possible."""
    if until_idle or isinstance(spec.trigger, AvailableNow):
        return {"availableNow": True}
    if isinstance(spec.trigger, ProcessingTime):
        return every_s(spec.trigger.processing_time_s)
    return None


def to_settings(spec: JobSpec) -> JobSettings:
    """Return the settings of the runtime."""
    return JobSettings.of(spec)


def to_policy(spec: JobSpec) -> RetentionPolicy:
    """Return the rules by which snapshots are kept; empty without rules."""
    return RetentionPolicy.of(spec.retention)


def to_context(spec: JobSpec) -> JobContext:
    """Return the argument of the job's entry point. Imports pyspark, so only a driver calls it."""
    from state_runtime.job import JobContext

    return JobContext(
        name=spec.name,
        store=spec.store,
        options=spec.options,
        settings=to_settings(spec),
        storage_options=spec.storage_options,
    )


def _merge_defaults(root: Located, problems: Problems) -> Located:
    """Put `defaults` under every job and drop the key, so that the following steps see complete jobs."""
    defaults = root.get("defaults")
    jobs = root.get("jobs")
    if not isinstance(root.value, dict) or defaults is None:
        return root
    rest = Located({k: child for k, child in root.value.items() if k != "defaults"}, root.line, root.path)
    if not isinstance(defaults.value, dict):
        problems.add(defaults.line, defaults.path, "must be a mapping of job keys")
        return rest
    if jobs is None or not isinstance(jobs.value, dict):
        return rest
    merged = {
        # A job that is a list or a word is a separate error; defaults must not hide it.
        name: job.merged_over(defaults) if isinstance(job.value, dict) else job
        for name, job in jobs.value.items()
    }
    return rest.with_child("jobs", Located(merged, jobs.line, jobs.path))


def _resolve(root: Located, folder: Path, environ: Mapping[str, str], problems: Problems) -> Located:
    """Replace environment variables and relative paths where the schema allows them."""

    def variables(place: Located) -> Scalar:
        if isinstance(place.value, str):
            return _interpolate(place.value, place, environ, problems)
        return None if isinstance(place.value, list | dict) else place.value

    notify = root.get("notify")
    if notify is not None:
        root = root.with_child("notify", notify.mapped(variables))
    jobs = root.get("jobs")
    if jobs is None or not isinstance(jobs.value, dict):
        return root

    def path(place: Located) -> Scalar:
        text = variables(place)
        return _absolute(text, folder) if isinstance(text, str) and text else text

    resolved = {}
    for name, job in jobs.value.items():
        secret = job.get("storage_options")
        if secret is not None:
            job = job.with_child("storage_options", secret.mapped(variables))
        start = job.get("start_from")
        secret = start.get("storage_options") if start is not None else None
        if start is not None and secret is not None:
            job = job.with_child("start_from", start.with_child("storage_options", secret.mapped(variables)))
        move = job.get("migration")
        secret = move.get("to_storage_options") if move is not None else None
        if move is not None and secret is not None:
            job = job.with_child("migration", move.with_child("to_storage_options", secret.mapped(variables)))
        for keys in _PATH_KEYS:
            job = _change_at(job, keys, path)
        resolved[name] = _resolve_path_options(name, job, path, problems)
    return root.with_child("jobs", Located(resolved, jobs.line, jobs.path))


def _change_at(place: Located, keys: tuple[str, ...], change: Callable[[Located], Scalar]) -> Located:
    child = place.get(keys[0])
    if child is None:
        return place
    if len(keys) > 1:
        return place.with_child(keys[0], _change_at(child, keys[1:], change))
    return place.with_child(keys[0], child.mapped(change)) if isinstance(child.value, str) else place


def _resolve_path_options(name: str, job: Located, change: Callable[[Located], Scalar], problems: Problems) -> Located:
    named, options = job.get("path_options"), job.get("options")
    if named is None or not isinstance(named.value, list):
        return job
    for item in named.value:
        if not isinstance(item.value, str):
            continue  # the schema reports it
        option = options.get(item.value) if options is not None else None
        if options is None or option is None:
            problems.add(item.line, item.path, f"there is no option {item.value!r} under `options` of job {name!r}")
        elif not isinstance(option.value, str):
            problems.add(option.line, option.path, "is named in `path_options`, so it must be a path or URL")
        else:
            options = options.with_child(item.value, option.mapped(change))
    return job if options is None else job.with_child("options", options)


def _interpolate(text: str, place: Located, environ: Mapping[str, str], problems: Problems) -> str:
    def replace(match: re.Match[str]) -> str:
        if match["bad"] is not None:
            message = "a `${` must be `${NAME}` or `${NAME:-default}`; write `$$` for a plain $"
            problems.add(place.line, place.path, message)
            return ""
        if match["name"] is None:
            return "$"
        value = environ.get(match["name"], match["default"])
        if value is None:
            problems.add(place.line, place.path, f"the environment variable {match['name']} is not set")
            return ""
        return value

    return _VARIABLE.sub(replace, text)


def _absolute(text: str, folder: Path) -> str:
    if "://" in text:
        return text
    return os.path.normpath(folder / Path(text).expanduser())


def _validate(root: Located, file: Path, problems: Problems) -> Spec | None:
    plain = root.plain()
    if not isinstance(plain, dict):
        raise TypeError("read_tree returns a mapping")
    _check_names(root, problems)
    try:
        spec = Spec.model_validate(plain)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            line, path, message = _problem(detail, root)
            if not problems.has(line, path):  # not an error that follows from one that is already reported
                problems.add(line, path, message)
        return None
    if spec.observation.tick_budget_s < 2 * spec.observation.timeout_s:
        place = root.find(("observation", "tick_budget_s"))[0]
        message = (
            f"tick_budget_s = {spec.observation.tick_budget_s:g} is under twice the timeout_s = "
            f"{spec.observation.timeout_s:g}: a look at a slow store would never end"
        )
        problems.add(place.line, place.path, message)
    for name, job in spec.jobs.items():
        if (problem := _store_problem(job.store)) is not None:
            place = root.find(("jobs", name, "store"))[0]
            problems.add(place.line, place.path, problem)
        if job.migration.to_store and (problem := _target_problem(job)) is not None:
            place = root.find(("jobs", name, "migration", "to_store"))[0]
            problems.add(place.line, place.path, problem)
        if job.start_from is not None and (problem := _place_problem(job.start_from.place)) is not None:
            place = root.find(("jobs", name, "start_from", "place"))[0]
            problems.add(place.line, place.path, problem)
        for keys, message in _contradictions(job):
            place = root.find(("jobs", name, *keys))[0]
            problems.add(place.line, place.path, message)
    jobs = {
        name: job.model_copy(update={"name": name, "launcher": with_absolute_paths(job.launcher, file.parent)})
        for name, job in spec.jobs.items()
    }
    return spec.model_copy(update={"file": file, "jobs": jobs})


def _contradictions(job: JobSpec) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield values that are valid alone but not together."""
    checkpoint, recovery, fold = job.checkpoint, job.recovery, job.materialization
    if recovery.enabled and recovery.heartbeat_timeout_s < 2 * checkpoint.heartbeat_interval_s:
        yield (
            ("recovery", "heartbeat_timeout_s"),
            f"heartbeat_timeout_s = {recovery.heartbeat_timeout_s:g} is under twice the "
            f"heartbeat_interval_s = {checkpoint.heartbeat_interval_s:g}: a healthy driver would be replaced",
        )
    if checkpoint.freshness_s is not None and checkpoint.freshness_s < 2 * checkpoint.interval_s:
        yield (
            ("checkpoint", "freshness_s"),
            f"freshness_s = {checkpoint.freshness_s:g} is under twice the interval_s = {checkpoint.interval_s:g}: "
            "a healthy job would count as stale",
        )
    if fold.schedule and fold.by != "dagster":
        yield (
            ("materialization", "schedule"),
            f"a schedule needs `by: dagster`; it is `by: {fold.by}`, and no process would look at the schedule",
        )
    for keys, message in contradictions(job.launcher):
        yield ("launcher", *keys), message


def _check_names(root: Located, problems: Problems) -> None:
    """Report keys that the file may not set, and names that would collide in Dagster."""
    if (own := root.get("file")) is not None:
        problems.add(
            own.line,
            own.path,
            "unknown key; the file has `version`, `jobs`, `defaults`, `observation`, `dagster`, `notify`",
        )
    jobs = root.get("jobs")
    if jobs is None or not isinstance(jobs.value, dict):
        return
    seen: dict[str, str] = {}
    for name, job in jobs.value.items():
        if (own := job.get("name")) is not None:
            problems.add(own.line, own.path, "unknown key; a job's name is its key under `jobs`")
        other = seen.setdefault(identifier(name), name)
        if other != name:
            problems.add(job.line, job.path, f"differs from job {other!r} only in - and _; rename one of them")


def _store_problem(store: str) -> str | None:
    if "://" not in store:
        return None
    parts = urlsplit(store)
    if parts.username or parts.password or parts.query:
        return "holds credentials or parameters; put them into `storage_options`"
    return None


def _target_problem(job: JobSpec) -> str | None:
    if job.migration.to_store.rstrip("/") == job.store.rstrip("/"):
        return "is the store that the job has; leave it out once the job was moved"
    return _store_problem(job.migration.to_store)


def _place_problem(text: str) -> str | None:
    try:
        return _store_problem(Place.parse(text).root_url)
    except InvalidConfiguration as error:
        return str(error)


def _problem(detail: ErrorDetails, root: Located) -> tuple[int, tuple[Key, ...], str]:
    """Convert one error of pydantic to line, key and Stillstate's message."""
    # "[key]" and the names of trigger kinds are pydantic's, not places in the file.
    loc = tuple(part for part in detail["loc"] if not (isinstance(part, str) and part.startswith("[")))
    place, missing = root.find(loc)
    kind = detail["type"]
    if kind == "missing":
        return place.line, (*place.path, *missing), "this key is required"
    if kind == "extra_forbidden":
        return place.line, place.path, _unknown_key(loc)
    message = refusal(detail, Spec)
    if kind == "literal_error" and loc == ("version",):
        message = "must be 1, the only version that this Stillstate reads; upgrade it for a newer file"
    elif loc[:1] == ("jobs",) and len(loc) == 2 and kind == "string_pattern_mismatch":
        message = "a job name is 1 to 63 of a-z, 0-9, _ and -, starting with a letter or digit"
    elif loc[-1:] == ("entry_point",) and kind == "string_pattern_mismatch":
        message = "must be `package.module:function`, for example `examples.flights.job:build`"
    elif "owners" in loc and kind == "string_pattern_mismatch":
        message = "an owner is an e-mail address or `team:name`"
    elif kind in ("model_type", "dict_type"):
        message = "must be a mapping" + ("; it is empty" if place.value is None else "")
    return place.line, place.path, message


def _unknown_key(loc: tuple[Key, ...]) -> str:
    """Return `unknown key`, with the keys that the place has."""
    group = group_at(Spec, loc[:-1])
    if group is MaterializationSpec and loc[-1] == "enabled":
        return "unknown key; it is `by: driver` or `by: nobody` now"
    return unknown_key(
        str(loc[-1]), group.model_fields.keys() - {"name", "file"} | ({"defaults"} if group is Spec else set())
    )
