"""Settings by names that stand beside each other, `checkpoint_batches=3`: so a test lays what it changes over what it has."""

from __future__ import annotations

from typing import Any

from state_runtime.base.settings import JobSettings, SettingsGroup, groups_of

_PREFIXES = {"materialization": "materialize", "local_recovery": "local"}


def _places() -> dict[str, tuple[str, str]]:
    """Group and key of each name: of the key alone where one group has it, and behind the group's prefix."""
    found: dict[str, tuple[str, str]] = {}
    for group, field in JobSettings.model_fields.items():
        for kind in groups_of(field.annotation):
            for key in kind.model_fields:
                found.setdefault(key, (group, key))
                found[f"{_PREFIXES.get(group, group)}_{key}"] = (group, key)
    return found


PLACES = _places()


def job_settings(base: JobSettings | None = None, /, **changes: Any) -> JobSettings:
    """`base`, or the defaults, with some changes.

    Args:
        changes: also whole groups; `materialize=False` leaves it to another process, `local_recovery=False` is no copy.
    """
    found: dict[str, Any] = {} if base is None else base.model_dump()
    for name, value in changes.items():
        if name == "materialize":
            name, value = "materialize_by", "driver" if value else "dagster"
        if name == "local_recovery" and isinstance(value, bool):
            name = "local_enabled"
        if name in JobSettings.model_fields:
            is_group = isinstance(value, SettingsGroup)
            found[name] = {**found.get(name, {}), **value.model_dump(exclude_unset=True)} if is_group else value
        else:
            group, key = PLACES.get(name, ("", name))
            found.setdefault(group, {})[key] = value
    return JobSettings(**found)
