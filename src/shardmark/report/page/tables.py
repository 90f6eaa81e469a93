"""What the page lists as tables: verdicts and checks, trials, ranks, definitions of metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

from shardmark.analysis.compare.rows import Row, plain
from shardmark.config.axes import title_of
from shardmark.core.metrics import METRICS
from shardmark.report.table.columns import for_items, metric_column, row_columns
from shardmark.report.table.table import BYTES, Column, Columns, Table, Value, table_of
from shardmark.results.schema import RankRecord, TrialResult
from shardmark.results.store import StoredRun
from shardmark.results.verification import LARGEST, Check, Verdict

TRIAL_METRICS = ("samples_per_second", "tokens_per_second", "step_seconds", "peak_memory_bytes",
                 "validation_loss", "accuracy_top1", "map", "bits_per_byte",
                 "cpu_percent")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What was verified of one run."""

    run: str
    reference: str
    steps: int
    verdicts: Table
    checks: tuple[Table, ...]
    """Of each verdict that has some."""


def verified(runs: Sequence[StoredRun]) -> list[Verified]:
    """The stored verdicts of each run that has some, few ranks before many."""
    tables = []
    for run in runs:
        if run.verification is not None:
            verdicts = sorted(run.verification.verdicts, key=_order)
            checks = [(_place(verdict), verdict.checks) for verdict in verdicts if verdict.checks]
            tables.append(
                Verified(
                    run=run.name,
                    reference=run.verification.reference,
                    steps=run.verification.steps,
                    verdicts=table_of("Verdicts on equivalence", verdicts, _VERDICT),
                    checks=tuple(table_of(f"Checks of {at}", each, _CHECK) for at, each in checks),
                )
            )
    return tables


def trials_table(rows: Sequence[Row]) -> Table:
    """One line a trial, in the order of the comparison."""
    listed = [(row, trial) for row in rows for trial in row.trials]
    return table_of(
        f"All {len(listed)} trials", listed, [*_names(rows), *for_items(_TRIAL, itemgetter(1))]
    )


def ranks_table(rows: Sequence[Row]) -> Table:
    """One line a rank that left a record; memory is the rank's own peak."""
    listed = [
        (row, trial.repeat, rank) for row in rows for trial in row.trials for rank in trial.ranks
    ]
    repeat: Columns[Any] = [(_number("repeat"), itemgetter(1))]
    columns = [*_names(rows), *repeat, *for_items(_RANK, itemgetter(2))]
    return table_of(f"All {len(listed)} ranks", listed, columns)


def definitions(rows: Sequence[Row]) -> Table:
    """The catalogue's entries for what is not missing everywhere."""
    known = {name for row in rows for name, value in row.metrics.items() if value is not None}
    metrics = [metric for metric in METRICS.values() if metric.name in known]
    columns: Columns[Any] = [
        (_text("metric"), lambda metric: metric.name),
        (_text("unit"), lambda metric: metric.unit),
        (_text("over ranks"), lambda metric: "" if metric.over == "trial" else metric.over),
        (
            _text("definition"),
            lambda metric: (
                f"{metric.definition} Source: {metric.source}."
                if metric.source
                else metric.definition
            ),
        ),
    ]
    return table_of("Metrics with a value", metrics, columns)


def _names(rows: Sequence[Row]) -> Columns[Any]:
    """The columns that name the row, which is the first of what a line shows."""
    return for_items([pair for pair in row_columns(rows) if pair[0].names_row], itemgetter(0))


def _number(title: str, unit: str = "") -> Column:
    return Column(key=title, title=title, unit=unit)


def _text(title: str) -> Column:
    return Column(key=title, title=title, numeric=False)


def _order(verdict: Verdict) -> tuple[object, ...]:
    options, varied = plain(verdict.strategy_options), plain(verdict.varied)
    return (varied, verdict.strategy, options, verdict.world_size)


def _place(verdict: Verdict) -> str:
    options = ", ".join(f"{key}={plain(value)}" for key, value in verdict.strategy_options.items())
    label = f"{verdict.strategy} ({options})" if options else verdict.strategy
    ranks = "1 rank" if verdict.world_size == 1 else f"{verdict.world_size} ranks"
    varied = "".join(f", {title_of(key)}={plain(value)}" for key, value in verdict.varied.items())
    return f"{label} on {ranks}, {verdict.precision}{varied}"


def _word(verdict: Verdict) -> str:
    if verdict.equivalent is not None:
        return "equivalent" if verdict.equivalent else "not equivalent"
    return "not tried" if verdict.guarantee is None else f"differs by design: {verdict.guarantee}"


