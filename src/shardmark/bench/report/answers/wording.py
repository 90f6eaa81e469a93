"""Texts for rows and amounts, for sentences about a comparison."""

from __future__ import annotations

from shardmark.base.table.table import metric_column
from shardmark.base.text import counted, listed
from shardmark.bench.analysis.advise.groups import conditions_of
from shardmark.bench.analysis.compare.rounding import Rounding
from shardmark.bench.analysis.compare.rows import Row, plain

_UNITS = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes"))


def name(row: Row, *, with_ranks: bool = True) -> str:
    """Name the row within its group by strategy, ranks, and the settings that vary in the group."""
    hidden = conditions_of(row)
    varied = [
        f"{key.rpartition('.')[2]}={plain(value)}"
        for key, value in row.shown_varied.items()
        if key not in hidden
    ]
    label = f"{row.label} on {counted(row.world_size, 'rank')}" if with_ranks else row.label
    return ", ".join([label, *varied])


def rounding_text(rounding: Rounding) -> str:
    """Return `rounding alone changes top-1 by 1.2 points; single and ddp are within that`."""
    column = metric_column(rounding.metric)
    words = (short(rounding.distance * column.scale), column.difference_unit)
    verb = f"changes {column.title} by {' '.join(filter(None, words))}"
    text = f"rounding alone {verb if rounding.distance else f'does not change {column.title}'}"
    if not rounding.same:
        return text
    within = "are within that" if rounding.distance else "end alike"
    return f"{text}; {listed([rounding.cell, *rounding.same], most=4)} {within}"


def rate(row: Row, metric: str) -> str:
    """Format a row's samples or tokens per second as its table does, without interval and unit."""
    return metric_column(metric).show(row.metrics.get(metric)).partition(" ")[0]


def size(value: float, like: float | None = None, *, unit: bool = True) -> str:
    """Format bytes in the unit that suits the value, or the value `like`."""
    reference = abs(value if like is None else like)
    scale, suffix = next((entry for entry in _UNITS if reference >= entry[0]), _UNITS[-1])
    return f"{short(value / scale)} {suffix}" if unit else short(value / scale)


def short(value: float) -> str:
    """Format three significant digits, or a whole number from 100 on."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{float(f'{value:.3g}'):g}"


def percent(share: float) -> str:
    """Format a fraction as whole percent from 10 % on, else with two significant digits."""
    value = 100 * share
    return f"{value:.0f} %" if abs(value) >= 10 else f"{float(f'{value:.2g}'):g} %"
