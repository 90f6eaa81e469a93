"""Formats of a table: text, Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

from shardmark.base.statistics.intervals import Estimate
from shardmark.base.system.extras import require
from shardmark.base.table.table import Column, Missing, Table, Value
from shardmark.base.text import one_line, render_json

GUTTER = "  "
NOTE_WIDTH = 98
LEAST_WIDTH = 40
"""Smallest width of a note, even on a narrower terminal."""
FORMULA_SIGNS = ("=", "+", "-", "@")


class Format(StrEnum):
    """Formats of tables."""

    TEXT = "text"
    MARKDOWN = "markdown"
    CSV = "csv"
    JSON = "json"
    LATEX = "latex"

    @property
    def for_programs(self) -> bool:
        return self in (Format.CSV, Format.JSON)


def render_tables(
    tables: Sequence[Table],
    form: Format = Format.TEXT,
    width: int | None = None,
    *,
    headings: bool = True,
) -> str:
    """Return all tables, each with its title and notes, with a line break at the end.

    `width` is the width of the terminal in characters: a wider text table continues below.  None
    is for a file.  CSV is one table of all rows; JSON is a list of them.
    """
    if form is Format.CSV:
        return render_csv(tables)
    if form is Format.JSON:
        return render_json([record for table in tables for record in records(table)])
    if form is Format.LATEX:
        return "\n".join(map(_latex, tables))
    parts = []
    for table in tables:
        heading = table.title if headings else ""
        if form is Format.MARKDOWN:
            title = f"### {escape_markdown(heading)}\n\n" if heading else ""
            parts.append(title + _markdown(table))
        else:
            parts.append((f"{one_line(heading)}\n\n" if heading else "") + _text(table, width))
    return "\n".join(parts)


def render_points(points: Sequence[str], form: Format, width: int | None = None) -> str:
    """Return sentences as a list, or as paragraphs in text, with a line break at the end."""
    if form is Format.MARKDOWN:
        return "\n".join(_bullets(points)) + "\n"
    if form is Format.LATEX:
        return "".join(f"% {one_line(point)}\n" for point in points)
    return "".join(_wrapped(point, width) for point in points)


def _wrapped(text: str, width: int | None) -> str:
    """Return a paragraph with a hanging indent and a line break at the end."""
    filled = textwrap.fill(
        one_line(text),
        NOTE_WIDTH if width is None else max(LEAST_WIDTH, min(NOTE_WIDTH, width)),
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"{filled}\n"


# Text


def _text(table: Table, width: int | None) -> str:
    columns, rows = table.for_people()
    parts = ["\n".join(lines) for lines in (_blocks(columns, rows, width) if rows else ())]
    return "\n\n".join([*parts, "".join(_wrapped(note, width) for note in table.notes)])


def _blocks(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None
) -> list[list[str]]:
    """Divide the columns into blocks that fit the width; each block names the rows."""
    cells = [
        [column.title, column.unit, *texts] for column, *texts in zip(columns, *rows, strict=True)
    ]
    widths = [len(GUTTER) + max(map(len, texts)) for texts in cells]
    names = [index for index, column in enumerate(columns) if column.names_row]
    used = sum(widths[index] for index in names)
    blocks, filled = [list(names)], used
    for index in (index for index in range(len(columns)) if index not in names):
        if width is not None and filled + widths[index] > width + len(GUTTER) and filled > used:
            blocks.append(list(names))
            filled = used
        blocks[-1].append(index)
        filled += widths[index]
    chosen = [sorted(block) if len(blocks) == 1 else block for block in blocks]
    return [_text_lines([columns[i] for i in block], [cells[i] for i in block]) for block in chosen]


def _text_lines(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, texts)) for texts in cells]
    titles, units, *rows = zip(*cells, strict=True)
    rule = tuple("-" * width for width in widths)
    return [
        GUTTER.join(
            cell.rjust(width) if column.numeric else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in (titles, *([units] if any(units) else []), rule, *rows)
    ]


# Markdown


def _markdown(table: Table) -> str:
    columns, rows = table.for_people()
    lines: list[str] = []
    if rows:
        titles = [f"{column.title} {column.unit}".rstrip() for column in columns]
        aligned = ("---:" if column.numeric else ":---" for column in columns)
        lines = [_pipes(titles), _pipes(aligned), *map(_pipes, rows), ""]
    return "\n".join([*lines, *_bullets(table.notes)]) + "\n"


def _bullets(points: Sequence[str]) -> list[str]:
    return [f"- {escape_markdown(point)}" for point in points]


def _pipes(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(escape_markdown, cells))} |"


_MARKDOWN = str.maketrans({"<": "&lt;", **{sign: f"\\{sign}" for sign in "\\|[]*"}})


def escape_markdown(text: str) -> str:
    """Escape what would end a cell, a line or the text, or load an image."""
    return one_line(text).translate(_MARKDOWN)


# LaTeX


def _latex(table: Table) -> str:
    """Return the table with booktabs' rules; its title and notes are comments."""
    require("pandas", needed_for="--format latex")
    import pandas as pd

    columns, rows = table.for_people()
    comments = "".join(f"% {one_line(text)}\n" for text in (table.title, *table.notes) if text)
    if not rows:
        return comments
    frame = pd.DataFrame(rows, columns=[f"{c.title} {c.unit}".rstrip() for c in columns])
    alignment = "".join("r" if column.numeric else "l" for column in columns)
    return comments + frame.to_latex(index=False, escape=True, column_format=alignment)


