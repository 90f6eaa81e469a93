"""The network on the report page: the tables of `compare --network`, ready for the template."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.analysis.compare.comparison import Comparison
from shardmark.report.page.tables import PageTable, page_table
from shardmark.report.table.sections import text_columns
from shardmark.report.table.table import Table
from shardmark.report.views.network import network_tables


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPart:
    """One table with the notes below it."""

    title: str
    table: PageTable | None
    """None where there are only notes."""
    notes: tuple[str, ...]
    folded: bool
    """Shown when asked for: the long tables below the first one."""


def network_parts(comparison: Comparison) -> list[NetworkPart]:
    """Nothing for runs in which no trial of several ranks ended ok."""
    if not any(len(trial.ranks) > 1 for row in comparison.rows for trial in row.ok_trials):
        return []
    return [
        _part(number, table, first=number == 1)
        for number, table in enumerate(network_tables(comparison), start=1)
    ]


def _part(number: int, table: Table, *, first: bool) -> NetworkPart:
    is_links = table.title.startswith("Links")
    shown = (
        page_table(f"network-{number}", table.title, text_columns(table)) if table.rows else None
    )
    return NetworkPart(
        title=table.title,
        table=shown,
        notes=table.notes,
        folded=not first and not is_links and bool(table.rows),
    )
