"""Errors of predictions of published runs, as 90 % intervals, by what they were made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardmark.predict.timing import Stack

Basis = Stack | Literal["images", "more ranks", "more nodes", "another model", "another card"]
"""Origin of a prediction: the published runs of language models with a stack, those of images, or
a measurement and its difference from the predicted run, of which the last that applies counts."""


@dataclass(frozen=True, slots=True)
class Residuals:
    """Quantiles of measured over predicted seconds."""

    low: float
    high: float

    def around(self, seconds: float) -> tuple[float, float]:
        return seconds * self.low, seconds * self.high


OFFLOADED = Residuals(0.44, 1.52)
"""Range of four published runs with offload and no measurement: T5-large of transformers, a GPT of
13 billion parameters on 1 and 8 cards of fairscale, and stanford_alpaca issue 280."""
RESIDUALS: Mapping[Basis, Residuals] = {
    "eager": Residuals(0.69, 1.50),
    "fused": Residuals(0.82, 1.37),
    "images": Residuals(0.75, 1.62),
    "more ranks": Residuals(0.91, 1.22),
    "more nodes": Residuals(0.89, 1.29),
    "another model": Residuals(0.83, 1.28),
    "another card": Residuals(0.70, 1.28),
}
"""Residuals of the published runs by `benchmarks/predict.py`: each source left out of the choice
of the constants, and none has more than a fifth of the runs."""
