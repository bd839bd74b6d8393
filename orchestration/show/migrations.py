"""Displays of the plans of a migration and of a fork."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from stillstate.orchestration.migration.fork_plan import ForkPlan
from stillstate.orchestration.migration.plan import MigrationPlan
from stillstate.orchestration.show.tables import new_table

__all__ = ["fork_table", "plan_table"]


def plan_table(plan: MigrationPlan) -> Table:
    """Return a table of the changes, one setting a line."""
    table = new_table(f"Migration of {plan.job}", "", "is", "becomes")
    for what, now, wanted in plan.rows():
        table.add_row(Text(what), Text(now), Text(wanted))
    return table


def fork_table(plan: ForkPlan) -> Table:
    """Return a table with both jobs beside each other, one property a line."""
    table = new_table(f"Fork of {plan.of}", "", plan.of, plan.job)
    for what, of, job in plan.rows():
        table.add_row(Text(what), Text(of), Text(job))
    return table
