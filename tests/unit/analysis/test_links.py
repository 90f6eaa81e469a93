"""Fits of latency and bandwidth, tested as statistics: on draws from a known law."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from shardmark.analysis.network.links import (
    COSTS,
    Timing,
    fit_link,
    with_fits,
)
from shardmark.results.network import (
    LinkFit,
    MeasuredOperation,
    NetworkRecord,
    Operation,
    TimedSize,
)

LATENCY_SECONDS = 80e-6
BYTES_PER_SECOND = 1.2e8
SIZES = tuple(4**power for power in range(5, 13))


def timings(draw: random.Random, noise: float, *, messages: int = 1) -> list[Timing]:
    """Log-normal noise around the truth."""
    return [
        Timing(
            messages=messages,
            sent_bytes=size,
            seconds=(messages * LATENCY_SECONDS + size / BYTES_PER_SECOND)
            * draw.lognormvariate(0, noise),
        )
        for size in SIZES
    ]


def fitted(found: Sequence[Timing]) -> LinkFit:
    fit = fit_link(found)
    assert isinstance(fit, LinkFit), fit
    return fit


@pytest.mark.parametrize("messages", [1, 6])
def test_without_noise_it_finds_the_truth(messages: int) -> None:
    fit = fitted(timings(random.Random(0), 0.0, messages=messages))
    assert fit.latency_seconds.value == pytest.approx(LATENCY_SECONDS, rel=1e-6)
    assert fit.bytes_per_second.value == pytest.approx(BYTES_PER_SECOND, rel=1e-6)
    assert fit.residual < 1e-6


@pytest.mark.parametrize("noise", [0.02, 0.2])
def test_intervals_cover_the_truth_about_95_times_in_100(noise: float) -> None:
    draw = random.Random(1)
    draws = 400
    covered = {"latency": 0, "bandwidth": 0}
    for _ in range(draws):
        fit = fitted(timings(draw, noise))
        for name, bounds, truth in (
            ("latency", fit.latency_seconds, LATENCY_SECONDS),
            ("bandwidth", fit.bytes_per_second, BYTES_PER_SECOND),
        ):
            assert bounds.low is not None
            assert bounds.high is not None
            covered[name] += bounds.low <= truth <= bounds.high
    for name, count in covered.items():  # 95 % +- three standard errors
        assert 0.917 <= count / draws <= 0.983, name


def test_what_the_sizes_do_not_tell_has_no_bounds_or_wide_ones() -> None:
    """Only long messages: nothing bounds the latency from below."""
    draw = random.Random(4)
    long = [
        Timing(
            messages=1,
            sent_bytes=size,
            seconds=(1e-9 + size / BYTES_PER_SECOND) * draw.lognormvariate(0, 0.05),
        )
        for size in (2**24, 2**25, 2**26, 2**27)
    ]
    fit = fitted(long)
    latency = fit.latency_seconds
    assert latency.low is None or latency.high is None or latency.high / latency.low > 100
    bandwidth = fit.bytes_per_second
    assert bandwidth.low is not None
    assert bandwidth.high is not None
    assert bandwidth.low <= BYTES_PER_SECOND <= bandwidth.high


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ([], "fewer than 3 sizes"),
        ([Timing(messages=1, sent_bytes=8, seconds=1e-4)] * 5, "fewer than 3 sizes"),
        (
            [Timing(messages=1, sent_bytes=size, seconds=0.0) for size in SIZES],
            "a timing is not above zero",
        ),
    ],
)
def test_why_there_is_no_fit(found: list[Timing], reason: str) -> None:
    told = fit_link(found)
    assert isinstance(told, str)
    assert reason in told


@pytest.mark.parametrize(
    ("operation", "messages", "share"),
    [
        ("point_to_point", 1, 1.0),
        ("all_reduce", 6, 1.5),
        ("all_gather", 3, 0.75),
        ("reduce_scatter", 3, 0.75),
    ],
)
def test_costs_of_four_ranks_in_a_ring(operation: Operation, messages: int, share: float) -> None:
    assert COSTS[operation].messages(4) == messages
    assert COSTS[operation].share(4) == share


def test_a_record_s_fits_are_its_latency_and_bandwidth() -> None:
    cost = COSTS["all_reduce"]

    def seconds(size: int) -> float:
        return cost.messages(4) * LATENCY_SECONDS + cost.share(4) * size / BYTES_PER_SECOND

    operation = MeasuredOperation(
        operation="all_reduce",
        reach="same_host",
        ranks=(0, 1, 2, 3),
        sizes=tuple(
            TimedSize(payload_bytes=size, seconds=(seconds(size), seconds(size), 1.0))
            for size in SIZES
        ),
    )
    short = operation.model_copy(update={"sizes": operation.sizes[:1]})
    record = with_fits(
        NetworkRecord(
            measured_at_seconds=0.0,
            backend="gloo",
            device_type="cpu",
            hosts=("a",) * 4,
            interface="lo",
            torch="2.11",
            operations=(operation, short),
        )
    )
    assert record.world_size == 4
    fit = record.operations[0].fit
    assert fit is not None
    assert fit.latency_seconds.value == pytest.approx(LATENCY_SECONDS, rel=1e-6)
    assert fit.bytes_per_second.value == pytest.approx(BYTES_PER_SECOND, rel=1e-6)
    assert record.operations[1].fit is None
    assert record.operations[1].reason == "fewer than 3 sizes were measured"
