"""Settings of one job's runtime: frozen values that check themselves.

Each group below is the value that the runtime works with, the schema of its section in `stillstate.yaml`, and the
source of docs/settings.md and of the JSON schema for editors. A new setting is one field here and its test; a field
that only Dagster reads is in the subclass of the group in `orchestration/config/`.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.limits import GIB, KIB, MAX_PARALLELISM, MIB

__all__ = [
    "FAILED_TTL_S",
    "Backend",
    "ChangelogMode",
    "CheckpointMode",
    "CheckpointSettings",
    "Compression",
    "JobSettings",
    "LocalRecoverySettings",
    "MaterializationMode",
    "MaterializationSettings",
    "PartialAggregation",
    "PlacementMode",
    "RecoverySettings",
    "RetentionPolicy",
    "RetentionSettings",
    "SettingsGroup",
    "UploadSettings",
    "VerifyLevel",
    "group_at",
    "groups_of",
    "refusal",
    "unknown_key",
]

FAILED_TTL_S = 7 * 86_400.0

Backend = Literal["arrow", "rocksdb"]
ChangelogMode = Literal["on", "off"]
Compression = Literal["lz4", "zstd", "none"]
MaterializationMode = Literal["auto", "minor", "major"]
PlacementMode = Literal["sticky", "off"]
PartialAggregation = Literal["auto", "on", "off"]
VerifyLevel = Literal["structure", "sample", "full"]
CheckpointMode = Literal["aligned", "unaligned", "aligned-with-timeout"]

_OUT_OF_BOUNDS: Final = frozenset({"greater_than", "greater_than_equal", "less_than", "less_than_equal"})
_COUNT_MAX: Final = 10_000_000
_AGE_MAX_S: Final = 100 * 366 * 86_400.0


class SettingsGroup(BaseModel):
    """Base of every group of settings, also of those that only the file has.

    Raises:
        InvalidConfiguration: a value is refused, or there is no such setting.
    """

    # `hide_input_in_errors` matters: pydantic would otherwise print the value in a secret's place. `defer_build`: a
    # task gets its settings checked, and need not build the schemas.
    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
        defer_build=True,
    )

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**self._with_present_names(given))
        except ValidationError as error:
            lines = [
                f"{type(self).__name__}: {'.'.join(map(str, detail['loc']))}: {refusal(detail, type(self))}"
                for detail in error.errors(include_url=False)
            ]
            raise InvalidConfiguration("\n".join(lines)) from None

    # Then pydantic validates nested groups without calling `__init__`, so that an error keeps its place in the whole.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def of(cls, wider: SettingsGroup) -> Self:
        """Take the fields of this group from a value that has more."""
        found = {}
        for name, field in cls.model_fields.items():
            value, groups = getattr(wider, name), groups_of(field.annotation)
            found[name] = groups[0].of(value) if groups else value
        return cls(**found)

    @classmethod
    def _with_present_names(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return given


def groups_of(annotation: Any) -> list[type[SettingsGroup]]:
    """Return the groups that a field may hold, itself or as values of a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, SettingsGroup):
        return [annotation]
    return [group for argument in get_args(annotation) for group in groups_of(argument)]


def group_at(root: type[SettingsGroup], path: Iterable[str | int]) -> type[SettingsGroup]:
    """Return the group at a path of keys, from `root`."""
    group, is_name = root, False  # every key directly below a mapping is a name
    for key in path:
        field = None if is_name else group.model_fields.get(str(key))
        is_name = field is not None and get_origin(field.annotation) is dict
        group = group if field is None else (groups_of(field.annotation) or [group])[0]
    return group


