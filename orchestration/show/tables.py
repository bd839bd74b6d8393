"""One style for all tables."""

from __future__ import annotations

from rich.table import Table

__all__ = ["new_table"]


def new_table(title: str, *columns: str) -> Table:
    """Return a table; a column whose name ends in `>` holds numbers and is aligned to the right."""
    table = Table(
        title=title, title_justify="left", header_style="bold", show_header=any(c.strip(">") for c in columns)
    )
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    return table
