"""How far predictions of published runs were off, by what they were made from: 90 % intervals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, exp, floor
from typing import Literal

Kind = Literal["more ranks", "more nodes", "another card"]
"""What lies between the measured run and the predicted one; the last that applies counts."""
COVERAGE = 0.90
UNMEASURED = 1.3
"""Factor up and down without any measurement: half of the published runs lie within, so that it
is no interval."""


@dataclass(frozen=True, slots=True)
class Residuals:
    """Quantiles of measured over predicted seconds."""

    low: float
    high: float

    def around(self, seconds: float) -> tuple[float, float]:
        return seconds * self.low, seconds * self.high


RESIDUALS: dict[Kind, Residuals] = {
    "more ranks": Residuals(0.91, 1.16),
    "more nodes": Residuals(0.91, 1.12),
    "another card": Residuals(0.64, 1.56),
}
"""Of the published runs by `benchmarks/predict.py`, with the constants that ship."""


def residuals_of(logarithms: Iterable[float]) -> Residuals:
    """Of log(measured / predicted); as far out as finitely many need for the next one to lie in.

    Source: conformal prediction, Vovk et al., Algorithmic Learning in a Random World (2005).
    """
    ordered = sorted(logarithms)
    tail = (1 - COVERAGE) / 2
    low = max(0, floor((len(ordered) + 1) * tail) - 1)
    high = min(len(ordered), ceil((len(ordered) + 1) * (1 - tail))) - 1
    return Residuals(exp(ordered[low]), exp(ordered[high]))


def interval(seconds: float, kind: Kind | None) -> tuple[float, float]:
    """Low and high; `kind` is None where nothing was measured."""
    if kind is None:
        return seconds / UNMEASURED, seconds * UNMEASURED
    return RESIDUALS[kind].around(seconds)