def refusal(detail: ErrorDetails, root: type[SettingsGroup]) -> str:
    """Return why a value below `root` is refused, in the same words for Python and for `stillstate.yaml`.

    Only numbers that are out of bounds are shown: any other value may be a secret.
    """
    message, kind, path = detail["msg"], detail["type"], detail["loc"]
    if kind == "extra_forbidden":
        return unknown_key(str(path[-1]), group_at(root, path[:-1]).model_fields)
    if message.startswith("Input should be"):
        message = "must be" + message.removeprefix("Input should be")
    return message + (f" (got {detail['input']})" if kind in _OUT_OF_BOUNDS else "")


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return the message about an unknown key: the key that was probably meant, or all known ones."""
    near = difflib.get_close_matches(key, known := sorted(known), n=1)
    return "unknown key; " + (f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(known)}")


def _on_off(value: object) -> object:
    """`on` and `off` are words in YAML 1.2 and booleans in 1.1; people and tools write either."""
    return ("on" if value else "off") if isinstance(value, bool) else value


def _off(value: object) -> object:
    return "off" if value is False else value


class CheckpointSettings(SettingsGroup):
    """When checkpoints are made and how they are written."""

    interval_s: float = Field(default=0.0, ge=0, le=86_400)
    """Least time from one checkpoint to the next. Output is published at checkpoints only. 0: a checkpoint after each
    epoch. A longer interval costs fewer requests."""
    batches: int = Field(default=1, ge=1, le=100_000)
    """Least number of epochs from one checkpoint to the next. Where `interval_s` is set too, the first of the two that
    is reached makes a checkpoint due."""
    mode: CheckpointMode = "aligned-with-timeout"
    """When an epoch ends. `aligned`: once all rows that it read are processed. `unaligned`: after `unaligned_epoch_s`;
    rows that are not processed by then become part of the snapshot, and the next epoch processes them before it reads
    anything else. `aligned-with-timeout`: aligned until the epoch has taken `aligned_timeout_s`, then unaligned."""
    aligned_timeout_s: float = Field(default=10.0, ge=0.1, le=86_400)
    """With `aligned-with-timeout`: how long an epoch waits for its rows. With a checkpoint interval it waits until the
    next checkpoint is due, if that is later."""
    unaligned_epoch_s: float = Field(default=1.0, ge=0.1, le=86_400)
    """How long an unaligned epoch takes, or until the next checkpoint is due, if that is later. Raise it for fewer and
    larger epochs."""
    max_inflight_bytes: int = Field(default=GIB, ge=MIB, le=1 << 50)
    """Rows in flight that one snapshot holds at most, of all operators and shards together, by their size in memory. An
    epoch that would leave more continues. Lower it for smaller snapshots; raise it for shorter epochs behind a large
    backlog."""
    pending_bytes_max: int = Field(default=16 * MIB, ge=0, le=GIB)
    """Changes of epochs without a checkpoint that the driver holds in memory before it writes them."""
    pending_output_bytes_max: int = Field(default=GIB, ge=0, le=1 << 50)
    """Staged output that waits for sinks that are away, at most, while state and checkpoints go on. Beyond it no epoch
    begins until a sink has taken some. 0: a sink that is away ends the run."""
    tolerable_failures: int = Field(default=3, ge=0, le=1000)
    """How often in a row an epoch or a checkpoint that fails because a store is away is run again in the same process.
    0: the run ends at the first failure."""
    drain_epochs_max: int = Field(default=100, ge=1, le=1_000_000)
    """Epochs that draining runs at most, for timers that set timers. Timers that remain stay in the savepoint."""
    inline_bytes_max: int = Field(default=256 * KIB, ge=0, le=64 * MIB)
    """Changes of one task up to this size are sent to the driver and packed into the epoch's one segment. A task
    uploads larger ones as an object of its own."""
    heartbeat_interval_s: float = Field(default=2.0, ge=0.05, le=3600)
    """How often the driver writes its heartbeat and looks for control requests."""


class UploadSettings(SettingsGroup):
    """How changelog objects reach the store: when an attempt gets a rival, and when an upload fails."""

    timeout_s: float = Field(default=1.0, ge=0.01, le=600)
    """An attempt that takes longer (plus what `bytes_per_s` allows for its size) gets a second one beside it; the first
    to succeed wins. Raise it for a slow store."""
    attempts_max: int = Field(default=3, ge=1, le=10)
    """Attempts for one object that are under way at once, at most."""
    in_flight_bytes_max: int = Field(default=100 * MIB, ge=MIB, le=64 * GIB)
    """Bytes that the uploads of one executor hold, hanging attempts included. Beyond it tasks wait: `upload_wait_ms`
    says how long. An object that is larger is uploaded alone."""
    deadline_s: float = Field(default=120.0, ge=1, le=3600)
    """An upload fails, and its epoch is run again, after this time, or after `attempts_max` timeouts if those take
    longer."""
    bytes_per_s: int = Field(default=4 * MIB, ge=64 * KIB, le=64 * GIB)
    """Speed that one upload reaches at least while the store is well: an attempt for 1 GiB has 4 minutes. Lower it for
    a slow line, or every large object is uploaded twice."""

    def attempt_s(self, size: int) -> float:
        """Return how long an attempt may take before the next one begins."""
        return self.timeout_s + size / self.bytes_per_s

    def upload_s(self, size: int) -> float:
        """Return how long all attempts together may take."""
        return max(self.deadline_s, self.attempts_max * self.attempt_s(size))


class LocalRecoverySettings(SettingsGroup):
    """Whether shards are restored from copies on their host's disk, and what those may take of it."""

    enabled: bool = True
    """Whether shards may be restored from copies on the host's disk."""
    bytes_max: int = Field(default=64 * GIB, ge=0, le=1 << 60)
    """What local copies of one job may take of one host's disk."""
    copies_max: int = Field(default=4, ge=1, le=1000)
    """Copies of one shard that a restart looks at, the newest first."""


