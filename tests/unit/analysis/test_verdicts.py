"""Verdicts are tested as promises: how often they are wrong, and that they are ever given."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev

import pytest
from tests.golden.invented import invented_trial

from shardmark.analysis.compare.comparison import (
    Comparison,
    compare,
    difference_between,
    ratio_between,
)
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.effects import (
    Effect,
    between_all,
    holm,
    paired_effect,
    with_one_row,
)
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.analysis.statistics.verdicts import FAMILY_ERROR_RATE, is_shown
from shardmark.results.store import StoredRun

FAMILIES = 500


def most_wrong(families: int) -> float:
    """The promised rate and three standard errors of a simulated one."""
    return FAMILY_ERROR_RATE + 3 * math.sqrt(FAMILY_ERROR_RATE * (1 - FAMILY_ERROR_RATE) / families)


def wrong_share(table: Callable[[], Sequence[Effect]], families: int = FAMILIES) -> float:
    """Of tables in which nothing differs, those with a verdict."""
    return sum(any(map(is_shown, table())) for _ in range(families)) / families


def against_first(rows: Sequence[Sequence[float]]) -> list[Effect]:
    """Of strategies that are all held against the same baseline."""
    found = [paired_effect(row, rows[0]) for row in rows[1:]]
    return list(holm(with_one_row([effect for effect in found if effect is not None])))


def effects(draw: random.Random, repeats: int, true_ratios: Sequence[float]) -> list[Effect]:
    """On a machine that drifts; one repeat in twenty is 10 to 50 % slower."""
    moods = [draw.uniform(1, 2) for _ in range(repeats)]

    def rate(true_ratio: float) -> float:
        slower = draw.uniform(1.1, 1.5) if draw.random() < 0.05 else 1.0
        return 100 * true_ratio * draw.lognormvariate(0, 0.02) / slower

    return against_first([[rate(ratio) * mood for mood in moods] for ratio in (1.0, *true_ratios)])


@pytest.mark.parametrize(
    ("repeats", "true_ratios"),
    [
        (2, [1.0] * 4),
        (3, [1.0] * 12),
        (10, [1.0] * 4),
        (5, [1.0] * 6 + [1.5, 0.6, 2.0, 1.3, 0.5, 3.0]),
    ],
)
def test_false_verdicts_stay_at_their_rate(repeats: int, true_ratios: list[float]) -> None:
    """Of strategies that do not differ from the baseline, also beside some that do."""
    draw = random.Random(repeats)
    same = true_ratios.count(1.0)
    wrong = wrong_share(lambda: effects(draw, repeats, true_ratios)[:same])
    assert wrong <= most_wrong(FAMILIES)


NOISY = {"noisy row": (1,), "noisy baseline": (0,), "both noisy": (0, 1)}
"""Places with five times the noise."""


@pytest.mark.parametrize(
    ("comparisons", "repeats", "kind"),
    [
        *((1, 3, kind) for kind in ("equal noise", *NOISY, "disturbed")),
        *((6, 5, kind) for kind in ("equal noise", *NOISY, "disturbed")),
        *((28, 3, kind) for kind in ("noisy baseline", "disturbed")),
    ],
)
def test_false_verdicts_stay_at_their_rate_however_the_noise_is_shared(
    kind: str, comparisons: int, repeats: int
) -> None:
    """What moderation assumes does not hold: it must not matter.  `disturbed`: 1 repeat in 10."""
    draw = random.Random(f"{kind} {comparisons} {repeats}")
    share = 0.1 if kind == "disturbed" else 0.0

    def rate(place: int) -> float:
        slower = draw.uniform(1.1, 1.5) if draw.random() < share else 1.0
        return draw.lognormvariate(0, 0.15 if place in NOISY.get(kind, ()) else 0.03) / slower

    def table() -> list[Effect]:
        rows = range(comparisons + 1)
        return against_first([[rate(place) for _ in range(repeats)] for place in rows])

    families = FAMILIES if comparisons < 10 else FAMILIES // 2
    assert wrong_share(table, families) <= most_wrong(families)


@pytest.mark.parametrize(("repeats", "rows"), [(3, 5), (5, 10)])
def test_false_differences_among_all_pairs(repeats: int, rows: int) -> None:
    """As many rows, one of them noisy, each held against each."""
    draw = random.Random(repeats * rows)

    def table() -> Sequence[Effect]:
        values = [
            {
                repeat: draw.lognormvariate(0, 0.15 if place == 1 else 0.03)
                for repeat in range(repeats)
            }
            for place in range(rows)
        ]
        return holm(list(between_all(values).values()))

    assert wrong_share(table, families=200) <= most_wrong(200)


@pytest.mark.parametrize(
    ("repeats", "true_ratio", "least"), [(3, 1.2, 0.6), (5, 1.1, 0.5), (10, 1.07, 0.7)]
)
def test_true_differences_are_shown(repeats: int, true_ratio: float, least: float) -> None:
    """One of twelve strategies differs."""
    draw = random.Random(repeats)
    families = 200
    shown = 0
    for _ in range(families):
        effect = effects(draw, repeats, [true_ratio] + [1.0] * 11)[0]
        shown += is_shown(effect) and effect.ratio.value > 1
    assert shown / families >= least


def effect_with(p_value: float) -> Effect:
    ratio = Estimate(value=1.0, low=0.9, high=1.1, n=3)
    return Effect(ratio=ratio, standardised=None, p_value=p_value, p_corrected=p_value)


def test_holms_own_steps() -> None:
    """Of 0.04 twice the value, as of each that stands alone; of the others Holm's steps."""
    found = holm([effect_with(p) for p in (0.04, 0.01, 0.03, 0.005)])
    assert [effect.p_corrected for effect in found] == pytest.approx([0.08, 0.03, 0.06, 0.02])
    assert [effect.p_value for effect in found] == [0.04, 0.01, 0.03, 0.005]
    assert [one.p_corrected for one in holm([effect_with(0.8), effect_with(0.9)])] == [1.0, 1.0]
    assert holm([]) == ()


