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
        self._spans: list[tuple[str, object, object]] = []
        """Of the step under way: name, start, end."""
        self._marks: list[list[tuple[str, object, object]]] = []
        """By step, of those that are not in `_timed` yet; the last span is the whole step."""
        self._timed: list[tuple[float, dict[str, float]]] = []
        """By step: when it began, and its seconds by span."""
        self.first_step_at_seconds: float | None = None
        """Unix time at which the first step began; None before it."""
        self.losses: list[Tensor] = []
        self.sample_ids: list[tuple[int, ...]] = []
        self.learning_rates: list[float] = []
        self.windows: list[Window] = []

    @property
    def step(self) -> int:
        """Index of the step under way; the number of steps taken, between steps."""
        return len(self.losses)

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

    def start_window(self) -> None:
        self._clock.synchronize()
        for observer in self._observers:
            observer.window_started()
        self._opened = (self.step, self._clock.unix_seconds(), self._clock.wall_seconds())

    def stop_window(self) -> None:
        assert self._opened is not None, "stop_window without start_window"
        self._clock.synchronize()
        first_step, started_at, started = self._opened
        elapsed = self._clock.wall_seconds() - started
        if self.step > first_step:
            self.windows.append(Window(first_step, self.step, started_at, elapsed))
        self._opened = None
        for observer in self._observers:
            observer.window_stopped()

    def taken(self, first: int = 0) -> list[TakenStep]:
        """The steps from that one on, in numbers.  Between windows: it waits for the device."""
        self._time_marks()
        if first >= self.step:
            return []
        losses = torch.stack([loss.float() for loss in self.losses[first:]]).tolist()
        return [
            TakenStep(
                loss=loss,
                sample_ids=self.sample_ids[step],
                learning_rate=self.learning_rates[step],
                started_at_seconds=self._timed[step][0],
                seconds=self._timed[step][1],
            )
            for step, loss in enumerate(losses, start=first)
        ]

    def go_on_from(
        self,
        taken: Sequence[TakenStep],
        *,
        windows: Sequence[Window],
        first_step_at_seconds: float,
        device: torch.device,
    ) -> None:
        """Begin after steps that an earlier process took."""
        # The list itself is known to others.
        self.losses[:] = torch.tensor([step.loss for step in taken], device=device).unbind()
        self.sample_ids = [step.sample_ids for step in taken]
        self.learning_rates = [step.learning_rate for step in taken]
        self._timed = [(step.started_at_seconds, step.seconds) for step in taken]
        self.windows = [*windows]
        self.first_step_at_seconds = first_step_at_seconds

    def _time_marks(self) -> None:
        self._clock.synchronize()
        for spans in self._marks:
            assert self._origin is not None, "start_training comes before the first step"
            origin, at_seconds = self._origin
            seconds: dict[str, float] = {}
            for name, start, end in spans:
                seconds[name] = seconds.get(name, 0.0) + self._clock.seconds_between(start, end)
            began = at_seconds + self._clock.seconds_between(origin, spans[-1][1])
            self._timed.append((began, seconds))
        self._marks = []
