"""Clocks of the two device types.  Imports torch."""

from __future__ import annotations

import time

import torch


class HostClock:
    """For work that is done when the call returns: the CPU."""

    def mark(self) -> object:
        return time.perf_counter()

    def seconds_between(self, start: object, end: object) -> float:
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start

    def wall_seconds(self) -> float:
        return time.perf_counter()

    def unix_seconds(self) -> float:
        return time.time()

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back."""


class CudaClock(HostClock):
    """Marks are events on the current stream, read once the device has passed them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> object:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds_between(self, start: object, end: object) -> float:
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        return float(start.elapsed_time(end)) / 1000

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def clock_for(device: torch.device) -> HostClock:
    return CudaClock(device) if device.type == "cuda" else HostClock()
