"""Fits factors of a machine's computation and communication to measured steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray  # noqa: TC002  (beside numpy)

from shardmark.base.errors import InputError
from shardmark.predict.step import Factors, Step
from shardmark.predict.timing import Constants

LEAST, MOST = 1e-3, 1e3
"""Bounds of a factor that can be right."""
GRIDS, POINTS = 2, 128
"""The bounds of a factor are divided by so many points, and the interval found by as many again:
the factor is then known to 0.1 %."""


def calibrate_compute(
    step: Step, measured_seconds: float, micro_batch: float, constants: Constants, factors: Factors
) -> Factors:
    """Return the factors with which the step's computation agrees with the measured time.

    `micro_batch` counts samples, or the tokens of samples that have any.  Raises `InputError` for
    one alone, whose time is that of starting its operations, and for a step shorter than its
    communication and its library's code alone.
    """
    if micro_batch < 2:
        allowed = "measure 2 or more: the time of one is that of starting its operations"
        raise InputError("the measured run", "its ranks take 1 sample at a time", allowed)

    def seconds(compute: NDArray[np.float64]) -> NDArray[np.float64]:
        return step.seconds(constants, compute, factors.communication)

    return replace(factors, compute=_fitted(seconds, measured_seconds))


def calibrate_communication(
    step: Step, measured_seconds: float, constants: Constants, factors: Factors
) -> Factors:
    """Return the factors with which a step on several ranks agrees with the measured time."""

    def seconds(communication: NDArray[np.float64]) -> NDArray[np.float64]:
        return step.seconds(constants, factors.compute, communication)

    return replace(factors, communication=_fitted(seconds, measured_seconds))


def _fitted(
    seconds: Callable[[NDArray[np.float64]], NDArray[np.float64]], measured_seconds: float
) -> float:
    """Return the factor at which a step's time, which grows with it, is the measured time."""
    low, high = LEAST, MOST
    for grid in range(GRIDS):
        factors = np.geomspace(low, high, POINTS + 1)
        predicted = seconds(factors)
        if grid == 0 and not predicted[0] <= measured_seconds <= predicted[-1]:
            message = (
                f"it took {measured_seconds:.3g} s a step, expected {predicted[0]:.3g} to"
                f" {predicted[-1]:.3g}"
            )
            allowed = "check the card, the network and the batch of that run"
            raise InputError("the measured run", message, allowed)
        at = max(1, int(np.searchsorted(predicted, measured_seconds)))
        low, high = factors[at - 1], factors[at]
    return float((low * high) ** 0.5)
