"""Finds the range of an axis in which each strategy is measured to be the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from shardmark.bench.analysis.advise.groups import groups_of
from shardmark.bench.analysis.advise.selection import QUESTIONS, select, times_better
from shardmark.bench.analysis.compare.rows import Row
from shardmark.predict.when.crossings import (
    PARAMETERS,
    RANKS,
    Point,
    RangeLine,
    Rules,
    lines_along,
)


def measured_lines(rows: Sequence[Row]) -> list[RangeLine]:
    """Return the lines of rows that may win: of an equivalent training with a finite loss.

    A strategy that ran on one rank only is compared with each number of ranks of the others.
    """
    candidates = [row for group in groups_of(rows) for row in group.candidates]
    distributed = {row.label for row in candidates if row.world_size > 1}
    sizes = sorted({row.world_size for row in candidates if row.label in distributed})
    rules = {
        metric: Rules(
            rank=partial(select, metric=metric),
            times_better=partial(times_better, metric=metric),
            combined=math.hypot,
        )
        for metric in QUESTIONS
    }
    points = [
        _point(row, [row.world_size] if row.label in distributed or not sizes else sizes)
        for row in candidates
    ]
    return lines_along(points, rules)


def _point(row: Row, ranks: Sequence[int]) -> Point[Row]:
    task = [key for key in row.varied if key.startswith("workload.")]
    workload = {} if task else {"workload": row.workload}
    fixed = {"experiment": row.experiment, **workload, "precision": row.precision}
    size = row.metrics.get(PARAMETERS)
    return Point(
        result=row,
        conditions={**fixed, RANKS: row.world_size, **row.varied},
        task=task or list(workload),
        parameters=None if size is None else size.value,
        ranks=ranks,
    )
