"""Rows and amounts in words, for sentences about a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.analysis.advise.candidates import conditions_of
from shardmark.analysis.compare.rows import Row, plain
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.report.table.quantities import quantity
from shardmark.report.table.tables import number

_UNITS = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes"))


def name(row: Row, *, with_ranks: bool = True) -> str:
    """The row within its group: strategy, ranks, and how it executes where that varies."""
    hidden = conditions_of(row)
    varied = [
        f"{key.rpartition('.')[2]}={plain(value)}"
        for key, value in row.varied.items()
        if key not in hidden
    ]
    where = [ranks(row.world_size)] if with_ranks else []
    return ", ".join([" on ".join([row.label, *where]), *varied])


def ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def names(rows: Sequence[Row]) -> str:
    """Each once, with all its numbers of ranks: `dp on 2 and 4 ranks`."""
    sizes: dict[str, dict[int, None]] = {}
    for row in rows:
        sizes.setdefault(name(row, with_ranks=False), {})[row.world_size] = None
    return "; ".join(
        f"{label} on {ranks(next(iter(found)))}"
        if len(found) == 1
        else f"{label} on {listed([str(size) for size in found])} ranks"
        for label, found in sizes.items()
    )


def listed(texts: Sequence[str], conjunction: str = "and") -> str:
    """`a, b and c`."""
    if len(texts) == 1:
        return texts[0]
    return f"{', '.join(texts[:-1])} {conjunction} {texts[-1]}"


def amount(metric: str, value: float) -> str:
    """The value of a metric with its unit, as people say it."""
    if metric == "samples_per_second":
        return f"{number(value)} samples/s"
    if metric.endswith("_bytes"):
        return size(value)
    if metric == "seconds_to_target":
        return f"{short(value)} s"
    shown = quantity(metric)
    unit = " %" if shown.scale == 100 else ""
    return f"{number(value * shown.scale, decimals=shown.decimals)}{unit}"


def title(metric: str) -> str:
    """Name of a quality without its unit."""
    return quantity(metric).title.removesuffix(" (%)").replace("val.", "validation")


def size(value: float) -> str:
    """Bytes in the unit that suits them."""
    for scale, unit in _UNITS:
        if abs(value) >= scale:
            return f"{short(value / scale)} {unit}"
    return f"{short(value)} bytes"


def milliseconds(seconds: float) -> str:
    return f"{short(seconds * 1000)} ms"


def short(value: float) -> str:
    """Three significant digits, whole from a hundred on."""
    rounded = float(f"{value:.3g}")
    if abs(rounded) >= 100:
        return f"{value:.0f}"
    for limit, decimals in ((10, 1), (1, 2)):
        if abs(rounded) >= limit:
            return f"{rounded:.{decimals}f}"
    return f"{rounded:g}"


def percent(share: float) -> str:
    """Whole percent from ten on, one decimal below, two significant digits below one."""
    value = 100 * share
    if abs(value) >= 10:
        return f"{value:.0f} %"
    return f"{value:.1f} %" if abs(value) >= 1 or value == 0 else f"{value:.2g} %"


def row_json(row: Row) -> dict[str, object]:
    """What a program needs to find the row among those of the comparison."""
    return {
        "experiment": row.experiment,
        "workload": row.workload,
        "strategy": row.strategy,
        "strategy_options": dict(row.strategy_options),
        "world_size": row.world_size,
        "precision": row.precision,
        **row.varied,
    }


def interval_json(estimate: Estimate | None) -> dict[str, object] | None:
    if estimate is None:
        return None
    return {
        "value": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "n": estimate.n,
    }
