"""A comparison beside a published study, as tables: headline figures, then epoch by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

from shardmark.analysis.compare.rows import plain
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.analysis.studies.against import Against, Pair
from shardmark.report.studies.against_claims import claims_sections, words_sections
from shardmark.report.studies.against_labels import printed, published_cell, shown_as
from shardmark.report.studies.against_notes import difference_notes, headline_notes
from shardmark.report.studies.against_plausibility import plausibility_section
from shardmark.report.studies.quantities import Quantity, quantity
from shardmark.report.table.gaps import left_out
from shardmark.report.table.sections import (
    Section,
    nodes_column,
    variant_cells,
)
from shardmark.report.table.sections import (
    TextColumn as Column,
)
from shardmark.report.table.sections import (
    TextTable as Table,
)
from shardmark.report.views.epochs import epoch_notes

_OWN_COLUMNS = ("train_loss", "epoch_seconds", "map", "accuracy_top1", "perplexity")
"""By epoch, against a study that has no such table; those that nothing recorded are left out."""


def against_sections(against: Against) -> tuple[Section, ...]:
    """The headline, the study's claims and words, what arithmetic says of its figures, and its own
    form of table where it has one."""
    by_epoch = (_epoch_section(against),) if against.epoch_metrics else ()
    return (
        headline_section(against),
        *claims_sections(against),
        *words_sections(against),
        plausibility_section(against),
        *by_epoch,
    )


def headline_section(against: Against) -> Section:
    """Published and measured side by side, one line a training; blank where a side lacks it.

    Columns of what the study has no figure of are not there, nor are lines without a number.
    """
    pairs, paper = against.pairs, against.paper
    columns: list[Column] = []
    for name in against.metrics:
        columns += _both(
            shown_as(name).title,
            [published_cell(paper, one.figures, name, one.published.get(name)) for one in pairs],
            [shown_as(name).show(pair.measured.get(name)) for pair in pairs],
        )
    columns += _ratios(against)
    shown = _filled(_labels(pairs), columns)
    title = f"Against {against.paper.name}: published (publ.) and measured (meas.)"
    return Section(title=title, table=Table(columns=shown, notes=headline_notes(against)))


def epoch_sections(against: Against) -> tuple[Section, ...]:
    """The table by epoch alone: it says itself in what both sides differ, and if one has none."""
    section = _epoch_section(against)
    notes = (
        *difference_notes(against),
        *no_epochs(against),
        *left_out(against.rows),
        *section.table.notes,
    )
    return (replace(section, table=replace(section.table, notes=notes)),)


def _epoch_section(against: Against) -> Section:
    """Ranks, epoch, loss, time and quality in the study's form, or in our own if it has none."""
    names = against.epoch_metrics or _OWN_COLUMNS
    lines = [(pair, number) for pair in against.pairs for number in epoch_numbers(pair)]
    columns = _labels([pair for pair, _ in lines])
    columns.append(Column(title="epoch", cells=tuple(str(number) for _, number in lines)))
    for name in names:
        form = quantity(name)
        measured = [form.show(measured_epoch(pair, number).get(name)) for pair, number in lines]
        if against.epoch_metrics:
            columns += _both(form.title, _published_epochs(against, lines, name), measured)
        elif any(measured):
            columns.append(Column(title=f"{form.title}\nmeas.", cells=tuple(measured)))
    found = [pair.epochs for pair in against.pairs if pair.epochs is not None]
    table = Table(columns=tuple(columns), notes=tuple(epoch_notes(found, against.epoch_metrics)))
    return Section(title=f"Against {against.paper.name}, epoch by epoch", table=table)


def _published_epochs(
    against: Against, lines: Sequence[tuple[Pair, int]], metric: str
) -> list[str]:
    """Every epoch as the study prints it."""
    form = quantity(metric)
    cells = []
    for pair, number in lines:
        value = published_epoch(pair, number).get(metric)
        digit = None if pair.figures is None else against.paper.digit(pair.figures, metric)
        text = None if value is None else printed(value, digit, form.scale)
        cells.append(form.show(value) if text is None else text)
    return cells