def test_effect_is_the_paired_t_tests() -> None:
    above, below = [210.0, 250.0, 330.0], [100.0, 110.0, 160.0]
    logarithms = [math.log(y / x) for y, x in zip(above, below, strict=True)]
    effect = paired_effect(above, below)
    assert effect is not None
    statistic = fmean(logarithms) / (stdev(logarithms) / math.sqrt(3))
    two_degrees = 1 - statistic / math.sqrt(2 + statistic**2)  # of Student's t, two-sided
    assert effect.p_value == pytest.approx(two_degrees)
    assert effect.percent == pytest.approx(100 * (math.exp(fmean(logarithms)) - 1))
    hedges = math.gamma(1) / math.gamma(0.5)  # two degrees of freedom, and sqrt(2 / 2)
    assert effect.standardised == pytest.approx(fmean(logarithms) / stdev(logarithms) * hedges)


@pytest.mark.parametrize("repeats", [5, 12])
def test_standardised_effect_is_unbiased(repeats: int) -> None:
    """Also without the outer tenth, within some percent."""
    draw = random.Random(repeats)
    found = []
    for _ in range(1000):
        effect = paired_effect(
            [math.exp(draw.gauss(0.02, 0.01)) for _ in range(repeats)], [1.0] * repeats
        )
        assert effect is not None
        assert effect.standardised is not None
        found.append(effect.standardised)
    assert fmean(found) == pytest.approx(2.0, rel=0.06)


def test_effect_needs_two_pairs_above_zero() -> None:
    assert paired_effect([1.0], [2.0]) is None
    assert paired_effect([1.0, 0.0], [2.0, 2.0]) is None
    two = paired_effect([1.0, 1.1], [2.0, 2.0])
    assert two is not None
    assert two.standardised is None  # of two pairs the spread is hardly known


def test_pairs_without_spread() -> None:
    same, double = paired_effect([3.0] * 3, [3.0] * 3), paired_effect([6.0] * 3, [3.0] * 3)
    assert same is not None
    assert double is not None
    assert (same.p_value, same.standardised) == (1.0, None)
    assert (double.p_value, double.standardised) == (0.0, None)
    quality = paired_effect([6.0] * 3, [3.0] * 3, exact=False)
    assert quality is not None
    assert quality.p_value == 1.0  # of one seed that agrees with itself


def compared(found: dict[str, dict[int, float]]) -> Comparison:
    """Strategy -> repeat -> samples per second."""
    trials = tuple(
        invented_trial(
            strategy,
            1 if strategy == "single" else 2,
            repeat,
            metrics={"samples_per_second": rate, "accuracy_top1": rate / 1000},
        )
        for strategy, by_repeat in found.items()
        for repeat, rate in by_repeat.items()
    )
    return compare([StoredRun(path=Path("run"), trials=trials)])


def row(comparison: Comparison, strategy: str) -> Row:
    return next(one for one in comparison.rows if one.strategy == strategy)


BASE = {0: 100.0, 1: 102.0, 2: 98.0, 3: 101.0}
BARELY = {0: 105.0, 1: 105.5, 2: 104.5, 3: 102.0}
"""Alone it would be shown to be faster than the baseline."""