LocalRecovery = Annotated[
    LocalRecoverySettings,
    BeforeValidator(
        lambda value: {"enabled": value} if isinstance(value, bool) else value,
        json_schema_input_type=LocalRecoverySettings | bool,
    ),
]


class MaterializationSettings(SettingsGroup):
    """Which process folds the changelog into state tables, and when."""

    by: Literal["driver", "dagster", "nobody"] = "driver"
    """`driver` folds in the background, beside its epochs; `dagster` folds in a Spark job of its own, when a sensor
    finds it due and on a schedule; `nobody`: only `stillstate materialize` folds."""
    interval_s: float = Field(default=600.0, ge=0.1, le=31 * 86_400)
    """Fold at least this often, if there is anything to fold."""
    min_bytes: int = Field(default=64 * MIB, ge=1, le=1 << 50)
    """Size of the log below which it is not folded for its size."""
    ratio: float = Field(default=0.3, ge=0.01, le=100)
    """A range of keys gets a new base table once its changes reach about this share of it, and the log is folded at
    half of this share of all tables. A lower ratio takes less space and writes more."""
    max_segments: int = Field(default=256, ge=2, le=4096)
    """Fold at this many log segments, whatever their size, so that the manifest and the number of reads at a restart
    stay bounded."""
    replay_s: float = Field(default=10.0, ge=0.1, le=86_400)
    """Fold when a restart would need about this long to replay the log."""
    takeover_s: float = Field(default=1800.0, ge=0, le=31 * 86_400)
    """With `by: dagster`: once a materialization has been due for this long and Dagster has not made it, the driver
    makes it, with a warning in its log, until Dagster does again. 0: never."""
    cells_max: int = Field(default=256, ge=1, le=4096)
    """Tables of 32 MiB or more that a state is cut into at most, as long as none exceeds `cell_bytes_max`; a larger
    state has more, up to 8,192. Manifests name them all (260 bytes each)."""
    cell_bytes_max: int = Field(default=256 * MIB, ge=32 * MIB, le=GIB)
    """What a table should hold where `cells_max` tables would be larger; it is split at twice this size. Beyond 1 TiB
    of state tables grow again, so that a manifest can name them. A fold reads a table whole and takes several times its
    size in memory; a table of more than 4 GiB unpacked is refused."""

    @property
    def driver_takes_over_after_s(self) -> float:
        """`takeover_s` if Dagster folds; 0 (never) if the driver need not stand in for it."""
        return self.takeover_s if self.by == "dagster" else 0.0


class RecoverySettings(SettingsGroup):
    """When a driver counts as lost, and how often it is started again."""

    stall_timeout_s: float = Field(default=900.0, ge=0, le=31 * 86_400)
    """A driver in which neither an epoch nor a task has ended for this long, although its source has input, is stalled:
    it logs what its threads do. 0: never."""


