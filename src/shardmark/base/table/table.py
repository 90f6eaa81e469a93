"""A table for all formats: columns that define how values are shown, rows in base units."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, TypeVar

from shardmark.base.metrics import METRICS
from shardmark.base.statistics.intervals import Estimate
from shardmark.base.text import one_line

EMPTY_CELL = "-"
"""Text of a cell without a value."""
BYTES = "bytes"
"""Unit of a column that is shown in KiB, MiB or GiB, whichever suits its largest value."""
_BYTE_UNITS = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))

Item = TypeVar("Item")
Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Missing:
    """A missing value with its reason."""

    reason: str


Value = str | bool | int | float | Estimate | Missing | Mapping[str, Any] | Sequence[Any] | None


@dataclass(frozen=True, slots=True)
class Column:
    """Content of a column, and how it is shown to people."""

    key: str
    """Name of the column in CSV and JSON."""
    title: str = ""
    """Heading for people; the key unless it is given."""
    _: KW_ONLY
    unit: str = ""
    """Unit that is shown to people; empty for none."""
    scale: float = 1.0
    """Factor from the base unit to the shown unit."""
    decimals: int | None = None
    """Number of decimals; None for significant digits."""
    digits: int | None = None
    """Number of significant digits; None for three."""
    interval: Literal["", "±", "to"] = ""
    """Form of an estimate's interval: none, `5.1 ±0.2`, or `1.62 (1.35 to 1.94)`."""
    numeric: bool = True
    """Numbers stand to the right, text to the left."""
    names_row: bool = False
    """True if the column identifies rows: each part of a divided table has it."""
    estimated: bool = False
    """True if the column holds estimates, which are three columns in CSV."""
    base_unit: str = ""
    """Unit of the column's estimates in JSON."""
    shown_to: Literal["all", "people", "programs"] = "all"
    """Readers of the column; `programs` read CSV and JSON."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", self.title or self.key)

    @property
    def difference_unit(self) -> str:
        """Unit of a difference of two values: percentages differ by points."""
        return "points" if self.unit == "%" else self.unit

    def show(self, value: Value) -> str:
        """Format the value for people, on one line and without control characters."""
        if value is None or isinstance(value, Missing):
            return EMPTY_CELL
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, Estimate):
            return self._estimate(value)
        if isinstance(value, int | float):
            scaled = value * self.scale
            is_whole = self.decimals is self.digits is None and float(scaled).is_integer()
            return number(scaled, decimals=0 if is_whole else self.decimals, digits=self.digits)
        return one_line(value if isinstance(value, str) else json.dumps(value, default=str))

    def _estimate(self, estimate: Estimate) -> str:
        value = estimate.value * self.scale
        text = number(value, decimals=self.decimals)
        if self.interval and estimate.too_noisy:
            return f"{text} (too noisy)"
        if not self.interval or estimate.low is None or estimate.high is None:
            return text
        places = len(text.partition(".")[2])

        def bound(base_value: float) -> str:
            scaled = base_value * self.scale
            huge = "e" in text or abs(scaled) >= HUGE
            return f"{scaled:.2e}" if huge else f"{scaled:.{places}f}"

        if self.interval == "±" and self.decimals is None and abs(value) < HUGE:
            return _with_half_width(value, (estimate.half_width or 0.0) * self.scale)
        if self.interval == "±":
            return f"{text} ±{bound(estimate.half_width or 0.0)}"
        if estimate.low == estimate.high:
            return text
        return f"{text} ({bound(estimate.low)} to {bound(estimate.high)})"


Columns = Sequence[tuple[Column, Callable[[Item], Value]]]
"""Columns, each with the function that returns an item's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of values, each in the order of the columns, with notes below."""

    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[Value, ...], ...] = ()
    notes: tuple[str, ...] = ()

    def for_people(self) -> tuple[list[Column], list[list[str]]]:
        """Return the columns with content, and the rows' cells as text."""
        columns, cells = [], []
        for index, column in enumerate(self.columns):
            texts = [column.show(row[index]) for row in self.rows]
            filled = column.names_row or any(text not in ("", EMPTY_CELL) for text in texts)
            if filled and column.shown_to != "programs":
                columns.append(replace(column, title=one_line(column.title)))
                cells.append(texts)
        return columns, [list(row) for row in zip(*cells, strict=True)]

    def values(self, key: str) -> tuple[Value, ...]:
        """Return the values of a column by its key.  Raises `KeyError` for an unknown key."""
        index = {column.key: index for index, column in enumerate(self.columns)}[key]
        return tuple(row[index] for row in self.rows)

    def cells(self, key: str) -> tuple[str, ...]:
        """Return the cells of a column as text.  Raises `KeyError` for an unknown key."""
        column = {column.key: column for column in self.columns}[key]
        return tuple(column.show(value) for value in self.values(key))


