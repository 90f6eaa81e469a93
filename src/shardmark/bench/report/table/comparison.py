"""The comparison as a table: a few columns that fit a terminal, or those that are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from functools import partial
from typing import Any

from shardmark.base.errors import InputError, ShardmarkError
from shardmark.base.metrics import METRICS
from shardmark.base.system.plugins import by_name
from shardmark.base.table.formats import json_value
from shardmark.base.table.table import (
    BYTES,
    Column,
    Missing,
    Table,
    Value,
    metric,
    metric_column,
    table_of,
)
from shardmark.base.text import listed
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.analysis.compare.rows import (
    STATE_METRICS,
    Row,
    grouped,
    main_quality,
    main_rate,
    rate_of,
    task_of,
)
from shardmark.bench.analysis.compare.scaling import ranks_vary, scaling_points
from shardmark.bench.analysis.compare.verdicts import METRIC, quality_of
from shardmark.bench.analysis.diagnose.stability import warnings_of
from shardmark.bench.report.table.notes import brief_notes, notes_of
from shardmark.bench.report.table.row_columns import identity_of, row_columns

PREDICTED = "predicted"
"""Column that asks for predictions: the models are traced, which takes seconds."""
BRIEF = ("marks", "rate", "ratios", "peak_memory_bytes", "quality", "outcome")
"""Columns that fit 80 characters."""
SPEEDUP = metric_column("speedup", key="speedup_over_fewest")
EFFICIENCY = metric_column("scaling_efficiency", key="efficiency_over_fewest")
WIDE = ("marks", "rate", "step_seconds", "all_ratios", "verdict",
        "peak_memory_bytes", "memory_ratio", "state_bytes", "worker_state_bytes", "staleness_mean",
        "server_wait_seconds", "quality", "quality_verdict", "map_50", "validation_loss",
        "recorded", "outcome")  # fmt: skip


def comparison_table(
    comparison: Comparison, columns: Sequence[str] = BRIEF, *, brief_width: int | None = None
) -> Table:
    """Return a table with a line for each row, the fastest first.  Programs get every metric.

    `columns` are metrics, or `marks`, `verdict`, `state_bytes`, `worker_state_bytes`, `outcome`,
    `rate` and `quality` (the main ones), `ratios` (speed-up over the baseline, or over the fewest
    ranks if a strategy has several numbers), `all_ratios` (both), `recorded` (the user's own) and
    `predicted`; raises `InputError` for others.  Columns without any content are not shown.  With
    `brief_width`, the width of a screen, only the most important notes are shown.
    """
    rows = fastest_first(comparison.rows)
    shown = {
        column.key: (column, value_of)
        for name in columns
        for column, value_of in _columns(name, rows)
    }
    names = dict.fromkeys((*METRICS, *(name for row in rows for name in row.metrics)))
    others = [metric(name, shown_to="programs") for name in names if name not in shown]
    titles = dict.fromkeys(f"{row.experiment}: {row.workload}" for row in rows)
    notes = [note.text for note in notes_of(comparison)]
    if brief_width is not None:
        notes = [*brief_notes(comparison, brief_width)]
    if PREDICTED in columns:
        predicted = [value_of for key, (_, value_of) in shown.items() if PREDICTED in key]
        notes += _not_predicted(rows, predicted)
    return table_of("; ".join(titles), rows, [*row_columns(rows), *shown.values(), *others], notes)


def fastest_first(rows: Sequence[Row]) -> list[Row]:
    """Return the rows by task, and by speed; rows with a non-finite loss come last."""
    tasks = list(dict.fromkeys(map(task_of, rows)))
    return sorted(
        rows, key=lambda row: (tasks.index(task_of(row)), row.diverged is not None, -rate_of(row))
    )


def comparison_json(comparison: Comparison, columns: Sequence[str] = ()) -> dict[str, Any]:
    """Return `rows` with every metric and the effect on which the verdict rests, and `warnings`.

    Of `columns` only `predicted` adds something, with reasons in `not_predicted`.
    """
    predicted = [
        (column.key.removeprefix(f"{PREDICTED}_"), value_of)
        for column, value_of in (_predicted(comparison.rows) if PREDICTED in columns else [])
        if column.key.startswith(PREDICTED)
    ]
    return {
        "rows": [
            identity_of(row)
            | {
                "effect": _effect(row),
                "seeds": row.seeds,
                "quality_effect": _quality_effect(row),
                "metrics": {
                    name: json_value(estimate, METRICS[name].unit if name in METRICS else "")
                    for name, estimate in row.metrics.items()
                },
            }
            | _predicted_json(row, predicted)
            for row in comparison.rows
        ],
        "warnings": [
            asdict(warning) | {"remedy": warning.remedy} for warning in warnings_of(comparison)
        ],
    }


def _predicted_json(
    row: Row, predicted: Sequence[tuple[str, Callable[[Row], Value]]]
) -> dict[str, Any]:
    values = {name: value_of(row) for name, value_of in predicted}
    reasons = {name: value.reason for name, value in values.items() if isinstance(value, Missing)}
    predicted_values = {name: json_value(value) for name, value in values.items()}
    return {"predicted": predicted_values, "not_predicted": reasons} if values else {}


def _effect(row: Row) -> dict[str, object] | None:
    """Return the effect as JSON holds it; `p_corrected` decides the verdict."""
    if row.effect is None:
        return None
    ratio = asdict(row.effect.ratio)
    return {
        "metric": METRIC,
        "percent": row.effect.percent,
        "ratio": ratio["value"],
        **{key: ratio[key] for key in ("low", "high", "n")},
        **{key: getattr(row.effect, key) for key in ("p_value", "p_corrected")},
    }


def _quality_effect(row: Row) -> dict[str, object] | None:
    """Return the difference of the main quality over the seeds; None for a single seed."""
    tested = row.quality_difference
    if tested is None:
        return None
    return {
        "metric": quality_of(row),
        "verdict": row.quality_verdict,
        "difference": tested.estimate.value,
        **{key: getattr(tested.estimate, key) for key in ("low", "high", "n")},
        **{key: getattr(tested, key) for key in ("p_value", "p_corrected")},
    }


def _columns(name: str, rows: Sequence[Row]) -> list[tuple[Column, Callable[[Row], Value]]]:
    recorded = list(dict.fromkeys(key for row in rows for key in row.metrics if key not in METRICS))
    quality = main_quality(rows)
    main = recorded[:1] or ([quality] if quality else [])  # the user's metric first
    groups = {"rate": [main_rate(rows)], "quality": main, "recorded": recorded}
    if name in _EXTRA:
        return [_EXTRA[name]]
    if name == PREDICTED:
        return _predicted(rows)
    if name in {"ratios", "all_ratios"}:
        return _ratios(rows, intervals=name == "all_ratios")
    if name in groups:
        return [metric(key) for key in groups[name]]
    if name in METRICS or name in recorded:
        return [metric(name)]
    near = get_close_matches(name, [*_EXTRA, PREDICTED, *groups, *METRICS, *recorded], n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InputError(
        "--columns", f"no column {name!r}", f"{hint}`shardmark list metrics` has the names"
    )


def _ratios(rows: Sequence[Row], *, intervals: bool) -> list[tuple[Column, Callable[[Row], Value]]]:
    points = {id(point.row): point for point in scaling_points(rows)}
    if not ranks_vary([*points.values()]):
        of_all = [metric("speedup"), metric("scaling_efficiency")]
        return of_all if intervals else [metric("speedup", interval="")]

    def value_of(name: str, row: Row) -> Value:
        return getattr(points[id(row)], name) if id(row) in points else None

    over_baseline = [metric("speedup", title="rate ratio")] if intervals else []
    columns = ((SPEEDUP, "speedup"), (EFFICIENCY, "efficiency"))
    return [*((column, partial(value_of, name)) for column, name in columns), *over_baseline]


def _predicted(rows: Sequence[Row]) -> list[tuple[Column, Callable[[Row], Value]]]:
    """Return predicted beside measured speed and memory; loads torch to trace the models."""
    predictions = by_name("shardmark.predict.predicted.rows:Predictions")(rows)

    def cached(predict: Callable[[Row], float]) -> Callable[[Row], Value]:
        values: dict[int, Value] = {}  # the table and its notes read it

        def value_of(row: Row) -> Value:
            if id(row) not in values:
                try:
                    values[id(row)] = predict(row)
                except ShardmarkError as error:
                    values[id(row)] = Missing(str(error))
            return values[id(row)]

        return value_of

    rate = main_rate(rows)
    return [
        metric(rate),
        (Column(f"predicted_{rate}", f"predicted {METRICS[rate].unit}"),
         cached(getattr(predictions, rate))),
        metric("peak_memory_bytes"),
        (Column("predicted_peak_memory_bytes", "predicted peak", unit=BYTES),
         cached(predictions.peak_memory_bytes)),
    ]  # fmt: skip


def _not_predicted(rows: Sequence[Row], columns: Sequence[Callable[[Row], Value]]) -> list[str]:
    """Return each reason once, with the rows for which it holds."""
    values = [(value_of(row), row.label) for value_of in columns for row in rows]
    names = grouped((value.reason, label) for value, label in values if isinstance(value, Missing))
    return [
        f"Not predicted for {listed(labels)}: {reason.removeprefix('predicted: ')}"
        for reason, labels in names.items()
    ]


def _marks(row: Row) -> str:
    """Return the reasons for which the row is not ranked with the others."""
    marks = {"loss not finite": row.diverged is not None, "not equivalent": row.equivalent is False}
    return ", ".join(name for name, holds in marks.items() if holds)


def _outcomes(row: Row) -> str:
    """Return the outcomes; empty if every trial ended ok."""
    if set(row.outcomes) <= {"ok"}:
        return ""
    return ", ".join(f"{count} {outcome}" for outcome, count in row.outcomes.items())


def _state_bytes(row: Row) -> float | None:
    """Return the bytes of parameters, gradients and optimizer state; None if one is not known."""
    values = [part.value for name in STATE_METRICS if (part := row.metrics[name]) is not None]
    return sum(values) if len(values) == len(STATE_METRICS) else None


def _worker_state_bytes(row: Row) -> float | None:
    """Return the state of the fullest worker; None without parameter servers."""
    ranks = [rank for trial in row.ok_trials for rank in trial.ranks if row.servers]
    probes = [rank.probe for rank in ranks if rank.role == "worker" and rank.probe is not None]
    state_bytes = (sum(getattr(probe, name) or 0 for name in STATE_METRICS) for probe in probes)
    return max(state_bytes, default=None)


_people = partial(Column, numeric=False, shown_to="people")
_EXTRA: dict[str, tuple[Column, Callable[[Row], Value]]] = {
    column.key: (column, value_of)
    for column, value_of in (
        (_people("marks"), _marks),
        (_people("verdict"), lambda row: row.verdict or ""),
        (_people("quality_verdict", "quality"), lambda row: row.quality_verdict or ""),
        (_people("state_bytes", "state", numeric=True, unit=BYTES), _state_bytes),
        (_people("worker_state_bytes", "worker", numeric=True, unit=BYTES), _worker_state_bytes),
        (_people("outcome", "outcomes"), _outcomes),
    )
}
