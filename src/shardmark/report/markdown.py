"""A table as GitHub's markdown."""

from __future__ import annotations

from collections.abc import Iterable

from shardmark.report.tables import Table


def render_markdown(table: Table) -> str:
    """A pipe table and a list of notes; ends with a line break."""
    lines: list[str] = []
    if any(column.cells for column in table.columns):
        titles = (column.title.replace("\n", " ") for column in table.columns)
        marks = ("---:" if column.numeric else ":---" for column in table.columns)
        lines = [_line(titles), _line(marks), *(_line(row) for row in table.rows), ""]
    lines += [f"- {_escape(note)}" for note in table.notes]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(_escape(cell) for cell in cells)} |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
