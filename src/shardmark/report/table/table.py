"""One table for every format: columns that say how a value is shown, rows in base units."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from shardmark.analysis.statistics.intervals import Estimate
from shardmark.core.text import one_line

NOTHING = "-"
"""A cell without a value, as people see it."""
BYTES = "bytes"
"""Unit of a column that is shown in KiB, MiB or GiB, whichever suits its largest value."""
_BYTE_UNITS = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Missing:
    """A value that is not there, and why."""

    reason: str


Value = str | bool | int | float | Estimate | Missing | Mapping[str, Any] | Sequence[Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """What a column holds and how people see it."""

    key: str
    """Its name in CSV and JSON."""
    title: str
    unit: str = ""
    """As people see it; empty for none."""
    scale: float = 1.0
    """From the base unit to the one that people see."""
    decimals: int | None = None
    """None for about four significant digits."""
    interval: Literal["", "±", "to"] = ""
    """How people see an estimate's interval: not at all, `5.1 ±0.2`, or `1.62 (1.35 to 1.94)`."""
    numeric: bool = True
    """Numbers stand to the right, text to the left."""
    names_row: bool = False
    """It tells the rows apart: where a table is divided, each part has it."""
    estimated: bool = False
    """It holds estimates: three columns in CSV."""
    base_unit: str = ""
    """Of its estimates, in JSON."""
    shown_to: Literal["all", "people", "programs"] = "all"
    """`programs` are CSV and JSON."""

    def show(self, value: Value) -> str:
        """The value as people see it, on one line and free of control characters."""
        if value is None or isinstance(value, Missing):
            return NOTHING
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, Estimate):
            return self._estimate(value)
        if isinstance(value, int | float):
            scaled = value * self.scale
            whole = self.decimals is None and float(scaled).is_integer()
            return number(scaled, decimals=0 if whole else self.decimals)
        return one_line(value if isinstance(value, str) else json.dumps(value, default=str))

    def _estimate(self, estimate: Estimate) -> str:
        text = number(estimate.value * self.scale, decimals=self.decimals)
        if self.interval and estimate.too_noisy:
            return f"{text} (too noisy)"
        if not self.interval or estimate.low is None or estimate.high is None:
            return text
        places = len(text.partition(".")[2])
        if self.interval == "±":
            return f"{text} ±{(estimate.half_width or 0.0) * self.scale:.{places}f}"
        if estimate.low == estimate.high:
            return text
        low, high = estimate.low * self.scale, estimate.high * self.scale
        return f"{text} ({low:.{places}f} to {high:.{places}f})"


Columns = Sequence[tuple[Column, Callable[[Item], Value]]]
"""Columns with the function that gives an item's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of values, each in the order of the columns, with notes below."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()

    def for_people(self) -> tuple[list[Column], list[list[str]]]:
        """Columns that show something, and the rows' cells as text."""
        cells = [
            [column.show(row[index]) for row in self.rows]
            for index, column in enumerate(self.columns)
        ]
        shown = [
            index
            for index, column in enumerate(self.columns)
            if column.shown_to != "programs"
            and (column.names_row or any(cell not in ("", NOTHING) for cell in cells[index]))
        ]
        columns = [
            replace(self.columns[index], title=one_line(self.columns[index].title))
            for index in shown
        ]
        return columns, [list(row) for row in zip(*(cells[i] for i in shown), strict=True)]

    def values(self, key: str) -> tuple[Value, ...]:
        """A column's values by its key; `KeyError` for none."""
        index = {column.key: index for index, column in enumerate(self.columns)}[key]
        return tuple(row[index] for row in self.rows)

    def cells(self, key: str) -> tuple[str, ...]:
        """A column's cells as people see them; `KeyError` for none."""
        column = {column.key: column for column in self.columns}[key]
        return tuple(column.show(value) for value in self.values(key))


def table_of(
    title: str,
    items: Sequence[Item],
    columns: Columns[Item],
    notes: Sequence[str] = (),
) -> Table:
    """One row an item, its values by the columns' functions."""
    rows = tuple(tuple(value_of(item) for _, value_of in columns) for item in items)
    fitted = (_fitted(column, [row[i] for row in rows]) for i, (column, _) in enumerate(columns))
    return Table(title=title, columns=tuple(fitted), rows=rows, notes=tuple(notes))


def _fitted(column: Column, values: Sequence[Value]) -> Column:
    """A column of bytes in the unit that suits the largest."""
    if column.unit != BYTES:
        return column
    numbers = (value.value if isinstance(value, Estimate) else value for value in values)
    largest = max((value for value in numbers if isinstance(value, int | float)), default=0)
    unit, size = next((pair for pair in _BYTE_UNITS if largest >= pair[1]), _BYTE_UNITS[-1])
    return replace(column, unit=unit, scale=1 / size)


def number(value: float, *, decimals: int | None = None) -> str:
    """Fixed decimals, or about four significant digits; never an exponent for everyday sizes."""
    if decimals is not None:
        return f"{value:.{decimals}f}"
    for limit, digits in ((1000, 0), (100, 1), (10, 2), (1, 3)):
        if abs(value) >= limit:
            return f"{value:.{digits}f}"
    return f"{value:.4g}"
