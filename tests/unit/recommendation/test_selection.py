"""The best of several, and who may be as good: at its stated rate of errors."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from shardmark.analysis.advise.selection import Selection, is_positive, is_shown, select
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.intervals import Estimate, estimate_ratio
from shardmark.analysis.statistics.verdicts import METRIC, judged

DRAWS = 800


def _rows(values: Sequence[Sequence[float]]) -> list[Row]:
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
            failed=(),
            metrics={},
            missing={},
            values={"rate": dict(enumerate(own))},
        )
        for place, own in enumerate(values)
    ]


def _ratio(one: Row, other: Row) -> Estimate | None:
    above, below = one.values["rate"], other.values["rate"]
    common = sorted(above.keys() & below.keys())
    if len(common) < 2:
        return Estimate(value=above[0] / below[0], low=None, high=None, n=1)
    return estimate_ratio([above[r] for r in common], [below[r] for r in common])


def _select(rows: Sequence[Row]) -> Selection:
    found = select(rows, lambda row: row.values["rate"], _ratio, lower_is_better=False)
    assert found is not None
    return found


@pytest.mark.parametrize("repeats", [2, 3, 9])
@pytest.mark.parametrize(
    ("means", "spreads"),
    [
        ((1.0,) * 6, (0.02,) * 6),
        ((1.0, 1.0), (0.02, 0.02)),
        ((1.001, 1.0, 1.0, 1.0, 1.0), (0.10, 0.02, 0.02, 0.02, 0.02)),
        ((1.001, 1.0, 1.0, 1.0, 1.0), (0.02, 0.10, 0.10, 0.10, 0.10)),
    ],
    ids=["equal", "two", "the best is noisy", "the others are noisy"],
)
def test_truly_best_is_kept(
    repeats: int, means: tuple[float, ...], spreads: tuple[float, ...]
) -> None:
    """However many compete, the truly best is left out in at most 5 % of all comparisons."""
    source = random.Random(0)
    lost = 0
    for _ in range(DRAWS):
        moods = [source.gauss(0, 0.05) for _ in range(repeats)]
        rows = _rows(
            [
                [mean * math.exp(mood + source.gauss(0, spread)) for mood in moods]
                for mean, spread in zip(means, spreads, strict=True)
            ]
        )
        found = _select(rows)
        lost += rows[0] is not found.best and rows[0] not in found.ties
    assert lost / DRAWS <= 0.065  # 5 %, and two standard errors of this many draws


def test_clear_winner_is_found_among_many() -> None:
    source = random.Random(0)
    won = 0
    for _ in range(200):
        rows = _rows(
            [
                [mean * math.exp(source.gauss(0, 0.01)) for _ in range(5)]
                for mean in (1.1, *(1.0,) * 7)
            ]
        )
        found = _select(rows)
        won += found.state == "shown" and found.best is rows[0]
    assert won > 190


def test_a_noisy_best_does_not_shelter_what_another_beats() -> None:
    """Row 1 beats row 2 clearly; that row 0 is uncertain does not make row 2 a candidate."""
    rows = _rows([(150.0, 90.0, 160.0), (120.0, 121.0, 119.5), (10.0, 10.1, 10.05)])
    found = _select(rows)
    assert found.state == "tie"
    assert found.ties == (rows[1],)


def test_a_noisy_row_does_not_shelter_others() -> None:
    """Its noise is no reason to doubt a difference that the two rows' own repeats show."""
    draw = random.Random(0)
    calm = [
        [rate * draw.lognormvariate(0, 0.02) for _ in range(3)]
        for rate in (160.0, 100.0, 99.0, 101.0, 98.0, 102.0)
    ]
    noisy = (30.0, 90.0, 10.0)
    for values in (calm, [*calm, noisy]):
        rows = _rows(values)
        found = _select(rows)
        assert found.state_of(rows[1]) == "worse"
        assert found.best is rows[0]
        assert all(row is rows[-1] for row in found.ties)


