"""CSV and JSON by hand, for views that do not yet build typed tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.core.metrics import METRICS
from shardmark.report.table.columns import identity_of
from shardmark.report.table.formats import csv_text, json_value


def csv_header(rows: Sequence[Row]) -> list[str]:
    keys = dict.fromkeys(key for row in rows for key in identity_of(row))
    names = dict.fromkeys((*METRICS, *(name for row in rows for name in row.metrics)))
    return [*keys, *(column for name in names for column in estimate_columns(name))]


def csv_lines(rows: Sequence[Row]) -> list[dict[str, object]]:
    return [
        identity_of(row)
        | {key: value for name in row.metrics for key, value in flat(name, row.metrics[name])}
        for row in rows
    ]


def estimate_columns(name: str) -> tuple[str, str, str]:
    return name, f"{name}_low", f"{name}_high"


def flat(name: str, estimate: Estimate | None) -> list[tuple[str, float | None]]:
    numbers = (None,) * 3 if estimate is None else (estimate.value, estimate.low, estimate.high)
    return list(zip(estimate_columns(name), numbers, strict=True))


def format_csv(lines: Iterable[Mapping[str, Any]], header: Sequence[str]) -> str:
    return csv_text(lines, header)


def metrics_of(metrics: Mapping[str, Estimate | None]) -> dict[str, Any]:
    return {name: estimate_of(estimate, name) for name, estimate in metrics.items()}


def estimate_of(estimate: Estimate | None, name: str) -> Any:
    return json_value(estimate, METRICS[name].unit if name in METRICS else "")
