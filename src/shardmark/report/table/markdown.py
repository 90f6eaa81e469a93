"""A table as GitHub's markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardmark.report.table.tables import Table


def render_markdown(table: Table) -> str:
    """A pipe table and a list of notes; ends with a line break."""
    lines: list[str] = []
    if any(column.cells for column in table.columns):
        titles = (column.title.replace("\n", " ") for column in table.columns)
        marks = ("---:" if column.numeric else ":---" for column in table.columns)
        lines = [_line(titles), _line(marks), *(_line(row) for row in table.rows), ""]
    lines += [f"- {escape_markdown(note)}" for note in table.notes]
    return "\n".join(lines) + "\n"


def markdown_section(title: str, points: Sequence[str]) -> str:
    """A heading with a list; ends with a line break."""
    return (
        "\n".join(
            [f"### {escape_markdown(title)}", "", *(f"- {escape_markdown(one)}" for one in points)]
        )
        + "\n"
    )


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(escape_markdown(cell) for cell in cells)} |"


def escape_markdown(text: str) -> str:
    """What would end a cell, a line or the text."""
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
