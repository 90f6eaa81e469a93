"""Every row epoch by epoch: loss, seconds and quality, as a table and for programs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.epochs import EpochsOfRow, epochs_of
from shardmark.analysis.compare.rows import Row, plain
from shardmark.config.axes import NODES
from shardmark.report.table.data import (
    estimate_columns,
    flat,
    format_csv,
    identity_of,
    metrics_of,
)
from shardmark.report.table.notes import seeds_note
from shardmark.report.table.quantities import quantity
from shardmark.report.table.sections import Section, View
from shardmark.report.table.tables import Column, Table

_COLUMNS = ("train_loss", "epoch_seconds", "elapsed_seconds", "evaluation_seconds")
_QUALITIES = ("map", "map_50", "accuracy_top1", "perplexity")
"""Those of the table; JSON and CSV hold every one."""


def epochs_view(comparison: Comparison) -> View:
    return View(
        key="epochs",
        sections=lambda: (epochs_section(comparison),),
        data=lambda: epochs_json(comparison),
        csv=lambda: epochs_csv(comparison),
    )


def epochs_section(comparison: Comparison) -> Section:
    """One line for each epoch of each row; qualities that nothing recorded are left out."""
    found = [epochs_of(row) for row in comparison.rows]
    lines = [(one.row, epoch) for one in found for epoch in one.epochs]
    recorded = {name for _, epoch in lines for name in epoch.metrics}
    rows = [row for row, _ in lines]
    columns = [
        Column(title="strategy", cells=tuple(row.label for row in rows), numeric=False),
        *variants(rows),
        Column(title="ranks", cells=tuple(str(row.world_size) for row in rows)),
        Column(title="epoch", cells=tuple(str(epoch.number) for _, epoch in lines)),
    ]
    for name in (*_COLUMNS, *_QUALITIES):
        if name in recorded:
            cells = (quantity(name).show(epoch.metrics.get(name)) for _, epoch in lines)
            title = quantity(name).title.replace(" (", "\n(")
            columns.append(Column(title=title, cells=tuple(cells)))
    shown = (*_COLUMNS, *_QUALITIES)
    measured = [one.row for one in found if one.epochs]
    notes = (*epoch_notes(found, shown), *seeds_note(measured), *left_out(comparison.rows))
    return Section(title="Epoch by epoch", table=Table(columns=tuple(columns), notes=notes))


def variants(rows: Sequence[Row]) -> list[Column]:
    """What tells rows of one strategy and number of ranks apart; no column where nothing does."""
    cells = variant_cells(rows)
    found = [Column(title="variant", cells=cells, numeric=False)] if any(cells) else []
    return found + nodes_column(rows)


def nodes_column(rows: Sequence[Row | None]) -> list[Column]:
    """None where no row says its nodes; an empty cell where there is no row."""
    cells = tuple("" if row is None else plain(row.varied.get(NODES, "")) for row in rows)
    return [Column(title="nodes", cells=cells)] if any(cells) else []


def variant_cells(rows: Sequence[Row]) -> tuple[str, ...]:
    """Experiment and precision where they differ, then the varied values but for the nodes."""
    experiments = len({row.experiment for row in rows}) > 1
    precisions = len({row.precision for row in rows}) > 1
    return tuple(
        ", ".join(
            [
                *([row.experiment] if experiments else []),
                *([row.precision] if precisions else []),
                *(plain(value) for key, value in row.varied.items() if key != NODES),
            ]
        )
        for row in rows
    )


def epoch_notes(found: Sequence[EpochsOfRow], names: Collection[str]) -> list[str]:
    """What the seconds of an epoch are, and why a row or one of these metrics is not there."""
    notes = []
    if any(one.epochs for one in found):
        notes.append(
            "Time of an epoch: training alone, on the slowest rank; the evaluation after it is not"
            " in it."
        )
    if any(len(one.row.ok_trials) > 1 for one in found if one.epochs):
        notes.append("Mean over the repeats, ± 95 % interval of the mean (Student's t).")
    warmup = sorted({one.warmup_steps for one in found if one.epochs} - {0})
    if warmup:
        steps = " or ".join(map(str, warmup))
        notes.append(
            f"The first epoch's time includes its {steps} warm-up steps, which every other table"
            " leaves out."
        )
    reasons: dict[str, list[str]] = {}
    for one in found:
        if one.reason is not None and one.row.ok_trials:
            reasons.setdefault(f"No epochs: {one.reason}", []).append(one.row.place)
        for epoch in one.epochs:
            for name in [name for name in epoch.missing if name in names]:
                text = f"Not known: {name} of epoch {epoch.number}: {epoch.missing[name]}"
                reasons.setdefault(text, []).append(one.row.place)
    number = len([one for one in found if one.row.ok_trials])
    return [*notes, *(f"{text}{where(places, number)}." for text, places in reasons.items())]


def where(places: Sequence[str], number: int) -> str:
    """Which of so many rows, in brackets; nothing for all of them."""
    return "" if len(places) == number else f" ({'; '.join(places)})"


def left_out(rows: Sequence[Row]) -> list[str]:
    """Trials that did not end ok: they are in no number."""
    names = [
        f"{row.place} ({', '.join(f'{one.count} x {one.outcome}' for one in row.failed)})"
        for row in rows
        if row.failed
    ]
    return [f"Left out, not ok: {'; '.join(names)}."] if names else []


def epochs_json(comparison: Comparison) -> list[dict[str, object]]:
    """One mapping for each epoch of each row."""
    return [
        identity_of(row)
        | {
            "epoch": epoch.number,
            "metrics": metrics_of(epoch.metrics),
            "missing": dict(epoch.missing),
        }
        for row in comparison.rows
        for epoch in epochs_of(row).epochs
    ]


def epochs_csv(comparison: Comparison) -> str:
    """One line for each epoch of each row; each metric is three columns, as in the comparison."""
    lines = [(row, epoch) for row in comparison.rows for epoch in epochs_of(row).epochs]
    keys = dict.fromkeys(key for row in comparison.rows for key in identity_of(row))
    names = dict.fromkeys(name for _, epoch in lines for name in epoch.metrics)
    columns = [column for name in names for column in estimate_columns(name)]
    return format_csv(
        [
            identity_of(row)
            | {"epoch": epoch.number}
            | {
                key: value
                for name in epoch.metrics
                for key, value in flat(name, epoch.metrics[name])
            }
            for row, epoch in lines
        ],
        [*keys, "epoch", *columns],
    )
