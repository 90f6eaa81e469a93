"""Simulated races of two candidates: how often they decide, and after how many pairs.

Run:  python benchmarks/race.py [--races 300]
"""

from __future__ import annotations

import argparse
import math
from collections import Counter

import numpy as np

from shardmark.base.statistics.race import Decision, standing

MARGIN = 0.01
MOST_PAIRS = 200
LAWS = ("normal", "heavy tails", "skewed", "bursts")


def noise_of(law: str, generator: np.random.Generator, deviation: float) -> np.ndarray:
    """Logarithms of times with a standard deviation, shape (pairs, 2)."""
    size = (MOST_PAIRS, 2)
    if law == "heavy tails":
        values = generator.standard_t(4, size) / math.sqrt(2)
    elif law == "skewed":
        values = generator.gamma(2.0, 1.0, size) / math.sqrt(2)
    elif law == "bursts":  # one trial in ten is disturbed four times as much
        scale = np.where(generator.random(size) < 0.1, 4.0, 1.0)
        values = generator.normal(0, 1, size) * scale / math.sqrt(0.9 + 0.1 * 16)
    else:
        values = generator.normal(0, 1, size)
    return deviation * values


def race(logs: np.ndarray) -> tuple[Decision, int]:
    """Look after each pair until the race is decided."""
    speeds = np.exp(logs)
    for count in range(2, MOST_PAIRS + 1):
        result = standing(list(speeds[:count, 1]), list(speeds[:count, 0]))
        decision = result.decision(MARGIN)
        if decision is not Decision.UNDECIDED:
            return decision, count
    return Decision.UNDECIDED, MOST_PAIRS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--races", type=int, default=300)
    races = parser.parse_args().races
    fixed = math.ceil((1.960 + 1.282) ** 2 * 2 * 0.02**2 / math.log1p(MARGIN) ** 2)
    print(f"a fixed design that finds {MARGIN:.0%} in 90 of 100 at 2 % noise: {fixed} pairs\n")
    print("| law | gain | noise | drift | faster | slower | no difference | undecided | pairs |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for law in LAWS:
        for gain, deviation, drift in (
            (1.0, 0.02, 0.0), (1.0, 0.02, 0.1), (1.0, 0.005, 0.0),
            (1.03, 0.02, 0.0), (1.03, 0.02, 0.1), (1.01, 0.02, 0.0), (0.97, 0.02, 0.0),
        ):  # fmt: skip
            generator = np.random.default_rng(1)
            counts: Counter[Decision] = Counter()
            pairs = []
            for _ in range(races):
                logs = noise_of(law, generator, deviation)
                times = np.arange(2 * MOST_PAIRS).reshape(-1, 2) / (2 * MOST_PAIRS)
                logs += drift * np.sin(2 * math.pi * generator.permuted(times, axis=1))
                decision, count = race(logs + np.array([0.0, math.log(gain)]))
                counts[decision] += 1
                pairs.append(count)
            low, middle, high = np.percentile(pairs, [10, 50, 90])
            shown = " | ".join(str(counts[decision]) for decision in (
                Decision.FASTER, Decision.SLOWER, Decision.NO_DIFFERENCE, Decision.UNDECIDED
            ))  # fmt: skip
            print(
                f"| {law} | {gain - 1:+.0%} | {deviation:.1%} | {drift:.0%} | {shown} | "
                f"{middle:.0f} ({low:.0f} to {high:.0f}) |"
            )


if __name__ == "__main__":
    main()
