"""Columns that many tables share: metrics of the catalogue, and what tells rows apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, Protocol, TypeVar

from shardmark.analysis.compare.rows import Row, plain
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.config.axes import title_of
from shardmark.core.metrics import METRICS
from shardmark.report.table.table import BYTES, Column, Columns, Missing, Table, Value, table_of

Item = TypeVar("Item")
Part = TypeVar("Part")
RowColumn = tuple[Column, Callable[[Row], Value]]


class Measured(Protocol):
    """A row, or a part of one, with estimates and the reasons of those that are missing."""

    @property
    def metrics(self) -> Mapping[str, Estimate | None]: ...

    @property
    def missing(self) -> Mapping[str, str]: ...


def _shown(key: str, title: str, unit: str = "", scale: float = 1.0, **how: Any) -> Column:
    return Column(key=key, title=title, unit=unit, scale=scale, **how)


_SHOWN = {
    column.key: column
    for column in (
        _shown("samples_per_second", "samples/s", interval="±"),
        _shown("tokens_per_second", "tokens/s", interval="±"),
        _shown("step_seconds", "step", "ms", 1000),
        _shown("exposed_communication_seconds", "exposed", "ms", 1000),
        _shown("epoch_seconds", "epoch", "s"),
        _shown("elapsed_seconds", "since start", "s", base_unit="seconds"),
        _shown("total_seconds", "total", "s"),
        _shown("evaluation_seconds", "eval.", "s"),
        _shown("speedup", "speed-up", decimals=2, interval="to"),
        _shown("scaling_efficiency", "eff.", "%", 100, decimals=0),
        _shown("memory_ratio", "peak ratio", decimals=2),
        _shown("peak_memory_bytes", "peak", BYTES),
        _shown("peak_rss_bytes", "RSS", BYTES),
        _shown("device_used_bytes", "GPU used", BYTES),
        _shown("cpu_percent", "CPU", "%", decimals=0),
        _shown("gpu_utilization", "GPU", "%", decimals=0),
        _shown("power_watts", "GPUs", "W", decimals=0),
        _shown("processes", "proc.", decimals=0),
        _shown("threads", "threads", decimals=0),
        _shown("train_loss", "train loss", decimals=4),
        _shown("validation_loss", "val. loss", decimals=4),
        _shown("bits_per_byte", "bits/byte", decimals=3),
        _shown("perplexity", "perplexity", decimals=2),
        _shown("map", "mAP", decimals=4),
        _shown("map_50", "mAP@50", decimals=4),
        _shown("map_75", "mAP@75", decimals=4),
        _shown("accuracy_top1", "top-1", "%", 100, decimals=1),
        _shown("accuracy_top5", "top-5", "%", 100, decimals=1),
        _shown("staleness_mean", "stale", decimals=2),
        _shown("server_wait_seconds", "server wait", "ms", 1000),
    )
}


def metric_column(name: str, **changes: Any) -> Column:
    """How a metric is shown; one that is not in the catalogue bare, under its own name."""
    known = METRICS.get(name)
    column = _SHOWN.get(name) or Column(key=name, title=name, unit=known.unit if known else "")
    base_unit = known.unit if known else column.base_unit
    return replace(column, **{"estimated": True, "base_unit": base_unit, **changes})


def metric(name: str, **changes: Any) -> tuple[Column, Callable[[Measured], Value]]:
    """The estimate of the metric, or why there is none."""

    def value_of(item: Measured) -> Value:
        return item.metrics.get(name) or Missing(item.missing.get(name, "not recorded"))

    return metric_column(name, **changes), value_of


def for_programs(key: str) -> Column:
    """A column of CSV and JSON alone."""
    return Column(key=key, title=key, shown_to="programs")


def table_by_row(
    title: str,
    items: Sequence[tuple[Row, Item]],
    columns: Columns[Item],
    notes: Sequence[str] = (),
) -> Table:
    """One line an item: what tells its row apart, then the item's own columns."""
    rows = row_columns([row for row, _ in items])
    own = [*for_items(rows, itemgetter(0)), *for_items(columns, itemgetter(1))]
    return table_of(title, items, own, notes)


def for_items(columns: Columns[Part], part_of: Callable[[Item], Part]) -> Columns[Item]:
    """The columns for items that have such a part, as a point of a curve has a row."""

    def through(value_of: Callable[[Part], Value]) -> Callable[[Item], Value]:
        return lambda item: value_of(part_of(item))

    return [(column, through(value_of)) for column, value_of in columns]


def row_columns(rows: Sequence[Row]) -> list[RowColumn]:
    """What tells the rows apart: for people every axis that varies, for programs all of it."""
    varies_by_axis = any(key.startswith("workload") for row in rows for key in row.varied)
    fields = ["experiment", *([] if varies_by_axis else ["workload"]), "precision"]
    varying = [name for name in fields if len({getattr(row, name) for row in rows}) > 1]
    keys = list(dict.fromkeys(key for row in rows for key in row.varied))
    last = [title_of(key).rpartition(".")[2] for key in keys]
    titles = [
        key if last.count(short) > 1 else short for key, short in zip(keys, last, strict=True)
    ]
    labels = {(row.strategy, row.label) for row in rows}
    several = {name for name, _ in labels if len([n for n, _ in labels if n == name]) > 1}
    people: list[RowColumn] = [
        *(_named(name, name, lambda row, name=name: getattr(row, name)) for name in varying),
        _named(
            "label", "strategy", lambda row: row.label if row.strategy in several else row.strategy
        ),
        _named("ranks", "ranks", ranks_of, numeric=True),
        *(
            _named(key, title, lambda row, key=key: _plain(row.varied.get(key)), numeric=True)
            for key, title in zip(keys, titles, strict=True)
        ),
    ]
    identity = dict.fromkeys(key for row in rows for key in identity_of(row))
    return [*people, *(_identity_column(key) for key in identity)]


def _identity_column(key: str) -> RowColumn:
    return for_programs(key), lambda row: identity_of(row).get(key)


def _named(
    key: str, title: str, value_of: Callable[..., Value], *, numeric: bool = False
) -> RowColumn:
    column = Column(key=key, title=title, numeric=numeric, names_row=True, shown_to="people")
    return column, value_of


def _plain(value: object) -> str | None:
    return None if value is None else plain(value)


def identity_of(row: Row) -> dict[str, Any]:
    """What the row is; a varied key stands beside the fixed ones under its dotted name."""
    return {
        "experiment": row.experiment,
        "workload": row.workload,
        "strategy": row.strategy,
        "strategy_options": dict(row.strategy_options),
        "world_size": row.world_size,
        "precision": row.precision,
        **row.varied,
        "synthetic": row.synthetic,
        "weak_scaling": row.weak_scaling,
        "equivalent": row.equivalent,
        "deviation": row.deviation,
        "baseline": row.baseline,
        "verdict": row.verdict,
        "outcomes": dict(row.outcomes),
    }


def ranks_of(row: Row) -> str:
    """Ranks that train, and servers beside them: `2+1`."""
    return f"{row.world_size}+{row.servers}" if row.servers else str(row.world_size)