class RetentionPolicy(SettingsGroup):
    """Which snapshots are kept: those that any rule keeps. A rule that is left out keeps nothing; 0 is refused, it
    would delete everything by mistake."""

    keep_last: int | None = Field(default=None, ge=1, le=_COUNT_MAX)
    """Keep this many newest, also by the driver."""
    keep_within_s: float | None = Field(default=None, gt=0, le=_AGE_MAX_S)
    """Keep what is at most this much older than the newest."""
    keep_hourly: int | None = Field(default=None, ge=1, le=_COUNT_MAX)
    """Keep the newest of each of this many newest hours (UTC) that have any. The oldest of all is kept too until the
    series is full, so that history reaches back as far as it can."""
    keep_daily: int | None = Field(default=None, ge=1, le=_COUNT_MAX)
    """The same of days (UTC)."""
    keep_weekly: int | None = Field(default=None, ge=1, le=_COUNT_MAX)
    """The same of ISO weeks."""
    keep_monthly: int | None = Field(default=None, ge=1, le=_COUNT_MAX)
    """The same of months."""
    keep_yearly: int | None = Field(default=None, ge=1, le=_COUNT_MAX)
    """The same of years."""
    # YAML has lists and no tuples.
    keep_tags: tuple[str, ...] = Field(default=(), max_length=100, strict=False)
    """Keep savepoints with one of these tags."""
    max_age_s: float | None = Field(default=None, gt=0, le=_AGE_MAX_S)
    """Delete what is more than this much older than the newest and no rule keeps."""
    max_count: int | None = Field(default=None, ge=1, le=_COUNT_MAX)
    """Delete what is beyond this many newest and no rule keeps."""
    failed_ttl_s: float = Field(default=FAILED_TTL_S, gt=0, le=_AGE_MAX_S)
    """How long savepoints that failed are kept for inspection, counted from now."""

    @property
    def is_empty(self) -> bool:
        """Whether it has no rule for snapshots: then it plans nothing."""
        return not any(getattr(self, name) for name in RetentionPolicy.model_fields.keys() - {"failed_ttl_s"})

    @property
    def goes_by_age(self) -> bool:
        """Whether the times of snapshots decide anything; their number and their tags cannot be wrong."""
        by_age = (
            "keep_within_s",
            "keep_hourly",
            "keep_daily",
            "keep_weekly",
            "keep_monthly",
            "keep_yearly",
            "max_age_s",
        )
        return any(getattr(self, name) is not None for name in by_age)

    @property
    def evicts(self) -> bool:
        """Whether `max_age_s` or `max_count` select snapshots to delete."""
        return self.max_age_s is not None or self.max_count is not None


class RetentionSettings(RetentionPolicy):
    """Which snapshots are kept: those that any rule keeps, and the newest ones that the driver keeps by itself. A rule
    that is left out keeps nothing; 0 is refused, it would delete everything by mistake."""

    retained_checkpoints: int = Field(default=100, ge=0, le=1_000_000)
    """Newest checkpoints that the driver keeps by itself. In the background it expires older ones that no rule keeps
    and nothing needs. `keep_last` counts instead, if it is set. 0: the driver expires nothing."""


Retention = Annotated[
    RetentionSettings, BeforeValidator(lambda value: value.model_dump() if type(value) is RetentionPolicy else value)
]


