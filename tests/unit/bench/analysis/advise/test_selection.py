"""The best of several rows: the truly best one is hardly ever left out, and clear winners win."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from shardmark.base.ranking import Ranking
from shardmark.bench.analysis.advise.selection import rival_of, select
from shardmark.bench.analysis.compare.rows import Row
from shardmark.bench.analysis.compare.verdicts import METRIC, NO_DIFFERENCE, with_verdicts
from tests import present

DRAWS = 100
PEAK = "peak_memory_bytes"


def rows_with(values: Sequence[Sequence[float]], metric: str = METRIC) -> list[Row]:
    return [
        Row(
            experiment="invented",
            workload="",
            strategy=f"s{place}",
            strategy_options={},
            world_size=1,
            precision="fp32",
            varied={},
            synthetic=False,
            weak_scaling=False,
            outcomes={"ok": len(own)},
            metrics={},
            missing={},
            values={metric: dict(enumerate(own))},
        )
        for place, own in enumerate(values)
    ]


def fastest(rows: Sequence[Row]) -> Ranking[Row]:
    return present(select(rows, METRIC))


EQUAL = ((1.0,) * 6, (0.02,) * 6)
BEST_IS_NOISY = ((1.001, 1.0, 1.0, 1.0, 1.0), (0.10, 0.02, 0.02, 0.02, 0.02))
OTHERS_ARE_NOISY = ((1.001, 1.0, 1.0, 1.0, 1.0), (0.02, 0.10, 0.10, 0.10, 0.10))


@pytest.mark.parametrize(
    ("repeats", "means", "spreads"),
    [(2, *EQUAL), (3, *BEST_IS_NOISY), (9, *BEST_IS_NOISY), (3, *OTHERS_ARE_NOISY)],
)
def test_best_row_is_excluded_in_at_most_five_percent(
    repeats: int, means: tuple[float, ...], spreads: tuple[float, ...]
) -> None:
    """However many compete, the truly best is left out in at most 5 % of all comparisons."""
    source = random.Random(0)
    lost = 0
    for _ in range(DRAWS):
        moods = [source.gauss(0, 0.05) for _ in range(repeats)]
        rows = rows_with(
            [
                [mean * math.exp(mood + source.gauss(0, spread)) for mood in moods]
                for mean, spread in zip(means, spreads, strict=True)
            ]
        )
        chosen = fastest(rows)
        lost += rows[0] is not chosen.row and rows[0] not in chosen.close
    assert lost / DRAWS <= 0.094  # 5 %, and two standard errors of this many draws


def test_clear_winner_is_found_among_many() -> None:
    source = random.Random(0)
    won = 0
    for _ in range(50):
        means = (1.1, *(1.0,) * 7)
        rows = rows_with([[m * math.exp(source.gauss(0, 0.01)) for _ in range(5)] for m in means])
        chosen = fastest(rows)
        won += chosen.reason == "shown" and chosen.row is rows[0]
    assert won > 47


@pytest.mark.parametrize(
    ("values", "state", "ties"),
    [
        (
            [(150.0, 90.0, 160.0), (120.0, 121.0, 119.5), (10.0, 10.1, 10.05)],
            "not distinguishable",
            [1],
        ),
        ([(120.0, 121.0, 119.5), (100.0, 100.8, 99.5), (119.9,)], "not shown", []),
        ([(100.0,), (50.0,)], "not shown", []),
        ([(100.0, 101.0)], "alone", []),
        # Sure, but too small a gain to matter.
        ([(101.0, 102.01, 100.0), (100.0, 101.0, 99.01)], "tie", [1]),
    ],
    ids=[
        "noisy best shelters none",
        "one without a test may be as good",
        "one repeat",
        "alone",
        "one per cent",
    ],
)
def test_selection_has_state_and_ties(
    values: list[tuple[float, ...]], state: str, ties: list[int]
) -> None:
    rows = rows_with(values)
    chosen = fastest(rows)
    assert (chosen.row, chosen.reason) == (rows[0], state)
    assert list(chosen.close) == [rows[place] for place in ties]


def test_noisy_row_does_not_hide_other_differences() -> None:
    """The noise of a third row is no reason to doubt a difference that two rows' repeats show."""
    draw = random.Random(0)
    quiet = [
        [rate * draw.lognormvariate(0, 0.02) for _ in range(3)]
        for rate in (160.0, 100.0, 99.0, 101.0, 98.0, 102.0)
    ]
    rows = rows_with([*quiet, (30.0, 90.0, 10.0)])
    chosen = fastest(rows)
    assert chosen.row is rows[0]
    assert all(row is rows[-1] for row in chosen.close)


def test_selection_agrees_with_the_verdicts() -> None:
    """Whatever is drawn: who is shown to differ from the baseline is no tie with it, or is one."""
    draw = random.Random(0)
    states = set()
    for _ in range(60):
        levels = [100 * math.exp(draw.gauss(0, 0.06)) for _ in range(6)]
        values = [[level * draw.lognormvariate(0, 0.02) for _ in range(3)] for level in levels]
        rows = [replace(row, baseline="s0 on 1 rank") for row in rows_with(values)]
        rows = list(with_verdicts(rows, [rows[0]] * len(rows)))
        chosen, base = fastest(rows), rows[0]
        states.add(chosen.reason)
        if chosen.row is base:
            assert {row.verdict for row in chosen.close} <= {NO_DIFFERENCE, "tie"}
        elif base in chosen.close:
            assert chosen.row.verdict in (NO_DIFFERENCE, "tie")
        if chosen.row.verdict == "faster":
            assert not any(row.verdict == "slower" for row in chosen.close)
    assert states == {"shown", "tie", "not distinguishable"}


def test_less_memory_is_better_and_nobody_wins_without_values() -> None:
    rows = rows_with([(3.0, 3.0), (2.0, 2.0)], PEAK)
    chosen = present(select(rows, PEAK))
    assert (chosen.row, chosen.reason, rival_of(chosen)) == (rows[1], "shown", rows[0])
    assert select(rows, METRIC) is None
