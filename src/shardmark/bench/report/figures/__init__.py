"""Figures of a comparison: as data, and drawn."""

from __future__ import annotations

from shardmark.base.system.plugins import by_name
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.report.figures.chart import Figure, Panel, Series
from shardmark.bench.report.figures.entries import groups_of
from shardmark.bench.report.figures.measured import (
    memory_figures,
    scaling_figures,
    step_figures,
    throughput_figures,
    trade_off_figures,
)
from shardmark.bench.report.figures.over_time import (
    epoch_figures,
    interface_figures,
    rank_figures,
    sampled_figures,
    staleness_figures,
    step_loss_figures,
)

__all__ = ["Figure", "Panel", "Series", "figures_of"]
_MAKERS = (trade_off_figures, throughput_figures,
           by_name("shardmark.predict.when.figure:when_figures"), scaling_figures, memory_figures,
           step_figures, epoch_figures, step_loss_figures, sampled_figures, interface_figures,
           rank_figures, staleness_figures)  # fmt: skip


def figures_of(comparison: Comparison, *, predicted: bool = False) -> tuple[Figure, ...]:
    """Return every figure for which there are data, in the order of the report.

    Rows under different conditions (model, precision, any other axis) are in separate panels.  Raw
    files are read of one repeat of each row.  `predicted` adds predictions and traces the models.
    """
    groups = groups_of(comparison.rows)
    drawn = [drawn for figures in _MAKERS for drawn in figures(groups)]
    if predicted:
        drawn += by_name("shardmark.predict.predicted.figure:predicted_figures")(
            groups, comparison.rows
        )
    return tuple(drawn)
