"""Tables of the report page: ready cells with what they are sorted by."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardmark.report.table.sections import TextColumn as Column

_LEADING_NUMBER = re.compile(r"\s*([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Title:
    name: str
    unit: str
    """Empty where the name says it, or there is none."""
    numeric: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    text: str
    sort_value: str
    """What a numeric column is sorted by, as a number; empty for none, which comes last."""
    mood: str = ""
    """`good`, `bad` or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """A table that a reader can sort."""

    name: str
    """Its anchor."""
    caption: str
    titles: tuple[Title, ...]
    rows: tuple[tuple[Cell, ...], ...]


def page_table(name: str, caption: str, columns: Sequence[Column]) -> PageTable:
    """The columns as they are, with a sort value for each cell of a numeric one."""
    cells = [tuple(_cell(text, column.numeric) for text in column.cells) for column in columns]
    return PageTable(
        name=name,
        caption=caption,
        titles=tuple(_title(column) for column in columns),
        rows=tuple(zip(*cells, strict=True)),
    )


def leading_number(text: str) -> str:
    """The number that the text begins with, as it stands there; empty for none."""
    found = _LEADING_NUMBER.match(text.replace("\N{MINUS SIGN}", "-"))
    return found[1] if found else ""


def _title(column: Column) -> Title:
    name, _, unit = column.title.partition("\n")
    return Title(name=name, unit=unit, numeric=column.numeric)


def _cell(text: str, numeric: bool) -> Cell:
    moods = {"faster": "good", "slower": "bad"}
    return Cell(
        text=text,
        sort_value=leading_number(text) if numeric else "",
        mood="" if numeric else moods.get(text, ""),
    )