def table_of(
    title: str, items: Sequence[Item], columns: Columns[Item], notes: Sequence[str] = ()
) -> Table:
    """Return a table with a row for each item; the columns' functions give its values."""
    rows = tuple(tuple(value_of(item) for _, value_of in columns) for item in items)
    fitted = (
        _in_fitting_unit(column, [row[i] for row in rows]) for i, (column, _) in enumerate(columns)
    )
    return Table(title=title, columns=tuple(fitted), rows=rows, notes=tuple(notes))


def for_items(columns: Columns[Part], part_of: Callable[[Item], Part]) -> Columns[Item]:
    """Adapt columns of a part to items that have such a part, as a point of a curve has a row."""

    def through(value_of: Callable[[Part], Value]) -> Callable[[Item], Value]:
        return lambda item: value_of(part_of(item))

    return [(column, through(value_of)) for column, value_of in columns]


def strategy_column(rows: Iterable[Any]) -> tuple[Column, Callable[[Any], Value]]:
    """Return the strategy of each row for people, with its options if rows differ in them."""
    labels = {row.label: row.strategy for row in rows}
    several = {name for name, labelled in Counter(labels.values()).items() if labelled > 1}
    column = Column("label", "strategy", numeric=False, names_row=True, shown_to="people")
    return column, lambda row: row.label if row.strategy in several else row.strategy


def for_programs(key: str) -> Column:
    """Return a column that only CSV and JSON have."""
    return Column(key, shown_to="programs")


def _in_fitting_unit(column: Column, values: Sequence[Value]) -> Column:
    """Return a column of bytes in the unit that suits the largest value; others are unchanged."""
    if column.unit != BYTES:
        return column
    numbers = (value.value if isinstance(value, Estimate) else value for value in values)
    largest = max((value for value in numbers if isinstance(value, int | float)), default=0)
    unit, size = byte_unit(largest)
    return replace(column, unit=unit, scale=1 / size)


def byte_unit(largest_bytes: float) -> tuple[str, float]:
    """Return name and bytes of the binary unit that suits the largest value."""
    return next((unit for unit in _BYTE_UNITS if largest_bytes >= unit[1]), _BYTE_UNITS[-1])


MILLION, HUGE = 1e6, 1e9
"""Values from which a table shows an M (with decimals a power of ten), and a power of ten."""


def number(value: float, *, decimals: int | None = None, digits: int | None = None) -> str:
    """Format with fixed decimals, or with so many significant digits, by default three.

    Millions have an M (`12.3M`), huge numbers exponents.
    """
    if abs(value) >= (MILLION if decimals else HUGE):  # a diverging loss is wider than its column
        return f"{value:.2e}"
    if decimals is not None:
        return f"{value:.{decimals}f}"
    rounded = float(f"{value:.{digits or 3}g}")
    if digits is not None or abs(rounded) < 1:
        return f"{rounded:.12g}"
    if abs(rounded) >= MILLION:
        return f"{rounded / MILLION:.3g}M"
    return f"{rounded:.{max(0, 2 - _place(rounded))}f}"


