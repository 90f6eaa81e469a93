"""Marks what happens in a step; everything that waits, divides or writes comes after the window."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Spans(Protocol):
    """What a worker's step needs of a recorder."""

    def span(self, name: str) -> AbstractContextManager[None]: ...


class NoSpans:
    """Records nothing."""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:  # noqa: ARG002  (the protocol's signature)
        yield


class Clock(Protocol):
    """Device marks come from CUDA events, host marks from `perf_counter`, tests' from a counter."""

    def mark(self) -> object: ...
    def seconds_between(self, start: object, end: object) -> float: ...
    def wall_seconds(self) -> float: ...
    def unix_seconds(self) -> float: ...
    def synchronize(self) -> None: ...


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
    """Marks are events on the first device's current stream, read once it has passed them."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices

    def mark(self) -> object:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds_between(self, start: object, end: object) -> float:
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        return float(start.elapsed_time(end)) / 1000

    def synchronize(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)


def clock_for(devices: Sequence[torch.device]) -> HostClock:
    """Of a process that computes on these devices."""
    return CudaClock(devices) if devices[0].type == "cuda" else HostClock()


class WindowObserver(Protocol):
    """Told when a window opens and closes, outside of what it measures."""

    def window_started(self) -> None: ...
    def window_stopped(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive measured steps, with the device idle at both ends."""

    first_step: int
    end_step: int
    """One past the last measured step."""
    started_at_seconds: float
    """Unix time."""
    window_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenStep:
    """All that was recorded of one step, in numbers."""

    loss: float
    sample_ids: tuple[int, ...]
    learning_rate: float
    started_at_seconds: float
    """Unix time."""
    seconds: dict[str, float]
    """By span, all of the step's spans of that name together; `step` is the whole step."""


class Recorder:
    """`windows` are the headline, from wall time; the spans only explain it."""

    def __init__(self, clock: Clock, observers: Sequence[WindowObserver] = ()) -> None:
        self._clock = clock
        self._observers = [*observers]
        self._origin: tuple[object, float] | None = None
        self._opened: tuple[int, float, float] | None = None
        self._started: object = None
        self._measured = True
        """Whether the steps under way belong to a window."""
        self._spans: list[tuple[str, object, object]] = []
        """Of the step under way: name, start, end."""
        self._marks: list[list[tuple[str, object, object]]] = []
        """By step, of those that are not in `_taken` yet; the last span is the whole step."""
        self._taken: list[TakenStep] = []
        self.first_step_at_seconds: float | None = None
        """Unix time at which the first step began; None before it."""
        self.losses: list[Tensor] = []
        """Of the steps that are not in numbers yet."""
        self.sample_ids: list[tuple[int, ...]] = []
        self.learning_rates: list[float] = []
        self.windows: list[Window] = []

    @property
    def step(self) -> int:
        """Index of the step under way; the number of steps taken, between steps."""
        return len(self._taken) + len(self.losses)

    def observe(self, observer: WindowObserver) -> None:
        """Tell one more of each window, after those that are told already."""
        self._observers.append(observer)

    def start_step(self) -> None:
        """Begin a step; one that does not end leaves nothing."""
        self._spans = []
        self._started = self._clock.mark()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = self._clock.mark()
        yield
        self._spans.append((name, start, self._clock.mark()))

    def end_step(self, loss: Tensor, sample_ids: tuple[int, ...], learning_rate: float) -> None:
        """Keep the step's loss (not read here), and which samples it really had."""
        self._spans.append(("step", self._started, self._clock.mark()))
        self._marks.append(self._spans)
        self.sample_ids.append(sample_ids)
        self.learning_rates.append(learning_rate)
        self.losses.append(loss)

    def start_training(self) -> None:
        """Tie device marks to the calendar; called once, before the first step."""
        self._clock.synchronize()
        self._origin = (self._clock.mark(), self._clock.unix_seconds())
        self.first_step_at_seconds = self.first_step_at_seconds or self._origin[1]

    @property
    def measured_seconds(self) -> float:
        """Of all windows so far."""
        return sum(window.window_seconds for window in self.windows)

    def start_window(self, *, measured: bool = True) -> None:
        """Let steps follow that belong together; what is not measured leaves no window."""
        self._clock.synchronize()
        self._measured = measured
        for observer in self._observers if measured else ():
            observer.window_started()
        self._opened = (self.step, self._clock.unix_seconds(), self._clock.wall_seconds())

    def stop_window(self) -> float:
        """The seconds that the steps took, with the device idle at both ends."""
        assert self._opened is not None, "stop_window without start_window"
        self._clock.synchronize()
        first_step, started_at, started = self._opened
        elapsed = self._clock.wall_seconds() - started
        if self._measured and self.step > first_step:
            self.windows.append(Window(first_step, self.step, started_at, elapsed))
        self._opened = None
        for observer in self._observers if self._measured else ():
            observer.window_stopped()
        return elapsed

    def taken(self, first: int = 0) -> list[TakenStep]:
        """The steps from that one on, in numbers.  Between windows: it waits for the device."""
        self.settle()
        return self._taken[first:]

    @property
    def settled(self) -> list[TakenStep]:
        """The steps that are in numbers already; asks no device."""
        return [*self._taken]

    def settle(self) -> None:
        """Turn marks and losses into numbers, so that the device keeps none of them."""
        self._clock.synchronize()
        if not self.losses:
            return
        losses = torch.stack([loss.float() for loss in self.losses]).tolist()
        for loss, spans in zip(losses, self._marks, strict=True):
            self._taken.append(self._in_numbers(loss, spans))
        self.losses.clear()  # the list itself is known to others
        self._marks.clear()

    def _in_numbers(self, loss: float, spans: list[tuple[str, object, object]]) -> TakenStep:
        assert self._origin is not None, "start_training comes before the first step"
        origin, at_seconds = self._origin
        seconds: dict[str, float] = {}
        for name, start, end in spans:
            seconds[name] = seconds.get(name, 0.0) + self._clock.seconds_between(start, end)
        step = len(self._taken)
        return TakenStep(
            loss=loss,
            sample_ids=self.sample_ids[step],
            learning_rate=self.learning_rates[step],
            started_at_seconds=at_seconds + self._clock.seconds_between(origin, spans[-1][1]),
            seconds=seconds,
        )

    def go_on_from(
        self,
        taken: Sequence[TakenStep],
        *,
        windows: Sequence[Window],
        first_step_at_seconds: float,
    ) -> None:
        """Begin after steps that an earlier process took."""
        self._taken = [*taken]
        self.sample_ids = [step.sample_ids for step in taken]
        self.learning_rates = [step.learning_rate for step in taken]
        self.windows = [*windows]
        self.first_step_at_seconds = first_step_at_seconds
