"""Verdicts are tested as promises: how often they are wrong, and that they are ever given."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev

import pytest

from shardmark.base.results.schema import StabilityFinding, StabilityKind
from shardmark.base.results.store import StoredRun
from shardmark.base.statistics.effects import (
    Effect,
    Spread,
    holm,
    moderated,
    paired_effect,
    pairwise_effects,
    prior_of,
    with_shared_noise,
)
from shardmark.base.statistics.intervals import Estimate
from shardmark.bench.analysis.compare.comparison import (
    Comparison,
    compare,
    difference_between,
    ratio_between,
)
from shardmark.bench.analysis.compare.rows import Row
from shardmark.bench.analysis.compare.verdicts import FAMILY_ERROR_RATE, is_shown
from tests import present
from tests.golden.invented import compare_trials, invented_trial

FAMILIES = 250


def most_wrong(families: int) -> float:
    """The promised rate and three standard errors of a simulated one."""
    return FAMILY_ERROR_RATE + 3 * math.sqrt(FAMILY_ERROR_RATE * (1 - FAMILY_ERROR_RATE) / families)


def wrong_share(table: Callable[[], Sequence[Effect]], families: int = FAMILIES) -> float:
    """Fraction of the tables with a verdict although nothing differs."""
    return sum(any(map(is_shown, table())) for _ in range(families)) / families


def against_first(rows: Sequence[Sequence[float]]) -> list[Effect]:
    """Pair every strategy with the same baseline."""
    effects = [paired_effect(row, rows[0]) for row in rows[1:]]
    return list(holm(with_shared_noise([effect for effect in effects if effect is not None])))


def drawn_effects(draw: random.Random, repeats: int, true_ratios: Sequence[float]) -> list[Effect]:
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
        (10, [1.0] * 4),
        (5, [1.0] * 6 + [1.5, 0.6, 2.0, 1.3, 0.5, 3.0]),
    ],
)
def test_false_verdicts_stay_at_their_rate(repeats: int, true_ratios: list[float]) -> None:
    """The strategies do not differ from the baseline, also beside some that do."""
    draw = random.Random(repeats)
    same = true_ratios.count(1.0)
    wrong = wrong_share(lambda: drawn_effects(draw, repeats, true_ratios)[:same])
    assert wrong <= most_wrong(FAMILIES)


NOISY = {"noisy row": (1,), "noisy baseline": (0,)}
"""Places with five times the noise."""


@pytest.mark.parametrize(
    ("comparisons", "repeats", "kind"),
    [
        (1, 3, "equal noise"),
        (6, 5, "noisy row"),
        (6, 5, "disturbed"),
        (28, 3, "noisy baseline"),
    ],
)
def test_false_verdicts_stay_at_their_rate_however_the_noise_is_shared(
    kind: str, comparisons: int, repeats: int
) -> None:
    """Moderation assumes other noise, which must not matter.  `disturbed`: 1 repeat in 10."""
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


def test_false_differences_among_all_pairs_stay_at_their_rate() -> None:
    """Five rows, one of them noisy, each held against each."""
    draw = random.Random(15)

    def table() -> Sequence[Effect]:
        spreads = (0.03, 0.15, 0.03, 0.03, 0.03)
        values = [{n: draw.lognormvariate(0, spread) for n in range(3)} for spread in spreads]
        return holm(list(pairwise_effects(values).values()))

    assert wrong_share(table, families=200) <= most_wrong(200)


@pytest.mark.parametrize(
    ("repeats", "true_ratio", "least"), [(3, 1.2, 0.6), (5, 1.1, 0.5), (10, 1.07, 0.7)]
)
def test_true_differences_are_shown(repeats: int, true_ratio: float, least: float) -> None:
    """The twelve strategies are equal except for one."""
    draw = random.Random(repeats)
    shown = 0
    for _ in range(100):
        effect = drawn_effects(draw, repeats, [true_ratio] + [1.0] * 11)[0]
        shown += is_shown(effect) and effect.ratio.value > 1
    assert shown / 100 >= least


def test_holm_corrects_p_values_in_steps() -> None:
    """A p of 0.04 counts twice, as for a single pair; the others get Holm's steps."""

    def corrected(*p_values: float) -> list[float]:
        ratio = Estimate(value=1.0, low=0.9, high=1.1, n=3)
        family = [Effect(ratio=ratio, p_value=p, p_corrected=p) for p in p_values]
        return [effect.p_corrected for effect in holm(family)]

    assert corrected(0.04, 0.01, 0.03, 0.005) == pytest.approx([0.08, 0.03, 0.06, 0.02])
    assert corrected(0.8, 0.9) == [1.0, 1.0]
    assert corrected() == []


