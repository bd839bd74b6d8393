"""How the plan of a migration is shown."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from orchestration.migration.plan import MigrationPlan
from orchestration.show.tables import new_table

__all__ = ["plan_table"]


def plan_table(plan: MigrationPlan) -> Table:
    """What changes, one setting a line."""
    table = new_table(f"Migration of {plan.job}", "", "is", "becomes")
    for what, now, wanted in plan.rows():
        table.add_row(Text(what), Text(now), Text(wanted))
    return table
