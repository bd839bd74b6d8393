"""The mount of one file's streams in Dagster: asset keys, names, groups and tags; pure.

Every name in Dagster is made by a `Mount`, so that several files can be in one code location, and jobs of the same name
in two of them are two jobs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import dagster as dg

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.maintenance.plans import Kind
from stillstate.orchestration.config.spec import identifier

__all__ = ["Mount", "Translator"]

Translator = Callable[[dg.AssetSpec], dg.AssetSpec]
"""Changes how an asset is shown, but not its key."""

_PLANNED: Final[dict[Kind, str]] = {"retention": "retained_snapshots", "gc": "garbage"}
_APPLIED: Final[dict[Kind, str]] = {"retention": "deleted_snapshots", "gc": "collected_garbage"}


@dataclass(frozen=True, kw_only=True)
class Mount:
    """The names of a file's streams in Dagster.

    Attributes:
        key_prefix: before every asset key; before the names of jobs, schedules, sensors, ops and the resource too.
        group: of all assets; None: one for each stream.
        translator: has the last word on how an asset is shown.
        is_shared: one Dagster job for each kind of work, whose configuration names the stream; else one for each
            stream.

    Raises:
        InvalidConfiguration: a prefix that Dagster's names cannot have.
    """

    key_prefix: tuple[str, ...] = ()
    group: str | None = None
    translator: Translator | None = None
    is_shared: bool = False

    def __post_init__(self) -> None:
        for part in self.key_prefix:
            if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", part) is None:
                raise InvalidConfiguration(
                    f"key_prefix {part[:80]!r}: each part is 1 to 63 of letters, digits, _ and -, and begins with a "
                    "letter or digit"
                )

    # --- asset keys --------------------------------------------------------------------------------------------------

    def key(self, *parts: str) -> dg.AssetKey:
        """Return a key below the prefix."""
        return dg.AssetKey([*self.key_prefix, *parts])

    def overview(self) -> dg.AssetKey:
        """`[stillstate, overview]`: one table of all streams of the file."""
        return self.key("stillstate", "overview")

    def stream(self, job: str) -> dg.AssetKey:
        """`[job, stream]`: materialized once for each run of the driver."""
        return self.key(job, "stream")

    def checkpoints(self, job: str) -> dg.AssetKey:
        """`[job, checkpoints]`: materialized with the content of an interval."""
        return self.key(job, "checkpoints")

    def materialized(self, job: str) -> dg.AssetKey:
        """`[job, materialized_state]`: materialized once for each fold of the changelog into tables."""
        return self.key(job, "materialized_state")

    def savepoints(self, job: str) -> dg.AssetKey:
        """`[job, savepoints]`: materialized when Dagster makes one."""
        return self.key(job, "savepoints")

    def compacted(self, job: str) -> dg.AssetKey:
        """`[job, compacted_output]`: materialized once for each upkeep of what the sinks write."""
        return self.key(job, "compacted_output")

    def planned(self, job: str, kind: Kind) -> dg.AssetKey:
        """Return the key of a plan's subject: the retained snapshots, or the present garbage."""
        return self.key(job, _PLANNED[kind])

    def applied(self, job: str, kind: Kind) -> dg.AssetKey:
        """Return the key of the deletions that plans made."""
        return self.key(job, _APPLIED[kind])

    def keys_of(self, job: str) -> list[dg.AssetKey]:
        """Return the keys of all assets of a stream."""
        return [
            self.stream(job),
            self.checkpoints(job),
            self.materialized(job),
            self.savepoints(job),
            self.compacted(job),
            *(self.key(job, name) for name in (*_PLANNED.values(), *_APPLIED.values())),
        ]

    # --- names -------------------------------------------------------------------------------------------------------

    def name(self, *parts: str) -> str:
        """Return a name that no other mount of the code location has."""
        return "_".join(identifier(part) for part in (*self.key_prefix, *parts))

    @property
    def resource(self) -> str:
        """The key of the resource that reads the file."""
        return self.name("stillstate")

    @property
    def spark(self) -> str:
        """The key of the resource that gives Spark sessions."""
        return self.name("stillstate_spark")

    def job_name(self, action: str, job: str) -> str:
        """Return the name of the Dagster job that does something for a stream."""
        return self.name(action) if self.is_shared else self.name(action, job)

    def launch_text(self, action: str, job: str) -> str:
        """Return the job that a person launches, in words."""
        name = self.job_name(action, job)
        return f"{name} (with `stream: {job}`)" if self.is_shared else name

    def group_of(self, job: str) -> str:
        """The group of a stream's assets."""
        return self.group or self.name(job)

    def tag(self, job: str) -> str:
        """Return the value of run tags for a stream; `dagster.yaml` limits runs by it."""
        return "/".join((*self.key_prefix, job))

    def shown(self, spec: dg.AssetSpec) -> dg.AssetSpec:
        """Return an asset as the translator wants it.

        Raises:
            InvalidConfiguration: it changed the key, by which sensors and checks find the asset.
        """
        if self.translator is None:
            return spec
        changed = self.translator(spec)
        if changed.key != spec.key:
            raise InvalidConfiguration(
                f"the translator changed the key {spec.key.to_user_string()} into {changed.key.to_user_string()}; "
                "keys follow from key_prefix and the names of jobs"
            )
        return changed
