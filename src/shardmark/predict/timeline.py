"""When a step's computing and communicating happen: two streams, one of each."""

from __future__ import annotations

from collections.abc import Sequence
from math import log, sqrt

from shardmark.predict.timing import Constants


def two_streams(
    computing: Sequence[float], gathering: Sequence[float], reducing: Sequence[float]
) -> float:
    """Seconds until both streams are done: each does one thing at a time, in the order it came.

    Of each task, in order: seconds of computing; of gathering what it needs, asked for when the
    task before it begins; of reducing what it leaves.  The first task waits for its own gather.
    """
    computed = 0.0
    sent = ready = gathering[0]
    for seconds, following, reduced in zip(computing, (*gathering[1:], 0.0), reducing, strict=True):
        begun, ready = max(computed, ready), 0.0
        if following:
            sent = ready = max(sent, begun) + following
        computed = begun + seconds
        if reduced:
            sent = max(sent, computed) + reduced
    return max(computed, sent)


def distribution_tax(ranks: int, passes: int, constants: Constants) -> float:
    """Computing time that ranks add, over that of one: a fixed part, and waiting for the slowest.

    The largest of n normal draws lies sqrt(2 ln n) standard deviations above their mean for large
    n (David and Nagaraja, Order Statistics, 3rd ed., 2003, section 10.5); ranks meet once in a
    step, and the mean of its passes spreads less by their square root.
    """
    if ranks < 2:
        return 0.0
    return constants.distribution + constants.spread * sqrt(2 * log(ranks) / passes)
