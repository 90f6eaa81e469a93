"""A table as plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from shardmark.report.table.tables import Column, Table

GUTTER = "  "
NOTE_WIDTH = 98
LEAST_WIDTH = 40
"""Notes are not made narrower than this; a terminal may be."""


def render_text(table: Table, width: int | None = None) -> str:
    """Aligned columns, a rule below the titles, then the notes; ends with a line break.

    The titles take a second line only where one of them has a unit.

    `width` is the reader's in characters: a wider table continues in a further block, which repeats
    the columns that name the rows.  None for a file, which has no width.
    """
    if not any(column.cells for column in table.columns):
        return _notes(table, width)
    parts = [_lines(columns) for columns in blocks(table.columns, width)]
    return "\n\n".join(["\n".join(lines) for lines in parts] + [_notes(table, width)])


def wrapped(text: str, width: int | None = None) -> str:
    """A paragraph whose further lines are indented; ends with a line break."""
    return (
        textwrap.fill(
            text,
            NOTE_WIDTH if width is None else max(LEAST_WIDTH, min(NOTE_WIDTH, width)),
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        + "\n"
    )


def blocks(columns: Sequence[Column], width: int | None) -> list[list[Column]]:
    """The columns by blocks that fit, as few as can be and of about one width.

    The columns that name the rows are in each.  What does not fit beside them is alone with them.
    """
    if width is None:
        return [[*columns]]
    names = [column for column in columns if column.key]
    others = [column for column in columns if not column.key]
    left = width - sum(_width(column) + len(GUTTER) for column in names)
    found = _filled(others, left)
    if len(found) == 1:
        return [[*columns]]
    for narrower in range(left - 1, 0, -1):
        closer = _filled(others, narrower)
        if len(closer) > len(found):
            break
        found = closer
    return [[*names, *part] for part in found]


def _filled(columns: Sequence[Column], width: int) -> list[list[Column]]:
    """Each block takes what still fits."""
    found: list[list[Column]] = [[]]
    left = width
    for column in columns:
        needed = _width(column) + (len(GUTTER) if found[-1] else 0)
        if needed > left and found[-1]:
            found.append([])
            left, needed = width, _width(column)
        found[-1].append(column)
        left -= needed
    return found


def _lines(columns: Sequence[Column]) -> list[str]:
    units = any("\n" in column.title for column in columns)
    padded = [_block(column, units=units) for column in columns]
    return [GUTTER.join(cells).rstrip() for cells in zip(*padded, strict=True)]


def _width(column: Column) -> int:
    return max(len(line) for line in (*column.title.split("\n"), *column.cells))


def _block(column: Column, *, units: bool) -> list[str]:
    """The column's lines, all of one width: the title, its unit, a rule, the cells."""
    name, _, unit = column.title.partition("\n")
    width = _width(column)
    lines = (name, *([unit] if units else []), "-" * width, *column.cells)
    return [line.rjust(width) if column.numeric else line.ljust(width) for line in lines]


def _notes(table: Table, width: int | None) -> str:
    return "".join(wrapped(note, width) for note in table.notes)
