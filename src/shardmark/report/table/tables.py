"""The comparison as a table of ready strings with notes below; the formats only lay it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.rows import Row, plain
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.analysis.statistics.verdicts import BASELINE
from shardmark.report.table.notes import notes_of

STATE_METRICS = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")
NOTHING = "-"
LABEL = "label"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column; a line break in the title divides a name from its unit."""

    title: str
    cells: tuple[str, ...]
    numeric: bool = True
    key: bool = False
    """It names the rows: where a table is divided, each part has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What a reader sees of a comparison, in whatever format."""

    columns: tuple[Column, ...]
    notes: tuple[str, ...]

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        return tuple(zip(*(column.cells for column in self.columns), strict=True))


def comparison_table(comparison: Comparison) -> Table:
    """What `comparison_columns` finds, with all notes."""
    notes = tuple(note.text for note in notes_of(comparison))
    return Table(columns=comparison_columns(comparison.rows), notes=notes)


def comparison_columns(rows: Sequence[Row]) -> tuple[Column, ...]:
    """Human units, one unit a column; columns without any content are left out."""
    columns = (
        *row_names(rows),
        _numbers(rows, "samples/s", "samples_per_second", interval=True),
        _numbers(rows, "step\nms", "step_seconds", scale=1000),
        Column(title="speedup", cells=tuple(_speedup(row) for row in rows)),
        Column(title="verdict", cells=tuple(row.verdict or "" for row in rows), numeric=False),
        _numbers(rows, "eff.\n%", "scaling_efficiency", scale=100, decimals=0),
        _bytes(rows, "peak", lambda row: _value(row, "peak_memory_bytes")),
        _numbers(rows, "peak\nratio", "memory_ratio", decimals=2),
        _bytes(rows, "state", _state_bytes),
        *_of_servers(rows),
        _numbers(rows, "top-1\n%", "accuracy_top1", scale=100, decimals=1),
        _numbers(rows, "mAP", "map", decimals=3),
        _numbers(rows, "mAP@50", "map_50", decimals=3),
        _loss(rows),
        Column(title="outcome", cells=tuple(_outcome(row) for row in rows), numeric=False),
    )
    return tuple(
        column
        for column in columns
        if column.title in ("strategy", "ranks", "samples/s", "outcome")
        or any(cell not in ("", NOTHING) for cell in column.cells)
    )


def row_names(rows: Sequence[Row]) -> tuple[Column, ...]:
    """The columns that tell the rows apart."""
    ranks = Column(title="ranks", cells=tuple(ranks_of(row) for row in rows))
    found = (*_labels(rows), ranks, *_varied(rows))
    return tuple(replace(one, key=one.title != LABEL) for one in found)


def number(value: float, *, decimals: int | None = None) -> str:
    """Fixed decimals, or about four significant digits; never an exponent for everyday sizes."""
    if decimals is not None:
        return f"{value:.{decimals}f}"
    for limit, digits in ((1000, 0), (100, 1), (10, 2), (1, 3)):
        if abs(value) >= limit:
            return f"{value:.{digits}f}"
    return f"{value:.4g}"


def _labels(rows: Sequence[Row]) -> list[Column]:
    """What tells the rows apart, and what a reader must know of them."""
    marks = tuple(_mark(row) for row in rows)
    columns = [Column(title="strategy", cells=tuple(row.label for row in rows), numeric=False)]
    if any(marks):
        columns.append(Column(title=LABEL, cells=marks, numeric=False))
    varies_by_axis = any(key.startswith("workload") for key in _keys(rows))
    if len({row.workload for row in rows}) > 1 and not varies_by_axis:
        cells = tuple(row.workload for row in rows)
        columns.insert(0, Column(title="workload", cells=cells, numeric=False))
    if len({row.experiment for row in rows}) > 1:
        cells = tuple(row.experiment for row in rows)
        columns.insert(0, Column(title="experiment", cells=cells, numeric=False))
    if len({row.precision for row in rows}) > 1:
        cells = tuple(row.precision for row in rows)
        columns.append(Column(title="precision", cells=cells, numeric=False))
    return columns


