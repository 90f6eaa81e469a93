"""Training loss by step, where a recipe counts no epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardmark.analysis.trial.series import OverTime, loss_by_step
from shardmark.report.figures.entry_series import having, readable, series_of
from shardmark.report.figures.figure import Figure, Panel
from shardmark.report.figures.grouping import MOST_ROWS_READ, Group, in_parts
from shardmark.report.figures.sentences import entries_in, joined, references


def step_loss_figures(groups: Sequence[Group]) -> list[Figure]:
    """From raw files: one repeat each, and of a limited number of rows."""
    counted = [entry for entry in entries_in(groups) if not entry.epochs.epochs]
    read = counted[:MOST_ROWS_READ]
    losses = {id(entry.row): loss_by_step(entry.row) for entry in read}
    figures = []
    facets = having(groups, lambda entry: id(entry.row) in losses and losses[id(entry.row)].x != ())
    for part in in_parts(facets):
        panels = [_panel(facet, losses) for facet in part.groups]
        caption = joined(
            "Training loss by optimizer step, mean over the samples of all ranks, in the first"
            " repeat; long series are thinned to each stretch's extremes.",
            references(part.groups),
            _rows_read(len(counted)),
        )
        figures.append(
            Figure(
                name=f"loss-by-step{part.ending}",
                title="Training loss by step",
                caption=joined(caption, part.note),
                panels=readable(panels),
                columns=min(3, len(panels)),
                shared_y=part.one_condition,
            )
        )
    return figures


def _panel(facet: Group, losses: Mapping[int, OverTime]) -> Panel:
    found = [(entry, losses[id(entry.row)]) for entry in facet.entries]
    return Panel(
        title=facet.title,
        kind="line",
        x_label="Step",
        y_label="Training loss",
        series=tuple(series_of(entry, loss.x, loss.y) for entry, loss in found),
        y_from_zero=False,
    )


def _rows_read(count: int) -> str:
    return f"Of {count} rows the first {MOST_ROWS_READ}." if count > MOST_ROWS_READ else ""
