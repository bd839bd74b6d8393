"""What a run's log says of rows that are too far ahead, or fail a condition: once for each source and each step."""

from __future__ import annotations

import logging

from state_runtime.base.progress import RowsAside
from state_runtime.pipeline.expectations import BAD, ExpectStep
from state_runtime.pipeline.future_rows import FutureStep
from state_runtime.pipeline.graph import FUTURE, Graph, SegmentNode, SourceNode

__all__ = ["RowsAsideLog"]

_LOG = logging.getLogger(__name__)


class RowsAsideLog:
    """Logger of such rows in a run's epochs; those that the job reads from a side output need no warning.

    Args:
        graph: as it was compiled.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._said: set[str | int] = set()
        self._set_aside = frozenset(
            getattr(graph.nodes[edge.node], "name", "")
            for node in graph.nodes
            if isinstance(node, SegmentNode) and isinstance(node.code, FutureStep) and node.code.output == FUTURE
            for edge in node.inputs
        )

    def look(self, aside: RowsAside) -> None:
        """Log the warnings that are new."""
        for source, rows in aside.future.items():
            if source not in self._said and source not in self._set_aside:
                self._said.add(source)
                _LOG.warning("%s", self._of_source(source, rows))
        for place, rows in aside.bad.items():
            node = self._graph.nodes[place]
            if place in self._said or not isinstance(node, SegmentNode) or not isinstance(node.code, ExpectStep):
                continue
            self._said.add(place)
            if not node.code.is_read:
                _LOG.warning(
                    "%s%s: rows of a batch fail a condition (%d), and nothing reads output(%r): they are dropped and "
                    "counted (`bad_rows`). Write that output to a sink to keep them, with the names of the conditions",
                    node.code.where,
                    f" at {node.at}" if node.at else "",
                    rows,
                    BAD,
                )

    def _of_source(self, source: str, rows: int) -> str:
        ahead_ms = next(
            (n.max_ahead_ms for n in self._graph.nodes if isinstance(n, SourceNode) and n.name == source), None
        )
        bound = f"max_ahead ({ahead_ms / 1000:,.0f} s)" if ahead_ms is not None else "max_ahead_s of the settings"
        return (
            f"{f'source {source!r}' if source else 'the source'}: event times of a batch are further ahead of the "
            f"clock than {bound} allows (rows: {rows}). They do not move the watermark, are counted (`future_rows`) "
            f"and stay in the stream: a window of such a row stays open until then. output({FUTURE!r}) of the source's "
            "stream takes them out of it"
        )