def test_a_row_without_interval_is_named_and_dims_no_other() -> None:
    rows = _rows([(120.0, 121.0, 119.5), (100.0, 100.8, 99.5), (110.0,)])
    found = _select(rows)
    assert (found.best, found.state) == (rows[0], "shown")
    assert found.without_interval == (rows[2],)
    assert found.ties == ()
    assert [found.state_of(row) for row in rows] == ["best", "worse", "no interval"]
    rows = _rows([(120.0, 121.0, 119.5), (100.0, 100.8, 99.5), (130.0,)])
    lucky = _select(rows)
    assert (lucky.best, lucky.state) == (rows[2], "not shown")
    assert lucky.without_interval == (rows[0],)
    assert lucky.state_of(rows[1]) == "worse", "than the first one, whatever the lucky one is"


def _judged(values: Sequence[Sequence[float]]) -> list[Row]:
    """The rows with verdicts, the first one their baseline."""
    rows = [
        replace(row, values={METRIC: row.values["rate"]}, baseline="s0 on 1 rank")
        for row in _rows(values)
    ]
    return list(judged(rows, [rows[0]] * len(rows)))


def _fastest(rows: Sequence[Row]) -> Selection:
    found = select(rows, lambda row: row.values[METRIC], lambda *_: None, lower_is_better=False)
    assert found is not None
    return found


def test_never_contradicts_the_verdicts() -> None:
    """Whatever is drawn: who is shown to differ from the baseline is no tie with it, or is one."""
    draw = random.Random(0)
    seen = set()
    for _ in range(300):
        levels = [100 * math.exp(draw.gauss(0, 0.06)) for _ in range(6)]
        rows = _judged([[one * draw.lognormvariate(0, 0.02) for _ in range(3)] for one in levels])
        found = _fastest(rows)
        seen.add(found.state)
        base = rows[0]
        if found.best is base:
            assert all(
                (row.verdict == "no difference shown") or found.state_of(row) == "worse"
                for row in rows[1:]
            )
        elif found.state_of(base) == "tie":
            assert found.best.verdict == "no difference shown"
        elif found.best.verdict == "no difference shown":
            beaten = [row for row in rows if row.verdict == "faster"]
            assert beaten, "something else is faster than the baseline"
        for row in rows:
            if row.verdict == "slower" and found.best.verdict == "faster":
                assert found.state_of(row) == "worse"
    assert seen == {"shown", "tie"}


def test_one_repeat_shows_nothing() -> None:
    found = _select(_rows([(100.0,), (50.0,)]))
    assert found.state == "not shown"
    assert len(found.without_interval) == 1
    assert found.margin is not None
    assert found.margin.value == pytest.approx(2)


def test_alone_and_nobody() -> None:
    rows = _rows([(100.0, 101.0)])
    assert _select(rows).state == "alone"
    assert (
        select(
            [replace(rows[0], values={"rate": {}})],
            lambda row: row.values["rate"],
            _ratio,
            lower_is_better=False,
        )
        is None
    )


def test_smaller_is_better_where_it_is_said() -> None:
    rows = _rows([(3.0, 3.0), (2.0, 2.0)])
    found = select(
        rows,
        lambda row: row.values["rate"],
        lambda one, other: _ratio(other, one),
        lower_is_better=True,
    )
    assert found is not None
    assert (found.best, found.state) == (rows[1], "shown")


def test_more_comparisons_need_more() -> None:
    ratio = estimate_ratio([1.10, 1.12, 1.14], [1.0, 1.0, 1.0])
    assert is_shown(ratio)
    assert not is_shown(ratio, 20)
    assert not is_shown(None)
    mean = Estimate(value=1.0, low=0.1, high=1.9, n=3)
    assert is_positive(mean)
    assert not is_positive(mean, 20)
    assert not is_positive(replace(mean, low=None, high=None))
