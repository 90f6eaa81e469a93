"""The host's clock."""

from __future__ import annotations

import torch

from shardmark.measure.step.clock import CudaClock, HostClock, clock_for


def test_host_marks_are_seconds() -> None:
    clock = HostClock()
    first, second = clock.mark(), clock.mark()
    clock.synchronize()
    assert clock.seconds_between(first, second) >= 0
    assert clock.seconds_between(2.0, 5.5) == 3.5
    assert clock.wall_seconds() <= clock.wall_seconds()
    assert clock.unix_seconds() > 1e9


def test_each_device_type_has_its_clock() -> None:
    assert type(clock_for(torch.device("cpu"))) is HostClock
    assert type(clock_for(torch.device("cuda", 0))) is CudaClock
