"""Sentences of what is slower are shown for a pair that was picked after looking."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.unit.report_compare.runs import row_with

from shardmark.analysis.compare.comparison import ratio_between
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.diagnose.explanations_time import _pairs, surprising
from shardmark.analysis.statistics.intervals import Estimate, estimate_mean

RATE = "samples_per_second"
DRAWS = 250


def _rows(draw: random.Random, rates: list[float]) -> list[Row]:
    rows = []
    for place, rate in enumerate(rates):
        values = [rate * draw.lognormvariate(0, 0.08) for _ in range(3)]
        row = row_with({RATE: values})
        metrics: dict[str, Estimate | None] = {**row.metrics, RATE: estimate_mean(values)}
        rows.append(replace(row, strategy=f"s{place}", metrics=metrics))
    return rows


def _said(rows: list[Row]) -> list[tuple[str, str]]:
    found = []
    for _, row, other in _pairs(rows, rows):
        ratio = ratio_between(other, row, RATE)
        assert ratio is not None
        if surprising(ratio):
            found.append((row.strategy, other.strategy))
    return found


def test_equal_strategies_are_seldom_called_slower() -> None:
    draw = random.Random(0)
    false = sum(bool(_said(_rows(draw, [100.0] * 8))) for _ in range(DRAWS))
    assert false / DRAWS <= 0.05 + 3 * (0.05 * 0.95 / DRAWS) ** 0.5


def test_strategies_that_are_much_slower_are_named() -> None:
    draw = random.Random(1)
    said = [_said(_rows(draw, [30.0, *[100.0] * 7])) for _ in range(30)]
    assert sum(any(row == "s0" for row, _ in one) for one in said) >= 24


def test_a_candidate_without_a_rate_is_passed_over() -> None:
    rows = _rows(random.Random(2), [30.0, 100.0])
    blind = replace(rows[0], strategy="blind", values={}, metrics={})
    assert list(_pairs(rows, [*rows, blind])) == list(_pairs(rows, rows))
