"""Every trial and every rank of the runs, as tables of the report page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from shardmark.analysis.compare.rows import Row, plain
from shardmark.config.axes import title_of
from shardmark.report.page.tables import PageTable, page_table
from shardmark.report.table.sections import TextColumn as Column
from shardmark.report.table.table import NOTHING, number
from shardmark.results.schema import RankRecord, TrialResult

MIB = 2.0**20
Listed = tuple[Row, TrialResult]


def trials_table(rows: Sequence[Row]) -> PageTable:
    """One line a trial, in the order of the comparison."""
    listed = [(row, trial) for row in rows for trial in row.trials]
    columns = [
        *_whose(rows, listed),
        _column("repeat", listed, lambda one: str(one[1].repeat)),
        _column("order", listed, lambda one: str(one[1].order)),
        _column("outcome", listed, lambda one: str(one[1].outcome), numeric=False),
        _metric("samples/s", listed, "samples_per_second"),
        _metric("step\nms", listed, "step_seconds", scale=1000),
        _metric("peak\nMiB", listed, "peak_memory_bytes", scale=1 / MIB),
        _metric("val. loss", listed, "validation_loss", decimals=4),
        _metric("top-1\n%", listed, "accuracy_top1", scale=100, decimals=1),
        _metric("mAP", listed, "map", decimals=3),
        _metric("CPU\n%", listed, "cpu_percent"),
        _column("total\ns", listed, lambda one: number(one[1].total_seconds)),
        _column("started\nUTC", listed, lambda one: _instant(one[1].started_at_seconds), False),
        _column("trial", listed, lambda one: one[1].id, numeric=False),
    ]
    return page_table("trials", f"All {len(listed)} trials.", _filled(columns))


def ranks_table(rows: Sequence[Row]) -> PageTable:
    """One line a rank that left a record; memory is the rank's own peak."""
    listed = [(row, trial) for row in rows for trial in row.trials for _ in trial.ranks]
    ranks = [rank for row in rows for trial in row.trials for rank in trial.ranks]
    columns = [
        *_whose(rows, listed),
        _column("repeat", listed, lambda one: str(one[1].repeat)),
        _of_rank("rank", ranks, lambda rank: str(rank.rank)),
        _of_rank("role", ranks, lambda rank: rank.role, numeric=False),
        _of_rank("host", ranks, lambda rank: rank.host, numeric=False),
        _of_rank("device", ranks, lambda rank: rank.device, numeric=False),
        _of_rank("threads", ranks, lambda rank: str(rank.threads)),
        _of_rank("samples", ranks, lambda rank: str(rank.samples)),
        _of_rank("windows\ns", ranks, lambda rank: _known(_window_seconds(rank), 1)),
        _of_rank("samples/s", ranks, lambda rank: _known(_rate(rank), 1)),
        _of_rank("peak\nMiB", ranks, lambda rank: _known(_peak_bytes(rank), 1 / MIB)),
        _of_rank("state\nMiB", ranks, lambda rank: _known(_state_bytes(rank), 1 / MIB)),
        _of_rank("first weights", ranks, lambda rank: _hash(rank.initial_weights_sha256), False),
        _of_rank("last weights", ranks, lambda rank: _hash(rank.final_weights_sha256), False),
        _of_rank("ended early", ranks, _ended_early, numeric=False),
    ]
    return page_table("ranks", f"All {len(ranks)} ranks of these trials.", _filled(columns))


def _whose(rows: Sequence[Row], listed: Sequence[Listed]) -> list[Column]:
    """What tells the lines apart."""
    several = len({row.experiment for row in rows}) > 1
    precisions = len({row.precision for row in rows}) > 1
    keys = list(dict.fromkeys(key for row in rows for key in row.varied))
    columns = [_column("strategy", listed, lambda one: one[0].label, numeric=False)]
    if several:
        columns.append(_column("experiment", listed, lambda one: one[0].experiment, numeric=False))
    columns.append(_column("ranks", listed, lambda one: str(one[0].world_size)))
    if precisions:
        columns.append(_column("precision", listed, lambda one: one[0].precision, numeric=False))
    for key in keys:
        cells = tuple(plain(row.varied[key]) if key in row.varied else "" for row, _ in listed)
        columns.append(Column(title=title_of(key), cells=cells, numeric=False))
    return columns


def _column(
    title: str, listed: Sequence[Listed], text_of: Callable[[Listed], str], numeric: bool = True
) -> Column:
    return Column(title=title, cells=tuple(text_of(one) for one in listed), numeric=numeric)


def _of_rank(
    title: str,
    ranks: Sequence[RankRecord],
    text_of: Callable[[RankRecord], str],
    numeric: bool = True,
) -> Column:
    return Column(title=title, cells=tuple(text_of(rank) for rank in ranks), numeric=numeric)


def _metric(
    title: str,
    listed: Sequence[Listed],
    name: str,
    *,
    scale: float = 1,
    decimals: int | None = None,
) -> Column:
    def text(one: Listed) -> str:
        summary = one[1].metrics.get(name)
        return NOTHING if summary is None else number(summary.value * scale, decimals=decimals)

    return _column(title, listed, text)


def _filled(columns: Sequence[Column]) -> list[Column]:
    """Without those that hold nothing."""
    return [
        column
        for column in columns
        if not column.cells or any(cell not in ("", NOTHING) for cell in column.cells)
    ]


def _known(value: float | None, scale: float) -> str:
    return NOTHING if value is None else number(value * scale)


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


def _hash(sha256: str | None) -> str:
    return NOTHING if sha256 is None else sha256[:8]


def _ended_early(rank: RankRecord) -> str:
    if rank.lost is not None:
        return rank.lost
    return "" if rank.error is None else f"{rank.error.kind}: {rank.error.message}"


def _instant(at_seconds: float) -> str:
    try:
        return datetime.fromtimestamp(at_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return NOTHING