def test_effect_is_the_paired_t_tests() -> None:
    above, below = [210.0, 250.0, 330.0], [100.0, 110.0, 160.0]
    logarithms = [math.log(y / x) for y, x in zip(above, below, strict=True)]
    effect = present(paired_effect(above, below))
    statistic = fmean(logarithms) / (stdev(logarithms) / math.sqrt(3))
    two_degrees = 1 - statistic / math.sqrt(2 + statistic**2)  # p of Student's t, two-sided
    assert effect.p_value == pytest.approx(two_degrees)
    assert effect.percent == pytest.approx(100 * (math.exp(fmean(logarithms)) - 1))
    assert paired_effect([1.0], [2.0]) is None
    assert paired_effect([1.0, 0.0], [2.0, 2.0]) is None


@pytest.mark.parametrize(
    ("above", "exact", "p_value"), [(3.0, True, 1.0), (6.0, True, 0.0), (6.0, False, 1.0)]
)
def test_pairs_without_spread_are_certain_or_equal(
    above: float, exact: bool, p_value: float
) -> None:
    """Repeats of one seed agree with themselves, so that a quality shows nothing."""
    effect = present(paired_effect([above] * 3, [3.0] * 3, exact=exact))
    assert effect.p_value == p_value


def test_prior_of_simulated_variances_is_recovered() -> None:
    """The fit expects that a shared row makes variances alike: it finds fewer degrees than true."""
    draw = random.Random(0)

    def chi_square(degrees: float) -> float:
        return draw.gammavariate(degrees / 2, 2)

    def spread() -> Spread:
        true_variance = 4.0 * 6.0 / chi_square(6.0)
        return Spread(true_variance * chi_square(20) / 20, 20)

    priors = [prior_of([spread() for _ in range(400)]) for _ in range(20)]
    known = [prior for prior in priors if prior is not None]
    assert len(known) == len(priors)
    assert fmean(prior.variance for prior in known) == pytest.approx(4.0, rel=0.1)
    assert 3.5 < fmean(prior.degrees for prior in known) < 6.0


def test_equal_variances_end_at_what_the_shared_row_allows() -> None:
    """The limit is 4 n / (n + 3) times the degrees of one of n comparisons, less their own."""
    prior = present(prior_of([Spread(2.0, 2)] * 28))
    assert prior.degrees == pytest.approx((4 * 28 / 31 - 1) * 2 * 25 / 28)
    for few in ([], [Spread(1.0, 2)] * 3, [*[Spread(1.0, 2)] * 3, Spread(0.0, 2)]):
        assert prior_of(few) is None


def test_moderation_never_lowers_a_large_variance() -> None:
    prior = Spread(1.0, 6.0)
    assert moderated(Spread(0.2, 2), prior) == Spread((6 * 1.0 + 2 * 0.2) / 8, 8)
    assert moderated(Spread(9.0, 2), prior) == Spread(9.0, 8)


def compared(rates: dict[str, dict[int, float]]) -> Comparison:
    """Strategy -> repeat -> samples per second."""
    return compare_trials(
        *(
            invented_trial(
                strategy,
                1 if strategy == "single" else 2,
                repeat,
                metrics={"samples_per_second": rate, "accuracy_top1": rate / 1000},
            )
            for strategy, by_repeat in rates.items()
            for repeat, rate in by_repeat.items()
        )
    )


def row(comparison: Comparison, strategy: str) -> Row:
    return next(each for each in comparison.rows if each.strategy == strategy)


def effect_of(comparison: Comparison, strategy: str) -> Effect:
    return present(row(comparison, strategy).effect)


BASE = {0: 100.0, 1: 102.0, 2: 98.0, 3: 101.0}
BARELY = {0: 105.0, 1: 105.5, 2: 104.5, 3: 102.0}
"""Alone it would be shown to be faster than the baseline."""


def test_verdicts_are_one_family() -> None:
    alone = compared({"single": BASE, "ddp": BARELY})
    same = {f"zero-{stage}": {0: 99.0, 1: 104.0, 2: 97.0, 3: 103.0} for stage in range(4)}
    among = compared({"single": BASE, "ddp": BARELY, **same})
    assert (row(alone, "ddp").verdict, row(alone, "single").effect) == ("faster", None)
    assert row(among, "ddp").verdict == "no difference shown"
    own, effect = effect_of(alone, "ddp"), effect_of(among, "ddp")
    assert effect.p_value == own.p_value == own.p_corrected
    expected = max(5 * present(effect.p_moderated), 2 * effect.p_value)
    assert effect.p_corrected == pytest.approx(expected)
    assert row(among, "ddp").metrics["speedup"] == own.ratio == effect.ratio


