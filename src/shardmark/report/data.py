"""A comparison for programs: JSON and CSV, base units, every metric of the catalogue."""

from __future__ import annotations

import csv
import io
import json

from shardmark.analysis.comparison import Comparison
from shardmark.analysis.rows import Row, plain
from shardmark.measure.metrics import METRICS


def render_json(comparison: Comparison) -> str:
    """`{"rows": [...]}`, strict: what is missing is null, and nothing is NaN or infinite."""
    rows = [_identity(row) | {"metrics": _metrics(row)} for row in comparison.rows]
    return json.dumps({"rows": rows}, indent=2, allow_nan=False, default=str) + "\n"


def render_csv(comparison: Comparison) -> str:
    """One line a row; each metric is three columns: NAME, NAME_low, NAME_high."""
    rows = comparison.rows
    identities = [_identity(row) for row in rows]
    keys = list(dict.fromkeys(key for identity in identities for key in identity))
    names = list(dict.fromkeys((*METRICS, *(name for row in rows for name in row.metrics))))
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    header = [column for name in names for column in (name, f"{name}_low", f"{name}_high")]
    writer.writerow([*keys, *header])
    for row, identity in zip(rows, identities, strict=True):
        cells = [_csv_cell(identity.get(key)) for key in keys]
        for name in names:
            estimate = row.metrics.get(name)
            numbers = (
                (None,) * 3
                if estimate is None
                else (
                    estimate.value,
                    estimate.low,
                    estimate.high,
                )
            )
            cells += ["" if number is None else repr(number) for number in numbers]
        writer.writerow(cells)
    return output.getvalue()


def _identity(row: Row) -> dict[str, object]:
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


def _metrics(row: Row) -> dict[str, dict[str, object] | None]:
    return {
        name: None
        if estimate is None
        else {
            "value": estimate.value,
            "low": estimate.low,
            "high": estimate.high,
            "unit": METRICS[name].unit if name in METRICS else "",
            "n": estimate.n,
        }
        for name, estimate in row.metrics.items()
    }


def _csv_cell(value: object) -> str:
    return "" if value is None else plain(value)