def test_verdicts_are_one_family() -> None:
    alone = row(compared({"single": BASE, "ddp": BARELY}), "ddp")
    same = {f"zero-{stage}": {0: 99.0, 1: 104.0, 2: 97.0, 3: 103.0} for stage in range(4)}
    among = row(compared({"single": BASE, "ddp": BARELY, **same}), "ddp")
    assert alone.verdict == "faster"
    assert among.verdict == "no difference shown"
    assert alone.effect is not None
    assert among.effect is not None
    assert among.effect.p_value == alone.effect.p_value == alone.effect.p_corrected
    assert among.effect.p_moderated is not None
    assert among.effect.p_corrected == pytest.approx(
        max(5 * among.effect.p_moderated, 2 * among.effect.p_value)
    )
    assert among.metrics["speedup"] == alone.effect.ratio == among.effect.ratio
    assert row(compared({"single": BASE, "ddp": BARELY}), "single").effect is None


def test_large_differences_are_shown_among_many_with_three_repeats() -> None:
    """Alike noise in fifteen rows: without what they share, no difference of any size is shown."""
    draw = random.Random(0)

    def measured(rate: float) -> dict[int, float]:
        return {repeat: rate * draw.lognormvariate(0, 0.03) for repeat in range(3)}

    rows = {"single": measured(100), "fsdp": measured(40), "ddp": measured(160)}
    comparison = compared(rows | {f"other-{place}": measured(100) for place in range(13)})
    assert row(comparison, "fsdp").verdict == "slower"
    assert row(comparison, "ddp").verdict == "faster"
    for strategy in ("fsdp", "ddp"):
        effect = row(comparison, strategy).effect
        assert effect is not None
        assert effect.p_moderated is not None
        assert effect.p_moderated < effect.p_value / 5


def test_runs_share_no_noise() -> None:
    """Rows of another baseline count in the family, and say nothing of this machine's noise."""
    rows = {"single": BASE, "ddp": BARELY, **{f"s{n}": {**BASE, n: 103.0} for n in range(4)}}
    alone = compared(rows)
    trials = tuple(trial for each in alone.rows for trial in each.trials)
    both = compare([StoredRun(path=Path(name), trials=trials) for name in ("a", "b")])
    first, again = row(alone, "ddp").effect, row(both, "ddp").effect
    assert first is not None
    assert again is not None
    assert again.p_moderated == first.p_moderated
    assert again.p_corrected >= first.p_corrected


def test_a_sure_difference_too_small_to_matter_is_a_tie() -> None:
    for factor, verdict in ((1.01, "tie"), (1.03, "faster"), (0.97, "slower")):
        rates = {repeat: factor * rate for repeat, rate in BASE.items()}
        assert row(compared({"single": BASE, "ddp": rates}), "ddp").verdict == verdict


def test_repeats_are_paired_where_both_have_them_and_it_is_said() -> None:
    comparison = compared({"single": BASE, "ddp": {1: 204.0, 2: 196.5, 3: 203.0, 4: 999.0}})
    paired = row(comparison, "ddp")
    assert paired.verdict == "faster"
    assert paired.effect is not None
    assert paired.effect.ratio.n == 3
    assert paired.effect.percent == pytest.approx(100, abs=1)
    assert any("3 common repeats (of 4 and 4)" in note for note in comparison.notes)
    comparison = compared({"single": BASE, "ddp": {3: 200.0, 4: 210.0}})
    alone = row(comparison, "ddp")
    assert (alone.verdict, alone.effect) == (None, None)
    assert any("1 common repeat (of 2 and 4)" in note for note in comparison.notes)


def test_ratio_and_difference_between_any_two_rows() -> None:
    comparison = compared({"ddp": BASE, "fsdp": {0: 150.0, 1: 153.0}, "zero-1": {9: 120.25}})
    ddp, fsdp, other = (row(comparison, name) for name in ("ddp", "fsdp", "zero-1"))
    ratio = ratio_between(fsdp, ddp, "samples_per_second")
    assert ratio is not None
    assert (ratio.low, ratio.value, ratio.high, ratio.n) == pytest.approx((1.5, 1.5, 1.5, 2))
    difference = difference_between(fsdp, ddp, "accuracy_top1")
    assert difference is not None
    assert difference.n == 2
    assert difference.value == pytest.approx(0.0505)
    unpaired = difference_between(other, ddp, "accuracy_top1")
    assert unpaired is not None
    assert unpaired.value == pytest.approx(0.02)
    assert (unpaired.low, unpaired.high, unpaired.n) == (None, None, 1)
    for between in (ratio_between, difference_between):
        assert between(fsdp, ddp, "map") is None