def test_large_differences_are_shown_among_many_with_three_repeats() -> None:
    """Alike noise in fifteen rows: without what they share, no difference of any size is shown."""
    draw = random.Random(0)

    def measured(rate: float) -> dict[int, float]:
        return {repeat: rate * draw.lognormvariate(0, 0.03) for repeat in range(3)}

    rows = {"single": measured(100), "fsdp": measured(40), "ddp": measured(160)}
    comparison = compared(rows | {f"other-{place}": measured(100) for place in range(13)})
    for strategy, verdict in (("fsdp", "slower"), ("ddp", "faster")):
        assert row(comparison, strategy).verdict == verdict
        effect = effect_of(comparison, strategy)
        assert present(effect.p_moderated) < effect.p_value / 5


def test_runs_do_not_share_estimates_of_noise() -> None:
    """Rows of another baseline count in the family, and say nothing of this machine's noise."""
    rows = {"single": BASE, "ddp": BARELY, **{f"s{n}": {**BASE, n: 103.0} for n in range(4)}}
    alone = compared(rows)
    trials = tuple(trial for each in alone.rows for trial in each.trials)
    both = compare([StoredRun(path=Path(name), trials=trials) for name in ("a", "b")])
    first, again = effect_of(alone, "ddp"), effect_of(both, "ddp")
    assert again.p_moderated == first.p_moderated
    assert again.p_corrected >= first.p_corrected


@pytest.mark.parametrize(("factor", "verdict"), [(1.01, "tie"), (1.03, "faster"), (0.97, "slower")])
def test_a_sure_difference_too_small_to_matter_is_a_tie(factor: float, verdict: str) -> None:
    rates = {repeat: factor * rate for repeat, rate in BASE.items()}
    assert row(compared({"single": BASE, "ddp": rates}), "ddp").verdict == verdict


def test_repeats_are_paired_where_both_have_them_and_it_is_said() -> None:
    comparison = compared({"single": BASE, "ddp": {1: 204.0, 2: 196.5, 3: 203.0, 4: 999.0}})
    effect = effect_of(comparison, "ddp")
    assert (row(comparison, "ddp").verdict, effect.ratio.n) == ("faster", 3)
    assert effect.percent == pytest.approx(100, abs=1)
    few = {1: 150.0, 2: 151.0, 3: 150.0}
    (note,) = compared({"single": BASE, "ddp": few, "fsdp": few}).notes
    assert note.startswith("ddp on 2 ranks; fsdp on 2 ranks: compared by the 3 repeats that single")
    comparison = compared({"single": BASE, "ddp": {3: 200.0, 4: 210.0}})
    alone = row(comparison, "ddp")
    assert (alone.verdict, alone.effect) == (None, None)
    assert any("1 repeat that single on 1 rank has too: no" in note for note in comparison.notes)


def test_ratio_and_difference_between_any_two_rows() -> None:
    comparison = compared({"ddp": BASE, "fsdp": {0: 150.0, 1: 153.0}, "zero-1": {9: 120.25}})
    ddp, fsdp, other = (row(comparison, name) for name in ("ddp", "fsdp", "zero-1"))
    ratio = present(ratio_between(fsdp, ddp, "samples_per_second"))
    assert (ratio.low, ratio.value, ratio.high, ratio.n) == pytest.approx((1.5, 1.5, 1.5, 2))
    paired = difference_between(fsdp, ddp, "accuracy_top1")
    unpaired = difference_between(other, ddp, "accuracy_top1")
    assert paired is not None
    assert unpaired is not None
    assert (paired.value, paired.n) == pytest.approx((0.0505, 2))
    assert unpaired.value == pytest.approx(0.02)
    assert (unpaired.low, unpaired.n) == (None, 1)
    assert ratio_between(fsdp, ddp, "map") is difference_between(fsdp, ddp, "map") is None


@pytest.mark.parametrize("disturbed", ["ddp", "fsdp", None])
def test_a_disturbed_row_or_baseline_decides_nothing(disturbed: str | None) -> None:
    noise = StabilityFinding(kind=StabilityKind.OTHER_PROCESSES, text="busy", severity=0.9)
    trials = [
        invented_trial(
            strategy,
            repeat=repeat,
            metrics={"samples_per_second": rate + repeat},
            stability=(noise,) if strategy == disturbed else (),
        )
        for strategy, rate in (("ddp", 100.0), ("fsdp", 150.0))
        for repeat in range(3)
    ]
    rows = compare_trials(*trials, baseline="ddp").rows
    (row,) = (row for row in rows if row.strategy == "fsdp")
    assert (row.effect is None) is (disturbed is not None)
    assert row.verdict == ("faster" if disturbed is None else "not decided")
