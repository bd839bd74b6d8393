"""Check of a pipeline against the stored state, and the state descriptions for the next manifests; pure.

These changes are allowed between two runs, and nothing is rewritten for them:

- value columns: added (old rows have null, or the column's default), dropped, reordered, widened (integers, float to
  double, more digits of a decimal; nested types likewise); a renamed column is a dropped and an added one;
- TTL of a state switched on (stored rows never expire) or off (rows that had expired by then stay gone);
- operators and states added; removed only on request: `allow_dropped_state`, or `deleteIfExists` of the processor.

Every other change is refused before a row is processed. Old rows stay as they are and are converted to the newest
columns when they are read (`changelog/versions.py`), so a restart with changed states costs no more than one without.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from state_runtime.base.errors import CorruptManifest, InvalidConfiguration, InvalidPipeline, check
from state_runtime.base.joining import CONDITION
from state_runtime.snapshot.manifest import (
    DUE_WHEN_REMOVED,
    Manifest,
    OperatorEntry,
    SchemaVersion,
    StateEntry,
    StateKind,
)
from state_runtime.state.ddl import DdlColumn, parse_ddl
from state_runtime.state.table import widens

__all__ = ["reconcile", "refuse_drained", "usable_versions"]

_KIND_TEXT: Mapping[StateKind, str] = {
    "value": "a value state",
    "list": "a list state",
    "map": "a map state",
    "timers": "the timers",
    "rows": "a state of many rows",
}
_NEW_UID = "Give the changed operator a new uid, with which it starts empty"


def refuse_drained(before: Manifest | None, where: str, *, allow_drained: bool) -> None:
    """Refuse a start from a drained snapshot, unless `allow_drained` is set.

    When the job was drained, its windows closed early and their output was published. Later rows would open those
    windows again and output them twice.

    Args:
        where: the job or the place, for the message.

    Raises:
        InvalidConfiguration: the snapshot was drained. Nothing was written.
    """
    if before is not None and before.drained and not allow_drained:
        raise InvalidConfiguration(
            f"snapshot {before.snapshot_id} of {where} was drained: all its windows and event-time timers have fired. "
            "To go on from it nevertheless, start with --allow-drained (allow_drained=True); rows for windows that "
            "were open then make new ones"
        )


def reconcile(
    before: Manifest | None,
    operators: Sequence[OperatorEntry],
    dropped_by_processor: Mapping[str, Collection[str]] | None = None,
    *,
    snapshot_id: int,
    allow_dropped_state: bool = False,
) -> tuple[OperatorEntry, ...]:
    """Check a pipeline's operators against a snapshot and return their entries for the next manifests.

    Args:
        before: the snapshot that the run continues from; None if the job has no snapshot.
        operators: as the pipeline declares them.
        dropped_by_processor: per uid the states that its processor deletes (`deleteIfExists`). A state that the
            processor also declares starts empty.
        snapshot_id: exactly the first snapshot that may hold rows of the run; older snapshots are read as they were
            written. With the run's fencing snapshot as `before` it is the next id. (A check before the fencing may
            pass any newer id.)
        allow_dropped_state: whether operators and states that the pipeline no longer has are dropped.

    Returns:
        Entries in the order of `operators`. Readers of `before` also use these instead of the entries in `before`:
        they describe both the stored columns and the columns that they are read as.

    Raises:
        InvalidPipeline: the stored state does not fit; the message names operator, state and column, old and new, and
            the remedy. Nothing was changed. CorruptManifest: the snapshot's own description cannot be read.
    """
    if before is None:
        return tuple(operators)
    check(snapshot_id > before.snapshot_id, f"snapshot {snapshot_id} goes on from {before.snapshot_id}")
    stored = {operator.uid: operator for operator in before.operators}
    gone = sorted(set(stored) - {operator.uid for operator in operators})
    if gone and not allow_dropped_state:
        raise InvalidPipeline(
            f"snapshot {before.snapshot_id} holds state of operator {gone[0]!r}, which the pipeline no longer has. Put "
            "it back (operators match by uid), or give its state up with allow_dropped_state"
            f"{_renaming(gone[0], [each.uid for each in operators if each.says and each.uid not in stored])}"
        )
    entries = []
    for new in operators:
        old = stored.get(new.uid)
        if old is None:
            entries.append(replace(new, since=snapshot_id))
            continue
        step = _Step(before, new.uid, snapshot_id, frozenset((dropped_by_processor or {}).get(new.uid, ())))
        entries.append(step.operator(old, new, allow_dropped_state=allow_dropped_state))
    return tuple(entries)


def _renaming(gone: str, new: Sequence[str]) -> str:
    """Return the way to say that a new operator of a query is one of the snapshot; "" without new ones."""
    if not new:
        return ""
    return (
        f". The query has {', '.join(map(repr, new))} instead; if it is the same operator, say so: query(…, names="
        f'{{"{new[0]}": "{gone}"}})'
    )


def usable_versions(before: Manifest, operators: Sequence[OperatorEntry]) -> dict[str, str]:
    """Return the local versions of `before` that can still be used: of operators whose stored layout is unchanged.

    Args:
        operators: the result of `reconcile`.
    """
    stored = {operator.uid: operator for operator in before.operators}
    return {
        new.uid: before.versions[new.uid]
        for new in operators
        if new.uid in before.versions and new.uid in stored and _layout(new) == _layout(stored[new.uid])
    }


def _layout(operator: OperatorEntry) -> object:
    return {state.name: replace(state, history=()) for state in operator.states}


class _Step:
    """The change from one description of an operator to the next."""

    def __init__(self, before: Manifest, uid: str, snapshot_id: int, deleted: frozenset[str]) -> None:
        self._before = before
        self._uid = uid
        self._snapshot_id = snapshot_id
        self._deleted = deleted
        self._ended_ms = before.time.batch_time_ms if before.time is not None else 0
        stored = [s.snapshot_id for s in before.segments]
        stored += [layer.newest_in(table) for layer in before.layers for table in layer.tables]
        stored += [before.shards.oldest_snapshot_id] if before.shards is not None else []
        # A column or state that was dropped before the oldest stored object needs no description.
        self._oldest = min(stored, default=snapshot_id)

    def operator(self, old: OperatorEntry, new: OperatorEntry, *, allow_dropped_state: bool) -> OperatorEntry:
        where = f"operator {self._uid!r}"
        if new.kind != old.kind:
            raise InvalidPipeline(
                f"{where}: it is a {new.kind} now, and a {old.kind} in {self._snapshot}, whose state it cannot read. "
                f"{_NEW_UID}"
            )
        self._check_says(old, new, where)
        if self._shape(new.key_schema) != self._shape(old.key_schema):
            raise InvalidPipeline(
                f"{where}: its keys are ({new.key_schema}) now, and ({old.key_schema}) in {self._snapshot}; state "
                f"cannot be found under other keys. {_NEW_UID}"
            )
        # Format 1 did not store modes. In format 1, as now, latest_by has no mode where it is by one descending column,
        # and an aggregate has none in update mode.
        if old.modes not in (new.modes, new.modes.removesuffix(DUE_WHEN_REMOVED)) and (
            old.modes or new.kind in ("latest-by", "aggregate")
        ):
            raise InvalidPipeline(
                f"{where}: it runs as {new.modes or 'none'} now, and as {old.modes or 'none'} in {self._snapshot}; "
                f"that cannot change (Spark's STATE_STORE_INVALID_CONFIG_AFTER_RESTART). Set it back. {_NEW_UID}"
            )
        for name in sorted(set(old.functions) & set(new.functions)):
            if old.functions[name] != new.functions[name]:
                raise InvalidPipeline(
                    f"{where}: {name!r} is {new.functions[name]} now, and {old.functions[name]} in {self._snapshot}. "
                    "Give the changed one another name"
                )
        if new.says and not allow_dropped_state:
            self._check_functions(old, new, where)
        states = tuple(self._state(old.state(state.name), state) for state in new.states)
        names = {state.name for state in states}
        for state in old.states:
            if state.name not in names and state.name not in self._deleted and not allow_dropped_state:
                raise InvalidPipeline(
                    f"{where}, state {state.name!r}: {self._snapshot} holds it, and the operator no longer has it. Put "
                    "it back; or delete it with deleteIfExists in the processor's init(), or with allow_dropped_state"
                )
        # The `since` of a state that starts again under its old name already says so.
        dropped = dict(old.dropped) | {s.name: self._snapshot_id for s in old.states if s.name not in names}
        dropped = {name: at for name, at in dropped.items() if at > self._oldest and name not in names}
        return replace(
            new, states=states, since=old.since, dropped=dict(sorted(dropped.items())), next_due_ms=old.next_due_ms
        )

    def _check_says(self, old: OperatorEntry, new: OperatorEntry, where: str) -> None:
        """Check that the keys of a query's operator say what they said: state of other keys would be taken for theirs.

        An operator that only a number in its name tells from others must also read what it read.
        """
        if old.says == new.says or not old.says:
            return
        if not new.says:
            raise InvalidPipeline(
                f"{where}: it is written in steps now, and is an operator of a query in {self._snapshot}, whose "
                f"columns have names of their own. {_NEW_UID}"
            )
        keys = [", ".join(text for name, text in sorted(entry.says.items()) if name) for entry in (new, old)]
        rename = f'query(…, names={{"{self._uid}": "another-name"}})'
        if keys[0] != keys[1]:
            what = "keys and condition are" if CONDITION in {*new.says, *old.says} else "keys are"
            raise InvalidPipeline(
                f"{where}: its {what} ({keys[0]}) now, and ({keys[1]}) in {self._snapshot}; state of other keys is "
                f"of no use. Set them back; or give it another name, {rename}, and its state up with "
                "allow_dropped_state: then it starts empty"
            )
        raise InvalidPipeline(
            f"{where}: several operators of the query have this name but for a number, or had in {self._snapshot}, or "
            "several of its columns say the same; and what it reads has changed since: it is not sure which state is "
            f'whose. Give each operator a name of its own, .alias("…") on its frame or its subquery, or {rename}; or '
            "set the query back"
        )

    def _check_functions(self, old: OperatorEntry, new: OperatorEntry, where: str) -> None:
        """Refuse an operator of a query that lost a function and got another one: that may be one that was changed, and
        its sums so far would silently be gone."""
        gone = sorted(text for name, text in old.functions.items() if name not in new.functions)
        came = sorted(text for name, text in new.functions.items() if name not in old.functions)
        if gone and came:
            raise InvalidPipeline(
                f"{where}: {', '.join(came)} is new, and {', '.join(gone)} of {self._snapshot} is gone. If one became "
                "the other, it would begin from nothing. Keep the old one beside it; or, if that is meant, start once "
                "with allow_dropped_state"
            )

    def _state(self, old: StateEntry | None, new: StateEntry) -> StateEntry:
        if old is None or new.name in self._deleted:
            return replace(new, since=self._snapshot_id, history=())
        where = f"operator {self._uid!r}, state {new.name!r}"
        if new.kind != old.kind:
            raise InvalidPipeline(
                f"{where}: it is {_KIND_TEXT[new.kind]} now, and {_KIND_TEXT[old.kind]} in {self._snapshot} (Spark's "
                "STATE_STORE_INVALID_VARIABLE_TYPE_CHANGE). Give the changed state another name"
            )
        if self._shape(new.entry_schema) != self._shape(old.entry_schema):
            raise InvalidPipeline(
                f"{where}: its map key is ({new.entry_schema}) now, and ({old.entry_schema}) in {self._snapshot}; "
                "entries cannot be found under other keys. Give the changed state another name"
            )
        if new.time != old.time and "due" in (new.time, old.time):
            raise InvalidPipeline(
                f"{where}: its rows have the time {new.time or 'none'!r} now, and {old.time or 'none'!r} in "
                f"{self._snapshot}; that cannot change. {_NEW_UID}"
            )
        self._check_columns(self._columns(old.schema), self._columns(new.schema), where)
        history = old.history
        if (new.schema, new.time) != (old.schema, old.time):
            history = (*history, SchemaVersion(self._snapshot_id, old.schema, old.time, self._ended_ms))
        history = tuple(version for version in history if version.until > self._oldest)
        return replace(new, since=old.since, history=history)

    def _check_columns(self, old: Sequence[DdlColumn], new: Sequence[DdlColumn], where: str) -> None:
        before = {column.name: column for column in old}
        spelled = {column.name.lower(): column.name for column in old}
        for column in new:
            was = before.get(column.name)
            if was is None and column.name.lower() in spelled:
                raise InvalidPipeline(
                    f"{where}: the column {column.name!r} is spelled {spelled[column.name.lower()]!r} in "
                    f"{self._snapshot}; Spark does not tell case apart. Spell it as it was"
                )
            if was is None:
                if column.type is None:
                    raise InvalidPipeline(
                        f"{where}: a column {column.name!r} of type {column.type_text} cannot be added to stored rows. "
                        "Put it into a state of its own"
                    )
            elif was.type_text != column.type_text and not (
                was.type is not None and column.type is not None and widens(was.type, column.type)
            ):
                raise InvalidPipeline(
                    f"{where}: the column {column.name!r} is {column.type_text} now, and {was.type_text} in "
                    f"{self._snapshot}; stored values do not fit. Types may only be widened (int to bigint, float to "
                    "double). Set the type back, or give the changed column another name: then the old one is dropped"
                )

    @property
    def _snapshot(self) -> str:
        return f"snapshot {self._before.snapshot_id}"

    def _columns(self, schema: str) -> tuple[DdlColumn, ...]:
        try:
            return parse_ddl(schema) if schema else ()
        except ValueError as error:
            raise CorruptManifest(
                f"{self._snapshot}: the columns ({schema[:200]}) of operator {self._uid!r} cannot be read: {error}"
            ) from error

    def _shape(self, schema: str) -> list[tuple[str, str]]:
        """Return the part of key columns that must not change. Spark's spelling of a DDL may change."""
        return [(column.name, column.type_text.lower()) for column in self._columns(schema)]