class JobSettings(SettingsGroup):
    """How a job runs; nothing here but `max_ahead_s` changes a result."""

    parallelism: int = Field(default=0, ge=0, le=MAX_PARALLELISM)
    """Shards of every stateful operator. 0: Spark's default parallelism at the first start, and the newest snapshot's
    value after that. Of a job that was migrated, `stillstate migrate` changes it."""
    local_dir: str = ""
    """Folder for local copies of state. It should outlive the driver, for quick restarts. Empty: a folder of the user
    in the system's temporary directory."""
    scratch_dir: str = ""
    """Folder for Spark's checkpoint directory, which a run removes at its end. A run cannot continue while its disk is
    full; a full `local_dir` does no harm. Empty: the folder of the user that an empty `local_dir` is."""
    backend: Backend = "arrow"
    """What holds a shard's state on local disk: `arrow` (sorted, memory-mapped runs) or `rocksdb` (needs the package
    rocksdict). Snapshots do not depend on it. Of a job that was migrated, `stillstate migrate` changes it."""
    changelog: Annotated[ChangelogMode, BeforeValidator(_on_off, json_schema_input_type=ChangelogMode | bool)] = "on"
    """`on` writes what an epoch changed. `off` uploads new files of the local state at each checkpoint instead: slower
    checkpoints, no materialization."""
    compression: Compression = "lz4"
    """Of the changelog. `zstd` is smaller and slower; `none` is for data that does not shrink."""
    placement: Annotated[PlacementMode, BeforeValidator(_off, json_schema_input_type=PlacementMode | bool)] = "sticky"
    """`sticky` keeps a shard on the executor that has its local copy, as long as that executor lives; `off` leaves the
    choice to Spark."""
    partial_aggregation: Annotated[
        PartialAggregation, BeforeValidator(_on_off, json_schema_input_type=PartialAggregation | bool)
    ] = "auto"
    """`auto` lets Spark aggregate an operator's rows before the shuffle where its newest epochs had 50,000 rows or
    more, of few keys; `on` and `off`: always and never. Only functions whose result stays the same to the last digit
    are aggregated so."""
    max_ahead_s: float | None = Field(default=None, ge=1, le=_AGE_MAX_S)
    """How far an event time may be ahead of an epoch's processing time, for sources that say nothing else
    (`read(…, max_ahead=…)`). Rows beyond it do not move the watermark and are counted (`future_rows`). It decides what
    is late. Empty: no bound, as in Spark."""
    task_bytes_max: int = Field(default=128 * MIB, ge=MIB, le=64 * GIB)
    """Input that a task holds in memory, about, and as much of what it changed. The rest waits on the host's disk."""
    output_rows_per_batch: int = Field(default=65_536, ge=1, le=_COUNT_MAX)
    """Rows of one output Arrow batch of an operator, as sinks get it. Spark gets at most 10,000 at a time."""
    runs_max: int = Field(default=8, ge=2, le=64)
    """Local runs that a look-up searches per shard and state, about. More make merges rarer, fewer make look-ups
    quicker."""
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    upload: UploadSettings = Field(default_factory=UploadSettings)
    local_recovery: LocalRecovery = Field(default_factory=LocalRecoverySettings)
    materialization: MaterializationSettings = Field(default_factory=MaterializationSettings)
    recovery: RecoverySettings = Field(default_factory=RecoverySettings)
    retention: Retention = Field(default_factory=RetentionSettings)

    @property
    def max_ahead_ms(self) -> int | None:
        """`max_ahead_s` in milliseconds, as event times are."""
        return None if self.max_ahead_s is None else round(self.max_ahead_s * 1000)

    @classmethod
    def _with_present_names(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Accept settings of groups by their former names, from before settings had groups."""
        present: dict[str, Any] = {name: value for name, value in given.items() if name not in _FORMER}
        for name in given.keys() & _FORMER.keys():
            group, key = _FORMER[name]
            _warn_of(name, stacklevel=4)
            # `materialize=False` left it to another process.
            value = given[name] if key != "by" else "driver" if given[name] else "dagster"
            before = present.get(group, {})
            if isinstance(before, SettingsGroup):
                before = before.model_dump(exclude_unset=True)
            elif isinstance(before, bool):
                before = {"enabled": before}  # `local_recovery=False`, which stays valid
            # Anything else is refused below, with its place.
            present[group] = {**before, key: value} if isinstance(before, Mapping) else before
        return present

    if not TYPE_CHECKING:  # so that a misspelt name stays a type error

        def __getattr__(self, name: str) -> Any:
            if name not in _FORMER:
                return super().__getattr__(name)
            group, key = _FORMER[name]
            _warn_of(name, stacklevel=3)
            value = getattr(getattr(self, group), key)
            return value == "driver" if key == "by" else value


_FORMER: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        **{f"checkpoint_{key}": ("checkpoint", key) for key in ("interval_s", "batches", "mode")},
        **{
            key: ("checkpoint", key)
            for key in CheckpointSettings.model_fields.keys() - {"interval_s", "batches", "mode"}
        },
        **{f"upload_{key}": ("upload", key) for key in UploadSettings.model_fields},
        **{f"local_{key}": ("local_recovery", key) for key in ("bytes_max", "copies_max")},
        **{
            f"materialize_{key}": ("materialization", key)
            for key in MaterializationSettings.model_fields.keys() - {"by"}
        },
        "materialize": ("materialization", "by"),
        "stall_timeout_s": ("recovery", "stall_timeout_s"),
        "retained_checkpoints": ("retention", "retained_checkpoints"),
    }
)
"""Names of version 0.1.0 before its settings had groups; the version after it removes them."""


def _warn_of(name: str, *, stacklevel: int) -> None:
    group, key = _FORMER[name]
    message = f"JobSettings.{name} is {group}.{key} now: JobSettings({group}={{{key!r}: …}})"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)
