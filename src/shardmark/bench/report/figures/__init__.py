"""Figures of a comparison: as data, and drawn."""

from __future__ import annotations

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
from shardmark.extras.studies.against import Against
from shardmark.extras.studies.published_figure import published_figures
from shardmark.predict.predicted.figure import predicted_figures
from shardmark.predict.predicted.rows import Predictions
from shardmark.predict.when.figure import when_figures

__all__ = ["Figure", "Panel", "Series", "figures_of"]
_MAKERS = (trade_off_figures, throughput_figures, when_figures, scaling_figures, memory_figures,
           step_figures, epoch_figures, step_loss_figures, sampled_figures, interface_figures,
           rank_figures, staleness_figures)  # fmt: skip


def figures_of(
    comparison: Comparison, *, predicted: bool = False, against: Against | None = None
) -> tuple[Figure, ...]:
    """Return every figure for which there are data, in the order of the report.

    Rows under different conditions (model, precision, any other axis) are in separate panels.  Raw
    files are read of one repeat of each row.  `predicted` adds predictions and traces the models,
    `against` adds the curves and claims of a study.
    """
    groups = groups_of(comparison.rows)
    drawn = [drawn for figures in _MAKERS for drawn in figures(groups)]
    if predicted:
        drawn += predicted_figures(groups, Predictions(comparison.rows))
    if against is not None:
        drawn += published_figures(against)
    return tuple(drawn)
