"""A comparison for programs: JSON and CSV, base units, every metric of the catalogue."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.rows import Row, plain
from shardmark.analysis.diagnose.stability import warnings_of
from shardmark.analysis.statistics.effects import Effect
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.analysis.statistics.verdicts import METRIC
from shardmark.core.metrics import METRICS


def render_json(comparison: Comparison, beside: Mapping[str, object] | None = None) -> str:
    """`{"rows": [...], "warnings": [...]}`, strict: what is missing is null, nothing is NaN.

    `beside` are further keys after `rows`.
    """
    rows = [identity_of(row) | {"metrics": metrics_of(row.metrics)} for row in comparison.rows]
    warnings = [asdict(warning) for warning in warnings_of(comparison)]
    document = {"rows": rows, "warnings": warnings, **(beside or {})}
    return json.dumps(document, indent=2, allow_nan=False, default=str) + "\n"


def render_csv(comparison: Comparison) -> str:
    """One line a row; each metric is three columns: NAME, NAME_low, NAME_high."""
    return format_csv(csv_lines(comparison.rows), csv_header(comparison.rows))


def csv_header(rows: Sequence[Row]) -> list[str]:
    keys = dict.fromkeys(key for row in rows for key in identity_of(row))
    names = dict.fromkeys((*METRICS, *(name for row in rows for name in row.metrics)))
    return [*keys, *(column for name in names for column in estimate_columns(name))]


def csv_lines(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Column -> value of each row; what it lacks is left out."""
    return [
        identity_of(row)
        | {key: value for name in row.metrics for key, value in flat(name, row.metrics[name])}
        for row in rows
    ]


def estimate_columns(name: str) -> tuple[str, str, str]:
    return name, f"{name}_low", f"{name}_high"


def flat(name: str, estimate: Estimate | None) -> list[tuple[str, float | None]]:
    """The three columns of a metric."""
    numbers = (None,) * 3 if estimate is None else (estimate.value, estimate.low, estimate.high)
    return list(zip(estimate_columns(name), numbers, strict=True))


def format_csv(lines: Iterable[Mapping[str, object]], header: Sequence[str]) -> str:
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_csv_cell(line.get(key)) for key in header] for line in lines)
    return output.getvalue()


def identity_of(row: Row) -> dict[str, object]:
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
        "effect": None if row.effect is None else effect_of(row.effect),
        "outcomes": dict(row.outcomes),
    }


def metrics_of(metrics: Mapping[str, Estimate | None]) -> dict[str, dict[str, object] | None]:
    """Metric -> value, interval, unit and number of repeats; or null."""
    return {
        name: None if estimate is None else estimate_of(estimate, name)
        for name, estimate in metrics.items()
    }


def estimate_of(estimate: Estimate, name: str) -> dict[str, object]:
    return {
        "value": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "unit": METRICS[name].unit if name in METRICS else "",
        "n": estimate.n,
    }


def effect_of(effect: Effect) -> dict[str, object]:
    """The effect on which the verdict rests; `p_corrected` decides."""
    return {
        "metric": METRIC,
        "percent": effect.percent,
        "ratio": effect.ratio.value,
        "low": effect.ratio.low,
        "high": effect.ratio.high,
        "standardised": effect.standardised,
        "p_value": effect.p_value,
        "p_corrected": effect.p_corrected,
        "n": effect.ratio.n,
    }


def _csv_cell(value: object) -> str:
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else plain(value)
