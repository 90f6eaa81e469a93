"""Every trial and every rank of the runs, as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from shardmark.analysis.compare.rows import Row
from shardmark.report.table.columns import metric_column, row_columns
from shardmark.report.table.table import BYTES, Column, Table, Value, table_of
from shardmark.results.schema import RankRecord, TrialResult

Listed = tuple[Row, TrialResult]
Ranked = tuple[Row, TrialResult, RankRecord]

TRIAL_METRICS = ("samples_per_second", "step_seconds", "peak_memory_bytes", "validation_loss",
                 "accuracy_top1", "map", "cpu_percent", "total_seconds")  # fmt: skip


def trials_table(rows: Sequence[Row]) -> Table:
    """One line a trial, in the order of the comparison."""
    listed = [(row, trial) for row in rows for trial in row.trials]
    metrics = [(metric_column(name), _metric(name)) for name in TRIAL_METRICS]
    return table_of(
        f"All {len(listed)} trials",
        listed,
        [
            *_names(rows),
            (_number("repeat"), lambda item: item[1].repeat),
            (_number("order"), lambda item: item[1].order),
            (_text("outcome"), lambda item: str(item[1].outcome)),
            *metrics,
            (_text("started (UTC)"), lambda item: _instant(item[1].started_at_seconds)),
            (_text("trial"), lambda item: item[1].id),
        ],
    )


def ranks_table(rows: Sequence[Row]) -> Table:
    """One line a rank that left a record; memory is the rank's own peak."""
    listed = [(row, trial, rank) for row in rows for trial in row.trials for rank in trial.ranks]

    def of(value: Callable[[RankRecord], Value]) -> Callable[[Ranked], Value]:
        return lambda item: value(item[2])

    size = Column(key="peak", title="peak", unit=BYTES)
    return table_of(
        f"All {len(listed)} ranks",
        listed,
        [
            *_names(rows),
            (_number("repeat"), lambda item: item[1].repeat),
            (_number("rank"), of(lambda rank: rank.rank)),
            (_text("role"), of(lambda rank: rank.role)),
            (_text("host"), of(lambda rank: rank.host)),
            (_text("device"), of(lambda rank: rank.device)),
            (_number("threads"), of(lambda rank: rank.threads)),
            (_number("samples"), of(lambda rank: rank.samples)),
            (Column(key="windows", title="windows", unit="s"), of(_window_seconds)),
            (_number("samples/s"), of(_rate)),
            (size, of(_peak_bytes)),
            (Column(key="state", title="state", unit=BYTES), of(_state_bytes)),
            (_text("first weights"), of(lambda rank: _hash(rank.initial_weights_sha256))),
            (_text("last weights"), of(lambda rank: _hash(rank.final_weights_sha256))),
            (_text("ended early"), of(_ended_early)),
        ],
    )


def _names(rows: Sequence[Row]) -> list[tuple[Column, Callable[[tuple[Any, ...]], Value]]]:
    """The columns that name the row, which is the first of what a line shows."""

    def of_first(of: Callable[[Row], Value]) -> Callable[[tuple[Any, ...]], Value]:
        return lambda item: of(item[0])

    return [(column, of_first(of)) for column, of in row_columns(rows) if column.names_row]


def _metric(name: str) -> Callable[[Listed], Value]:
    def value(item: Listed) -> Value:
        if name == "total_seconds":
            return item[1].total_seconds
        summary = item[1].metrics.get(name)
        return None if summary is None else summary.value

    return value


def _number(title: str) -> Column:
    return Column(key=title, title=title)


def _text(title: str) -> Column:
    return Column(key=title, title=title, numeric=False)


def _window_seconds(rank: RankRecord) -> float | None:
    return sum(window.window_seconds for window in rank.windows) if rank.windows else None


def _rate(rank: RankRecord) -> float | None:
    seconds = _window_seconds(rank)
    return rank.samples / seconds if seconds and rank.samples else None


def _peak_bytes(rank: RankRecord) -> float | None:
    if rank.peak_memory_bytes is not None:
        return rank.peak_memory_bytes
    return None if rank.probe is None else rank.probe.peak_memory_bytes


def _state_bytes(rank: RankRecord) -> float | None:
    probe = rank.probe
    if probe is None:
        return None
    parts = (probe.parameter_bytes, probe.gradient_bytes, probe.optimizer_state_bytes)
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _hash(sha256: str | None) -> str | None:
    return None if sha256 is None else sha256[:8]


def _ended_early(rank: RankRecord) -> str:
    if rank.lost is not None:
        return rank.lost
    return "" if rank.error is None else f"{rank.error.kind}: {rank.error.message}"


def _instant(at_seconds: float) -> str | None:
    try:
        return datetime.fromtimestamp(at_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return None
