"""A `stillstate.yaml` as a Dagster component: a `defs.yaml` mounts it in a code location."""

from pathlib import Path

import dagster as dg

from stillstate.orchestration.definitions import build_definitions

__all__ = ["StillstateComponent"]


class StillstateComponent(dg.Component, dg.Model, dg.Resolvable):
    """The streams of a `stillstate.yaml`.

    Attributes:
        config: the file; a relative path begins in the folder of `defs.yaml`.
        key_prefix: before every asset key and every name; two files in one code location need two prefixes.
        group: of all assets; absent: one group for each stream.
    """

    config: str = "stillstate.yaml"
    key_prefix: list[str] = []
    group: str | None = None

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Build the definitions. `build_definitions` raises `InvalidConfiguration` with every problem of the file."""
        folder = context.path if context.path.is_dir() else context.path.parent
        file = folder / Path(self.config).expanduser()
        return build_definitions(file, key_prefix=self.key_prefix, group=self.group)
