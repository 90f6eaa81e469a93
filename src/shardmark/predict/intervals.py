"""Errors of predictions of published runs, as 90 % intervals, by what they were made from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, exp, floor
from typing import Literal

Kind = Literal["more ranks", "more nodes", "another card"]
"""Difference between the measured run and the predicted one; the last that applies counts."""
COVERAGE = 0.90


@dataclass(frozen=True, slots=True)
class Residuals:
    """Quantiles of measured over predicted seconds."""

    low: float
    high: float

    def around(self, seconds: float) -> tuple[float, float]:
        return seconds * self.low, seconds * self.high


RESIDUALS: dict[Kind | None, Residuals] = {
    "more ranks": Residuals(0.88, 1.22),
    "more nodes": Residuals(0.84, 1.12),
    "another card": Residuals(0.69, 1.44),
    None: Residuals(0.84, 1.74),
}
"""Residuals of the published runs by `benchmarks/predict.py`, None without a measurement.

Each source was left out of the choice of the constants, and none has more than a fifth of the runs.
"""


MIDDLES: dict[Kind | None, float] = {None: 1.06}
"""Medians of the same residuals, of which the others are 1.00 or 0.99: a point that is multiplied
by it has as many published runs above as below."""


def residuals_of(logarithms: Iterable[float]) -> Residuals:
    """Return the quantiles of log(measured / predicted), such that the next one lies inside them.

    Source: conformal prediction, Vovk et al., Algorithmic Learning in a Random World (2005).
    """
    ordered = sorted(logarithms)
    tail = (1 - COVERAGE) / 2
    low = max(0, floor((len(ordered) + 1) * tail) - 1)
    high = min(len(ordered), ceil((len(ordered) + 1) * (1 - tail))) - 1
    return Residuals(exp(ordered[low]), exp(ordered[high]))


def interval(seconds: float, kind: Kind | None) -> tuple[float, float]:
    """Return the bounds of a prediction; `kind` is None if nothing was measured."""
    return RESIDUALS[kind].around(seconds)
