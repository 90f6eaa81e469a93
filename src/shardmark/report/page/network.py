"""The network on the report page: the tables of `compare --network`, ready for the template."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.analysis.compare.comparison import Comparison
from shardmark.report.page.tables import PageTable, page_table
from shardmark.report.table.sections import Section
from shardmark.report.views.network_view import network_sections


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
        _part(number, section, first=number == 1)
        for number, section in enumerate(network_sections(comparison), start=1)
    ]


def _part(number: int, section: Section, *, first: bool) -> NetworkPart:
    columns = section.table.columns
    rows = section.table.rows
    is_links = section.title.startswith("Links")
    return NetworkPart(
        title=section.title,
        table=page_table(f"network-{number}", section.title, columns) if rows else None,
        notes=section.table.notes,
        folded=not first and not is_links and bool(rows),
    )
