"""Figures of a comparison as data, and what draws them."""

from __future__ import annotations

from shardmark.analysis.compare.comparison import Comparison
from shardmark.report.figures.chart import Figure, Panel, Series
from shardmark.report.figures.entries import groups_of
from shardmark.report.figures.learning import learning_figures, staleness_figures
from shardmark.report.figures.memory import memory_figures
from shardmark.report.figures.over_time import interface_figures, over_time_figures
from shardmark.report.figures.speed import scaling_figures, step_figures, throughput_figures
from shardmark.report.figures.trade_off import trade_off_figures

__all__ = ["Figure", "Panel", "Series", "figures_of"]


def figures_of(comparison: Comparison) -> tuple[Figure, ...]:
    """Every figure for which there are data, in the order of the report.

    Rows under other conditions (model, precision, any other axis) stand in panels of their own.
    Raw files are read of one repeat of each row.
    """
    groups = groups_of(comparison.rows)
    return (
        *trade_off_figures(groups),
        *throughput_figures(groups),
        *scaling_figures(groups),
        *memory_figures(groups),
        *step_figures(groups),
        *learning_figures(groups),
        *over_time_figures(groups),
        *interface_figures(groups),
        *staleness_figures(groups),
    )
