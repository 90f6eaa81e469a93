"""Checks on invented draws that intervals hold the truth, and verdicts are right, as promised.

    python benchmarks/statistics_promises.py [--draws 10000] [--small]

Beside the intervals of Shardmark stand Student's t of all values, and the signed-rank interval of
the Hodges-Lehmann estimate.  It takes one core some minutes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from statistics import NormalDist, fmean, median, stdev

from harness import Table, options_of, store, surroundings
from shardmark.base.statistics.effects import holm, paired_effect, with_shared_noise
from shardmark.base.statistics.intervals import (
    ROBUST_FROM,
    Estimate,
    estimate_mean,
    estimate_ratio,
    t_quantile,
)
from shardmark.bench.analysis.compare.verdicts import FAMILY_ERROR_RATE

NAME = "statistics_promises"
COUNTS = (2, 3, 5, 7, 9, 10, 15, 20)
LEAST, MOST = 0.93, 0.97
BAR = (
    f"Bar: intervals hold the truth {LEAST:.0%} to {MOST:.0%} of the time where at most one value"
    f" or pair in twenty is disturbed; false verdicts in at most {FAMILY_ERROR_RATE:.0%} of the"
    " families"
)
Interval = tuple[float, float]
Draw = random.Random


def lognormal(spread: float) -> Callable[[Draw], float]:
    return lambda draw: draw.lognormvariate(0, spread)


def disturbed(share: float) -> Callable[[Draw], float]:
    """A law in which this share of the repeats takes 10 to 50 % longer."""

    def law(draw: Draw) -> float:
        longer = draw.uniform(1.1, 1.5) if draw.random() < share else 1.0
        return draw.lognormvariate(0, 0.03) * longer

    return law


@dataclass(frozen=True, slots=True)
class Law:
    """The distribution of repeats."""

    name: str
    of_value: Callable[[Draw], float]
    of_pair: Callable[[Draw], float]
    """Draws one value of a pair, so that as many pairs are disturbed as single values."""
    spread: float
    """Standard deviation of the undisturbed logarithm."""


LAWS = (
    Law("normal, 5 %", lambda draw: draw.gauss(1, 0.05), lambda draw: draw.gauss(1, 0.05), 0.0),
    Law("lognormal, 10 %", lognormal(0.1), lognormal(0.1), 0.1),
    Law("lognormal, 20 %", lognormal(0.2), lognormal(0.2), 0.2),
    Law("3 %, 1 in 20 disturbed", disturbed(0.05), disturbed(0.025), 0.03),
    Law("3 %, 1 in 10 disturbed", disturbed(0.1), disturbed(0.05), 0.03),
)


def middle(spread: float, *, trimmed: bool) -> float:
    """Mean of a lognormal law, or its mean between the first and the last tenth."""
    mean = math.exp(spread**2 / 2)
    unit = NormalDist()
    edge = unit.inv_cdf(0.9)
    within = (unit.cdf(edge - spread) - unit.cdf(-edge - spread)) / 0.8
    return mean * within if trimmed else mean


def student(values: Sequence[float]) -> Interval:
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


@cache
def left_out_averages(count: int) -> int | None:
    """Number of Walsh averages below a signed-rank interval of 95 %; None if there is none."""
    ways = [1]
    for rank in range(1, count + 1):
        longer = ways + [0] * rank
        ways = [one + (longer[i - rank] if i >= rank else 0) for i, one in enumerate(longer)]
    below = [total / 2**count for total in accumulate(ways)]
    return max((i for i, share in enumerate(below) if share <= 0.025), default=None)


def signed_rank(values: Sequence[float]) -> Interval | None:
    out = left_out_averages(len(values))
    if out is None:
        return None
    averages = sorted((a + b) / 2 for i, a in enumerate(values) for b in values[i:])
    return averages[out], averages[-out - 1]


def limits(of: Estimate) -> Interval:
    """The interval of an estimate; unbounded if it has none."""
    return (0.0, math.inf) if of.low is None or of.high is None else (of.low, of.high)


def ours(values: Sequence[float]) -> Interval:
    return limits(estimate_mean(values))


def ours_of_ratio(draw: Draw, law: Callable[[Draw], float], count: int) -> Interval:
    """Ratio of two equally fast strategies on a machine that halves its speed at times."""
    moods = [draw.uniform(1, 2) for _ in range(count)]
    above, below = ([mood * law(draw) for mood in moods] for _ in range(2))
    return limits(estimate_ratio(above, below))


def coverage(draws: int) -> Iterator[tuple[str, int, str, float, float]]:
    """Yields law, count, method, share of intervals that hold the truth, and median width."""
    for law in LAWS:
        for count in COUNTS:
            draw = random.Random(f"{law.name} {count}")
            samples = [[law.of_value(draw) for _ in range(count)] for _ in range(draws)]
            mean, kept = middle(law.spread, trimmed=False), middle(law.spread, trimmed=True)
            own = kept if count >= ROBUST_FROM else mean
            pairs = [ours_of_ratio(draw, law.of_pair, count) for _ in samples]
            methods: dict[str, tuple[Sequence[Interval | None], float]] = {
                "ours": ([ours(one) for one in samples], own),
                "Student": ([student(one) for one in samples], mean),
                "signed rank": ([signed_rank(one) for one in samples], kept),
                "ratio": (pairs, 1.0),
            }
            for method, (intervals, truth) in methods.items():
                known = [one for one in intervals if one is not None]
                if known:
                    held = fmean(low < truth < high for low, high in known)
                    yield law.name, count, method, held, median(high - low for low, high in known)


def verdicts(families: int) -> Iterator[tuple[int, int, float, float]]:
    """Yields repeats, comparisons, and shares of false verdicts with and without correction."""
    law = disturbed(0.05)
    for count in (2, 3, 5, 10, 20):
        for comparisons in (1, 2, 4, 8, 12):
            draw = random.Random(100 * count + comparisons)
            wrong = uncorrected = 0
            for _ in range(families):
                base = [law(draw) for _ in range(count)]
                pairs = [paired_effect([law(draw) for _ in base], base) for _ in range(comparisons)]
                effects = holm(with_shared_noise([one for one in pairs if one is not None]))
                wrong += any(one.p_corrected <= FAMILY_ERROR_RATE for one in effects)
                uncorrected += any(one.p_value <= FAMILY_ERROR_RATE for one in effects)
            yield count, comparisons, wrong / families, uncorrected / families


def power(families: int) -> Iterator[tuple[int, float, float]]:
    """Yields repeats, true ratio, and the share shown if one of eight strategies differs."""
    law = disturbed(0.05)
    for count in (3, 5, 10, 20):
        for ratio in (1.02, 1.05, 1.1, 1.2, 1.5, 2.0):
            draw = random.Random(f"{count} {ratio}")
            shown = 0
            for _ in range(families):
                base = [law(draw) for _ in range(count)]
                scales = [ratio] + [1.0] * 7
                pairs = [paired_effect([s * law(draw) for _ in base], base) for s in scales]
                first = holm(with_shared_noise([one for one in pairs if one is not None]))[0]
                shown += first.p_corrected <= FAMILY_ERROR_RATE and first.ratio.value > 1
            yield count, ratio, shown / families


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--draws", type=int, default=10_000)
    options = parser.parse_args()
    draws = 500 if options.small else options.draws
    around = surroundings()
    held = list(coverage(draws))
    false = list(verdicts(draws // 5))
    shown = list(power(draws // 20))
    rows = [
        (law, str(n), how, f"{share:.1%}", f"{width:.3f}") for law, n, how, share, width in held
    ]
    rows += [
        (f"{comparisons} of no difference", str(n), "false verdict", f"{share:.1%}", f"{bare:.1%}")
        for n, comparisons, share, bare in false
    ]
    rows += [
        (f"ratio {ratio}", str(n), "shown, of 8", f"{share:.0%}", "") for n, ratio, share in shown
    ]
    calm = [
        share for law, _, how, share, _ in held if how in ("ours", "ratio") and "1 in 10" not in law
    ]
    noise = 3 * math.sqrt(FAMILY_ERROR_RATE * (1 - FAMILY_ERROR_RATE) / (draws // 5))
    holds = all(LEAST <= share <= MOST for share in calm) and all(
        share <= FAMILY_ERROR_RATE + noise for _, _, share, _ in false
    )
    store(
        NAME,
        options=options,
        around=around,
        bar=BAR,
        holds=holds,
        table=Table(
            columns=("law or family", "n", "what", "share", "median width or uncorrected"),
            rows=tuple(rows),
        ),
        numbers={"coverage": held, "false_verdicts": false, "power": shown},
    )


if __name__ == "__main__":
    main()
