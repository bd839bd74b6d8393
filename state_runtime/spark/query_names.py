"""The names that users give to parts of a query: aliases of frames, subqueries, common table expressions and views.

Spark's optimizer drops them, so they are read from the analyzed plan, and found again by the numbers of columns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from state_runtime.spark.catalyst import id_of
from state_runtime.spark.jvm import items, kind_of

__all__ = ["Aliases", "source_place"]

_THROUGH: Final = frozenset({"Project", "Filter", "SubqueryAlias", "View", "EventTimeWatermark", "CTERelationDef"})
_OUTSIDE: Final = re.compile(r"[^A-Za-z0-9_-]+")


class Aliases:
    """The aliases in an analyzed plan."""

    def __init__(self, plan: Any) -> None:
        self._named: list[tuple[str, frozenset[int], str]] = []  # kind, numbers of columns, alias or ""
        self._walk(plan, "")

    def of(self, node: Any) -> str:
        """Return the alias of a stateful node of the optimized plan; "" if it has none, or if that is not sure."""
        own = _columns(node)
        found = {alias for kind, columns, alias in self._named if kind == kind_of(node) and own & columns}
        return found.pop() if len(found) == 1 else ""

    def of_source(self, leaf: Any) -> str:
        """Return the alias of a stream."""
        own = _columns(leaf)
        return next((a for kind, columns, a in self._named if kind == kind_of(leaf) and columns == own), "")

    def _walk(self, node: Any, alias: str) -> None:
        kind = kind_of(node)
        if kind == "SubqueryAlias":
            alias = str(node.alias())
        if kind not in _THROUGH:
            self._named.append((kind, _columns(node), _name(alias) if alias else ""))
            alias = ""
        for child in items(node.children()):
            self._walk(child, alias)


def _columns(node: Any) -> frozenset[int]:
    """Return the numbers of the columns that a node makes; of one that makes none, of those that it gives."""
    given = frozenset(id_of(each) for child in items(node.children()) for each in items(child.output()))
    own = frozenset(map(id_of, items(node.output())))
    return own - given or own


def source_place(leaf: Any) -> str:
    """Return a name for a stream without an alias: the last part of its path, its topic or its table, else its
    format."""
    options: dict[str, str] = {}
    format_name = "source"
    if kind_of(leaf) == "StreamingRelation":
        format_name = str(leaf.dataSource().className())
        given = leaf.dataSource().options()
        options = {str(k).lower(): str(given.apply(k)) for k in items(given.keys().toSeq())}
    elif kind_of(leaf) == "StreamingRelationV2":
        format_name = str(leaf.sourceName())
        given = leaf.extraOptions()
        options = {str(k).lower(): str(given.get(k)) for k in _keys(given)}
    place = next((options[name] for name in ("path", "subscribe", "dbtable", "table") if options.get(name)), "")
    last = place.rstrip("/").rpartition("/")[2]
    return _name(last or format_name)


def _keys(options: Any) -> Sequence[Any]:
    return list(options.keySet().toArray())


def _name(text: str) -> str:
    return _OUTSIDE.sub("-", text).strip("-_")[:60] or "source"