# CSV and JSON


def render_csv(tables: Sequence[Table]) -> str:
    """Return all rows as one table in base units; an estimate is NAME, NAME_low and NAME_high."""
    header, lines = base_rows(tables)
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(map(csv_cell, header))
    writer.writerows([csv_cell(line.get(name)) for name in header] for line in lines)
    return output.getvalue()


def base_rows(tables: Sequence[Table]) -> tuple[list[str], list[dict[str, Value]]]:
    """Return the names of all columns, and each row's values in base units by name."""
    header: dict[str, None] = {}
    lines: list[dict[str, Value]] = []
    for table in tables:
        columns = [column for column in table.columns if column.shown_to != "people"]
        header |= dict.fromkeys(name for column in columns for name in _csv_names(column))
        for row in table.rows:
            lines.append({})
            for column, value in zip(table.columns, row, strict=True):
                bounds: tuple[Value, ...] = (value,)
                if isinstance(value, Estimate):
                    bounds = (value.value, value.low, value.high)
                lines[-1] |= dict(zip(_csv_names(column), bounds, strict=False))
    return list(header), lines


def _csv_names(column: Column) -> tuple[str, ...]:
    return column.key, *((f"{column.key}_low", f"{column.key}_high") if column.estimated else ())


def csv_cell(value: Value) -> str:
    """Return the cell as text; text that a spreadsheet would take for a formula is quoted."""
    if value is None or isinstance(value, Missing):
        return ""
    if isinstance(value, float):
        return repr(value)
    if not isinstance(value, str):
        return json.dumps(value, sort_keys=True, default=str)
    text = one_line(value)
    first = unicodedata.normalize("NFKC", text.lstrip()[:1])  # some programs accept wide signs
    return f"'{text}" if first in FORMULA_SIGNS else text


def records(table: Table) -> list[dict[str, Any]]:
    """Return the rows as JSON holds them; `missing` has the reasons of null values."""
    lines = []
    for row in table.rows:
        named = [
            (column, value)
            for column, value in zip(table.columns, row, strict=True)
            if column.shown_to != "people"
        ]
        line: dict[str, Any] = {c.key: json_value(value, c.base_unit) for c, value in named}
        reasons = {c.key: value.reason for c, value in named if isinstance(value, Missing)}
        lines.append(line | ({"missing": reasons} if reasons else {}))
    return lines


def json_value(value: Value, unit: str = "") -> Any:
    """Return an estimate as `{"value", "low", "high", "unit", "n"}`, a missing value as None."""
    if isinstance(value, Missing):
        return None
    if isinstance(value, Estimate):
        bounds = {"value": value.value, "low": value.low, "high": value.high}
        return bounds | {"unit": unit, "n": value.n}
    return value
