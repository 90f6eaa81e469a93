"""A table as plain text, the same on a screen and in a file."""

from __future__ import annotations

import textwrap

from shardmark.report.tables import Column, Table

GUTTER = "  "
NOTE_WIDTH = 98


def render_text(table: Table) -> str:
    """Aligned columns, a rule below the titles, then the notes; ends with a line break."""
    if not any(column.cells for column in table.columns):
        return _notes(table)
    blocks = [_block(column) for column in table.columns]
    lines = [GUTTER.join(cells).rstrip() for cells in zip(*blocks, strict=True)]
    return "\n".join([*lines, "", _notes(table)])


def _block(column: Column) -> list[str]:
    """The column's lines, all of one width: two of title, a rule, the cells."""
    name, _, unit = column.title.partition("\n")
    width = max(len(line) for line in (name, unit, *column.cells))
    lines = (name, unit, "-" * width, *column.cells)
    return [line.rjust(width) if column.numeric else line.ljust(width) for line in lines]


def _notes(table: Table) -> str:
    return "".join(
        textwrap.fill(
            note, NOTE_WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        + "\n"
        for note in table.notes
    )