def no_epochs(against: Against) -> list[str]:
    """Why a whole side is blank; nothing for a study that has a table by epoch."""
    if against.epoch_metrics:
        return []
    what = "figures of whole trainings" if against.paper.figures else "claims"
    return [
        "The study states nothing by epoch: what is here was measured. Its"
        f" {what} are shown without --epochs."
    ]


def published_epoch(pair: Pair, number: int) -> dict[str, float]:
    table = None if pair.figures is None else pair.figures.epochs
    return {} if table is None else dict(table.by_number.get(number, {}))


def measured_epoch(pair: Pair, number: int) -> dict[str, Estimate | None]:
    epochs = () if pair.epochs is None else pair.epochs.epochs
    return next((dict(epoch.metrics) for epoch in epochs if epoch.number == number), {})


def epoch_numbers(pair: Pair) -> list[int]:
    """Those that either side has."""
    table = None if pair.figures is None else pair.figures.epochs
    published = set() if table is None else set(table.by_number)
    measured = set() if pair.epochs is None else {epoch.number for epoch in pair.epochs.epochs}
    return sorted(published | measured)


def _labels(pairs: Sequence[Pair]) -> list[Column]:
    columns = [Column(title="strategy", cells=tuple(pair.title for pair in pairs), numeric=False)]
    variants = _variants(pairs)
    if any(variants):
        columns.append(Column(title="variant", cells=variants, numeric=False))
    ranks = tuple(str(pair.world_size) for pair in pairs)
    columns += nodes_column([pair.row for pair in pairs])
    return [*columns, Column(title="ranks", cells=ranks)]


def _variants(pairs: Sequence[Pair]) -> tuple[str, ...]:
    """The row's own, else the conditions and the machine of the study's training."""
    rows = [pair.row for pair in pairs if pair.row is not None]
    of_rows = iter(variant_cells(rows))
    texts = [None if pair.row is None else next(of_rows) for pair in pairs]
    published = [
        ""
        if pair.figures is None
        else ", ".join([plain(one) for one in pair.figures.conditions.values()])
        for pair in pairs
    ]
    return tuple(text or other for text, other in zip(texts, published, strict=True))


def _ratios(against: Against) -> list[Column]:
    pairs = against.pairs
    columns: list[Column] = []
    if against.scales:
        columns = _ratio(
            Quantity("speedup", decimals=2),
            [pair.ratios.speedup for pair in pairs],
            [pair.ratios.measured_speedup for pair in pairs],
        )
    return columns + _ratio(
        Quantity(f"time / {against.paper.reference}", decimals=2),
        [pair.ratios.relative_time for pair in pairs],
        [pair.ratios.measured_relative_time for pair in pairs],
    )


def _ratio(
    form: Quantity, published: Sequence[float | None], measured: Sequence[Estimate | None]
) -> list[Column]:
    return _both(form.title, list(map(form.show, published)), list(map(form.show, measured)))


def _both(title: str, published: Sequence[str], measured: Sequence[str]) -> list[Column]:
    """Two columns of one title, the second also if it is blank; none without a published cell."""
    if not any(published):
        return []
    return [
        Column(title=f"{title}\n{side}", cells=tuple(cells))
        for side, cells in (("publ.", published), ("meas.", measured))
    ]


def _filled(labels: Sequence[Column], columns: Sequence[Column]) -> tuple[Column, ...]:
    """Without the lines that have nothing but their names."""
    kept = [any(cells) for cells in zip(*(column.cells for column in columns), strict=True)]
    return tuple(
        replace(column, cells=tuple(compress(column.cells, kept)))
        for column in (*labels, *columns)
        if any(kept)
    )