def _mark(row: Row) -> str:
    marks = [
        ("synthetic", row.synthetic),
        ("weak scaling", row.weak_scaling),
        ("not equivalent", row.equivalent is False),
        ("rank lost", any(r.lost for trial in row.ok_trials for r in trial.ranks)),
        ("promises less", row.equivalent is None and row.guarantee is not None),
    ]
    return ", ".join(name for name, holds in marks if holds)


def _keys(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row.varied))


def _varied(rows: Sequence[Row]) -> list[Column]:
    keys = _keys(rows)
    short = [key.rpartition(".")[2] for key in keys]
    return [
        Column(
            title=key if short.count(last) > 1 else last,
            cells=tuple(plain(row.varied[key]) if key in row.varied else NOTHING for row in rows),
        )
        for key, last in zip(keys, short, strict=True)
    ]


def _numbers(
    rows: Sequence[Row],
    title: str,
    name: str,
    *,
    scale: float = 1,
    decimals: int | None = None,
    interval: bool = False,
) -> Column:
    cells = (
        _cell(row.metrics[name], scale=scale, decimals=decimals, interval=interval) for row in rows
    )
    return Column(title=title, cells=tuple(cells))


def _cell(estimate: Estimate | None, *, scale: float, decimals: int | None, interval: bool) -> str:
    if estimate is None:
        return NOTHING
    value = estimate.value * scale
    text = number(value, decimals=decimals)
    if not interval or estimate.half_width is None:
        return text
    places = len(text.partition(".")[2])
    return f"{text} ±{estimate.half_width * scale:.{places}f}"


def _speedup(row: Row) -> str:
    """With its interval, `1.62 (1.35 to 1.94)`; the baseline's is 1 by definition."""
    found = row.metrics["speedup"]
    if found is None:
        return NOTHING
    text = number(found.value, decimals=2)
    if found.low is None or found.high is None or row.verdict == BASELINE:
        return text
    return f"{text} ({number(found.low, decimals=2)} to {number(found.high, decimals=2)})"


def _bytes(rows: Sequence[Row], title: str, value_of: Callable[[Row], float | None]) -> Column:
    """In the one unit that suits the largest value."""
    values = [value_of(row) for row in rows]
    largest = max((value for value in values if value is not None), default=0.0)
    unit, size = "KiB", 2.0**10
    for larger, larger_size in (("MiB", 2.0**20), ("GiB", 2.0**30)):
        if largest >= larger_size:
            unit, size = larger, larger_size
    cells = tuple(NOTHING if value is None else number(value / size) for value in values)
    return Column(title=f"{title}\n{unit}", cells=cells)


def _of_servers(rows: Sequence[Row]) -> tuple[Column, ...]:
    """What only parameter servers have."""
    if not any("+" in ranks_of(row) for row in rows):
        return ()
    return (
        _bytes(rows, "worker", _worker_state_bytes),
        _numbers(rows, "stale", "staleness_mean", decimals=2),
        _numbers(rows, "server\nwait ms", "server_wait_seconds", scale=1000),
    )


def ranks_of(row: Row) -> str:
    """Workers, and servers beside them: `2+1`."""
    servers = max((sum(r.role == "server" for r in t.ranks) for t in row.trials), default=0)
    return f"{row.world_size}+{servers}" if servers else str(row.world_size)


def _worker_state_bytes(row: Row) -> float | None:
    """What the fullest worker holds, where servers hold the rest; None without servers."""
    found = [
        sum(getattr(rank.probe, name) or 0 for name in STATE_METRICS)
        for trial in row.ok_trials
        if any(rank.role == "server" for rank in trial.ranks)
        for rank in trial.ranks
        if rank.role == "worker" and rank.probe is not None
    ]
    return max(found, default=None)


def _state_bytes(row: Row) -> float | None:
    """Parameters, gradients and optimizer state of the fullest rank; None if one is not known."""
    values = [_value(row, name) for name in STATE_METRICS]
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _value(row: Row, name: str) -> float | None:
    estimate = row.metrics[name]
    return None if estimate is None else estimate.value


def _loss(rows: Sequence[Row]) -> Column:
    """The validation's, or the training's where nothing was evaluated."""
    evaluated = any(row.metrics["validation_loss"] is not None for row in rows)
    if evaluated:
        return _numbers(rows, "val.\nloss", "validation_loss", decimals=4)
    return _numbers(rows, "train\nloss", "train_loss", decimals=4)


def _outcome(row: Row) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in row.outcomes.items())