def _place(value: float) -> int:
    """Return the place of the first digit: 2 for hundreds, -1 for tenths; 0 for zero."""
    return math.floor(math.log10(abs(value))) if value else 0


def _with_half_width(value: float, half: float) -> str:
    """Format the half width with two digits, and the value to its place, with three at most."""
    size, letter = (MILLION, "M") if abs(value) >= MILLION else (1.0, "")
    value, half = value / size, half / size
    last = max(_place(value) - 2, _place(half) - 1) if half else _place(value) - 2
    value_text, half_text = (f"{round(v, -last):.{max(0, -last)}f}" for v in (value, half))
    half_text = half_text if float(half_text) else number(half, digits=1)
    return f"{value_text}{letter} ±{half_text}{letter}"


def abbreviated(value: float, *, gap: str = "") -> str:
    """Format with about three significant digits and k, M, B or T, as `35.7k`."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{gap}{letter}"
    return f"{value:.3g}"


# Metrics of the catalogue

_SHOWN = {
    column.key: column
    for column in (
        Column("samples_per_second", "samples/s", interval="±"),
        Column("tokens_per_second", "tokens/s", interval="±"),
        Column("step_seconds", "step", unit="ms", scale=1000),
        Column("exposed_communication_seconds", "exposed", unit="ms", scale=1000),
        Column("epoch_seconds", "epoch", unit="s"),
        Column("elapsed_seconds", "since start", unit="s", base_unit="seconds"),
        Column("total_seconds", "total", unit="s"),
        Column("evaluation_seconds", "eval.", unit="s"),
        Column("speedup", "speed-up", decimals=2, interval="to"),
        Column("scaling_efficiency", "eff.", unit="%", scale=100, decimals=0),
        Column("memory_ratio", "peak ratio", decimals=2),
        Column("peak_memory_bytes", "peak", unit=BYTES),
        Column("state_bytes", "state", unit=BYTES, base_unit="bytes"),
        Column("peak_rss_bytes", "RSS", unit=BYTES),
        Column("device_used_bytes", "GPU used", unit=BYTES),
        Column("cpu_percent", "CPU", unit="%", decimals=0),
        Column("gpu_utilization", "GPU", unit="%", decimals=0),
        Column("power_watts", "GPUs", unit="W", decimals=0),
        Column("processes", "proc.", decimals=0),
        Column("threads", decimals=0),
        Column("train_loss", "train loss", decimals=4),
        Column("validation_loss", "val. loss", decimals=4),
        Column("bits_per_byte", "bits/byte", decimals=3),
        Column("perplexity", decimals=2),
        Column("map", "mAP", decimals=4),
        Column("map_50", "mAP@50", decimals=4),
        Column("map_75", "mAP@75", decimals=4),
        Column("accuracy_top1", "top-1", unit="%", scale=100, decimals=1),
        Column("accuracy_top5", "top-5", unit="%", scale=100, decimals=1),
        Column("staleness_mean", "stale", decimals=2),
        Column("server_wait_seconds", "server wait", unit="ms", scale=1000),
    )
}


def metric_column(name: str, **changes: Any) -> Column:
    """Return the column of a metric; a metric outside the catalogue has its own name as title."""
    definition = METRICS.get(name)
    column = _SHOWN.get(name) or Column(name, unit=definition.unit if definition else "")
    base_unit = definition.unit if definition else column.base_unit
    return replace(column, **{"estimated": True, "base_unit": base_unit, **changes})


def metric(name: str, **changes: Any) -> tuple[Column, Callable[[Any], Value]]:
    """Return the metric's column, with its estimate or reason from `metrics` and `missing`."""

    def value_of(item: Any) -> Value:
        return item.metrics.get(name) or Missing(item.missing.get(name, "not recorded"))

    return metric_column(name, **changes), value_of
