"""Fits of latency and bandwidth, tested as statistics: on draws from a known law."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from shardmark.base.results.network import LinkFit, MeasuredOperation, NetworkRecord, TimedSize
from shardmark.bench.analysis.network.links import COSTS, Timing, fit_link, with_fits
from tests import present

LATENCY_SECONDS = 80e-6
BYTES_PER_SECOND = 1.2e8
SIZES = tuple(4**power for power in range(5, 13))


def fitted(timings: Sequence[Timing]) -> LinkFit:
    fit = fit_link(timings)
    assert isinstance(fit, LinkFit), fit
    return fit


@pytest.mark.parametrize("noise", [0.02, 0.2])
def test_intervals_cover_the_truth_about_95_times_in_100(noise: float) -> None:
    """Log-normal noise is added to the truth."""
    draw = random.Random(1)
    draws = 200
    covered = {"latency": 0, "bandwidth": 0}
    for _ in range(draws):
        seconds = {size: LATENCY_SECONDS + size / BYTES_PER_SECOND for size in SIZES}
        fit = fitted(
            [
                Timing(1, size, each * draw.lognormvariate(0, noise))
                for size, each in seconds.items()
            ]
        )
        for name, bounds, truth in (
            ("latency", fit.latency_seconds, LATENCY_SECONDS),
            ("bandwidth", fit.bytes_per_second, BYTES_PER_SECOND),
        ):
            covered[name] += present(bounds.low) <= truth <= present(bounds.high)
    for name, count in covered.items():  # 95 % +- three standard errors
        assert 0.904 <= count / draws <= 0.996, name


def test_undetermined_parameters_have_wide_or_no_bounds() -> None:
    """Only long messages: nothing bounds the latency from below."""
    draw = random.Random(4)
    sizes = (2**24, 2**25, 2**26, 2**27)
    fit = fitted(
        [
            Timing(1, size, (1e-9 + size / BYTES_PER_SECOND) * draw.lognormvariate(0, 0.05))
            for size in sizes
        ]
    )
    latency, bandwidth = fit.latency_seconds, fit.bytes_per_second
    assert latency.low is None or latency.high is None or latency.high / latency.low > 100
    assert present(bandwidth.low) <= BYTES_PER_SECOND <= present(bandwidth.high)


@pytest.mark.parametrize(
    ("timings", "reason"),
    [
        ([Timing(1, 8, 1e-4)] * 5, "fewer than 3 sizes"),
        ([Timing(1, size, 0.0) for size in SIZES], "a timing is not above zero"),
    ],
)
def test_missing_fit_has_a_reason(timings: list[Timing], reason: str) -> None:
    told = fit_link(timings)
    assert isinstance(told, str)
    assert reason in told


def test_a_record_s_fits_are_its_latency_and_bandwidth() -> None:
    """Four ranks in a ring: six messages one after the other, in which 1.5 payloads are sent."""
    cost = COSTS["all_reduce"]
    assert (cost.messages(4), cost.share(4)) == (6, 1.5)
    seconds = {size: 6 * LATENCY_SECONDS + 1.5 * size / BYTES_PER_SECOND for size in SIZES}
    operation = MeasuredOperation(
        operation="all_reduce",
        reach="same_host",
        ranks=(0, 1, 2, 3),
        sizes=tuple(
            TimedSize(payload_bytes=size, seconds=(each, each, 1.0))
            for size, each in seconds.items()
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
    fit = present(record.operations[0].fit)
    assert fit.latency_seconds.value == pytest.approx(LATENCY_SECONDS, rel=1e-6)
    assert fit.bytes_per_second.value == pytest.approx(BYTES_PER_SECOND, rel=1e-6)
    assert fit.residual < 1e-6
    assert record.operations[1].fit is None
    assert record.operations[1].reason == "fewer than 3 sizes were measured"
