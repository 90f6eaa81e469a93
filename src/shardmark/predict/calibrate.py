"""Learns from measured steps how a machine differs from its data sheets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardmark.core.errors import InputError
from shardmark.predict.step import Factors, Step
from shardmark.predict.timing import Constants

LEAST, MOST = 1e-3, 1e3
"""No factor beyond is believed."""
CLOSE = 1.001
"""Between the bounds of a factor when it is good enough."""


def calibrate_compute(
    step: Step, measured_seconds: float, micro_batch: float, constants: Constants, factors: Factors
) -> Factors:
    """The compute factor with which the step takes what was measured.

    Raises `InputError` for a micro-batch of one sample, whose time is that of starting its
    operations, and for a step shorter than its communication and its library's code alone.
    """
    if micro_batch < 2:
        allowed = "measure 2 or more: the time of one is that of starting its operations"
        raise InputError("the run to predict from", "its ranks take 1 sample at a time", allowed)
    return _bisected(step, measured_seconds, constants, lambda f: replace(factors, compute=f))


def calibrate_communication(
    step: Step, measured_seconds: float, constants: Constants, factors: Factors
) -> Factors:
    """The communication factor with which a step on several ranks takes what was measured."""
    return _bisected(step, measured_seconds, constants, lambda f: replace(factors, communication=f))


def _bisected(
    step: Step, measured_seconds: float, constants: Constants, factors: Callable[[float], Factors]
) -> Factors:
    """Where a step's time, which grows with a factor, meets what was measured."""
    low, high = LEAST, MOST
    least, most = (step.time(constants, factors(bound)).seconds for bound in (low, high))
    if not least <= measured_seconds <= most:
        found = f"it took {measured_seconds:.3g} s a step, expected {least:.3g} to {most:.3g}"
        allowed = "check the card, the network and the batch of that run"
        raise InputError("the run to predict from", found, allowed)
    while high / low > CLOSE:
        middle = (low * high) ** 0.5
        below = step.time(constants, factors(middle)).seconds < measured_seconds
        low, high = (middle, high) if below else (low, middle)
    return factors((low * high) ** 0.5)
