"""Figure of the parts of a script's step by its number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.base.text import counted
from shardmark.bench.analysis.parts import Explanation
from shardmark.bench.report.answers.parts import parts_and_needed
from shardmark.bench.report.figures.chart import Figure, figure, stacked_panel


def scaling_figure(explanations: Sequence[Explanation]) -> list[Figure]:
    """Draw a bar for each number of ranks: where the speed-up goes."""
    bars = []
    for number, one in enumerate(explanations):
        seconds = {"computing": one.computing_seconds}
        for part in parts_and_needed(one):
            kind = part.kind.replace("_", " ")
            seconds[kind] = seconds.get(kind, 0.0) + part.seconds.value
        bars.append((counted(one.ranks, "rank"), number, seconds))
    return figure(
        "parts-by-ranks",
        "Where the time of a step goes",
        [stacked_panel("", "A step", "ms", bars, 1e-3)],
        "Each part is what a step takes less without it.  Parts that overlap add up to more than "
        "the step.",
    )