def _worst(verdict: Verdict) -> str | None:
    """Of what rounding may make; None where nothing was compared so."""
    if not verdict.checks or verdict.guarantee is not None or verdict.worst is None:
        return None
    return f"{verdict.worst:.2g}" if verdict.worst < LARGEST else "not finite"


def _cause(verdict: Verdict) -> str:
    """Why it deviates, or was not tried; nothing where the verdict says it."""
    cause = verdict.cause
    deviates = verdict.equivalent is False or not verdict.checks
    if cause is None or not deviates or cause.text == _word(verdict):
        return ""
    parts = {"": cause.text, "Evidence: ": cause.evidence, "Setting: ": cause.setting,
             "First deviation: ": cause.first_deviation}  # fmt: skip
    return " ".join(f"{title}{text}." for title, text in parts.items() if text)


def _plain_number(value: float | str | None, digits: int) -> str:
    return value if isinstance(value, str) else "" if value is None else f"{value:.{digits}g}"


_VERDICT: Columns[Verdict] = [
    (_text("strategy"), _place),
    (_text("verdict"), _word),
    (_number("worst"), _worst),
    (_text("cause"), _cause),
]
_CHECK: Columns[Check] = [
    (_text("check"), lambda check: check.name),
    (_text("result"), lambda check: "holds" if check.holds else "deviates"),
    (_text("found"), lambda check: _plain_number(check.found, 6)),
    (_text("expected"), lambda check: _plain_number(check.expected, 6)),
    (_text("tolerance"), lambda check: _plain_number(check.tolerance, 3)),
    (_text("where"), lambda check: check.where or ""),
]


def _metric(name: str) -> Callable[[TrialResult], Value]:
    def value_of(trial: TrialResult) -> Value:
        summary = trial.metrics.get(name)
        return None if summary is None else summary.value

    return value_of


def _instant(trial: TrialResult) -> str | None:
    try:
        return f"{datetime.fromtimestamp(trial.started_at_seconds, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return None


_TRIAL: Columns[TrialResult] = [
    (_number("repeat"), lambda trial: trial.repeat),
    (_number("order"), lambda trial: trial.order),
    (_text("outcome"), lambda trial: str(trial.outcome)),
    *((metric_column(name), _metric(name)) for name in TRIAL_METRICS),
    (metric_column("total_seconds"), lambda trial: trial.total_seconds),
    (_text("started (UTC)"), _instant),
    (_text("trial"), lambda trial: trial.id),
]


def _window_seconds(rank: RankRecord) -> float | None:
    return sum(window.window_seconds for window in rank.windows) or None


def _rate(rank: RankRecord) -> float | None:
    seconds = _window_seconds(rank)
    return rank.samples / seconds if seconds and rank.samples else None


def _token_rate(rank: RankRecord) -> float | None:
    seconds = _window_seconds(rank)
    return rank.tokens / seconds if seconds and rank.tokens else None


def _peak_bytes(rank: RankRecord) -> float | None:
    if rank.peak_memory_bytes is not None:
        return rank.peak_memory_bytes
    return None if rank.probe is None else rank.probe.peak_memory_bytes


def _state_bytes(rank: RankRecord) -> float | None:
    probe = rank.probe
    if probe is None:
        return None
    parts = (probe.parameter_bytes, probe.gradient_bytes, probe.optimizer_state_bytes)
    return None if None in parts else sum(part for part in parts if part is not None)


def _ended_early(rank: RankRecord) -> str:
    if rank.lost is not None:
        return rank.lost
    return "" if rank.error is None else f"{rank.error.kind}: {rank.error.message}"


_RANK: Columns[RankRecord] = [
    (_number("rank"), lambda rank: rank.rank),
    (_text("role"), lambda rank: rank.role),
    (_text("host"), lambda rank: rank.host),
    (_text("device"), lambda rank: rank.device),
    (_number("threads"), lambda rank: rank.threads),
    (_number("samples"), lambda rank: rank.samples),
    (_number("windows", "s"), _window_seconds),
    (_number("samples/s"), _rate),
    (_number("tokens/s"), _token_rate),
    (_number("peak", BYTES), _peak_bytes),
    (_number("state", BYTES), _state_bytes),
    (_text("first weights"), lambda rank: (rank.initial_weights_sha256 or "")[:8]),
    (_text("last weights"), lambda rank: (rank.final_weights_sha256 or "")[:8]),
    (_text("ended early"), _ended_early),
]
