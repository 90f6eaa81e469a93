"""Marks the parts of a step; what waits, divides or writes comes after the measured window."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Spans(Protocol):
    """The part of a recorder that a worker's step uses."""

    def span(self, name: str) -> AbstractContextManager[None]: ...


class NoSpans:
    """A recorder of spans that records nothing."""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:  # noqa: ARG002  (the protocol's signature)
        yield


class Clock(Protocol):
    """A source of marks: CUDA events on a device, `perf_counter` on a host, a counter in tests."""

    def mark(self) -> object: ...
    def seconds_between(self, start: object, end: object) -> float: ...
    def wall_seconds(self) -> float: ...
    def unix_seconds(self) -> float: ...
    def synchronize(self) -> None: ...


class HostClock:
    """A clock for a CPU, where work is done when the call returns."""

    def mark(self) -> object:
        return self.wall_seconds()

    def seconds_between(self, start: object, end: object) -> float:
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start

    def wall_seconds(self) -> float:
        return time.perf_counter()

    def unix_seconds(self) -> float:
        return time.time()

    def synchronize(self) -> None:
        """Does nothing: a CPU has no work in flight."""


class CudaClock(HostClock):
    """A clock whose marks are CUDA events on the current stream of the first device.

    Marks are read once the stream has passed them.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices

    def mark(self) -> object:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        # A script need not make its device the current one.
        event.record(torch.cuda.current_stream(self._devices[0]))
        return event

    def seconds_between(self, start: object, end: object) -> float:
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        return float(start.elapsed_time(end)) / 1000

    def synchronize(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)


def clock_for(devices: Sequence[torch.device]) -> HostClock:
    """Return the clock of a process that computes on these devices."""
    return CudaClock(devices) if devices[0].type == "cuda" else HostClock()


class WindowObserver(Protocol):
    """An object that is called when a window opens and closes, outside of its measured time."""

    def window_started(self) -> None: ...
    def window_stopped(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive measured steps, with the device idle at both ends."""

    first_step: int
    end_step: int
    """The index after the last measured step."""
    started_at_seconds: float
    """Unix time."""
    window_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """Everything that was recorded during one step, as numbers."""

    loss: float | None
    sample_ids: Sequence[int]
    learning_rate: float | None
    started_at_seconds: float
    """Unix time."""
    seconds: dict[str, float]
    """Seconds by name of span, summed over the step's spans of that name; `step` is the step."""


class Recorder:
    """Records windows in wall time, which are the result, and spans of steps, which explain it."""

    def __init__(self, clock: Clock, observers: Sequence[WindowObserver] = ()) -> None:
        self._clock = clock
        self._observers = [*observers]
        self._origin: tuple[object, float] | None = None
        self._opened: tuple[int, float, float] | None = None
        self._started: object = None
        self._measured = True
        """True while the current steps belong to a measured window."""
        self._spans: list[tuple[str, object, object]] = []
        """Name, start and end of each span of the current step."""
        self._marks: list[list[tuple[str, object, object]]] = []
        """Spans of each step that is not flushed yet; the last span is the step itself."""
        self._flushed: list[RecordedStep] = []
        self.first_step_at_seconds: float | None = None
        """Unix time at which the first step began; None before that."""
        self.losses: list[Tensor | None] = []
        """Losses of the steps that are not flushed yet."""
        self.sample_ids: list[Sequence[int]] = []
        self.learning_rates: list[float | None] = []
        self.windows: list[Window] = []

    @property
    def step(self) -> int:
        """Index of the current step; between steps, the number of steps so far."""
        return len(self._flushed) + len(self.losses)

    def observe(self, observer: WindowObserver) -> None:
        """Call one more observer for each window, after the present ones."""
        self._observers.append(observer)

    def start_step(self) -> None:
        """Begin a step.  A step that does not end is not recorded."""
        self._spans = []
        self._started = self._clock.mark()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = self._clock.mark()
        yield
        self.add_span(name, start)

    def mark(self) -> object:
        """Return the present instant, for `add_span`."""
        return self._clock.mark()

    def add_span(self, name: str, start: object) -> None:
        """Record a span of the current step that ends now."""
        self._spans.append((name, start, self._clock.mark()))

    def end_step(
        self, loss: Tensor | None, sample_ids: Sequence[int], learning_rate: float | None
    ) -> None:
        """Store the step's loss, without reading it, and the samples that it really had."""
        self._spans.append(("step", self._started, self._clock.mark()))
        self._marks.append(self._spans)
        self.sample_ids.append(sample_ids)
        self.learning_rates.append(learning_rate)
        self.losses.append(loss)

    def start_training(self) -> None:
        """Relate device marks to Unix time.  Called once, before the first step."""
        self._clock.synchronize()
        self._origin = (self._clock.mark(), self._clock.unix_seconds())
        self.first_step_at_seconds = self._origin[1]

    @property
    def measured_seconds(self) -> float:
        """Seconds of all windows so far."""
        return sum(window.window_seconds for window in self.windows)

    def start_window(self, *, measured: bool = True) -> None:
        """Begin a group of steps.  A group that is not `measured` makes no window."""
        self._clock.synchronize()
        self._measured = measured
        for observer in self._observers if measured else ():
            observer.window_started()
        self._opened = (self.step, self._clock.unix_seconds(), self._clock.wall_seconds())

    def stop_window(self, *, at_last_step: bool = False) -> float:
        """Return the seconds that the steps took, with the device idle at both ends.

        `at_last_step` ends the window with its last step, after which other work may have followed.
        """
        assert self._opened is not None, "stop_window without start_window"
        self._clock.synchronize()
        first_step, started_at, started = self._opened
        elapsed = self._clock.wall_seconds() - started
        if at_last_step and self.step > first_step:
            (_, begun, _), (_, _, ended) = (
                self._marks[step - self.step][-1] for step in (first_step, self.step - 1)
            )
            elapsed = self._clock.seconds_between(begun, ended)
        if self._measured and self.step > first_step:
            self.windows.append(Window(first_step, self.step, started_at, elapsed))
        self._opened = None
        for observer in self._observers if self._measured else ():
            observer.window_stopped()
        return elapsed

    def recorded_steps(self) -> list[RecordedStep]:
        """Flush, and return all steps.  It waits for the device: call it between windows."""
        self.flush()
        return [*self._flushed]

    @property
    def flushed_steps(self) -> list[RecordedStep]:
        """The steps that are numbers already.  Reading it does not wait for the device."""
        return [*self._flushed]

    def flush(self) -> None:
        """Convert marks and losses to numbers, so that they no longer take device memory."""
        self._clock.synchronize()
        if not self.losses:
            return
        tensors = [loss.float() for loss in self.losses if loss is not None]
        values = iter(torch.stack(tensors).tolist() if tensors else ())
        for loss, spans in zip(self.losses, self._marks, strict=True):
            value = None if loss is None else next(values)
            self._flushed.append(self._recorded_step(value, spans))
        self.losses.clear()  # the progress writer reads this list object
        self._marks.clear()

    def _recorded_step(
        self, loss: float | None, spans: list[tuple[str, object, object]]
    ) -> RecordedStep:
        assert self._origin is not None, "start_training comes before the first step"
        origin, at_seconds = self._origin
        seconds: dict[str, float] = {}
        for name, start, end in spans:
            seconds[name] = seconds.get(name, 0.0) + self._clock.seconds_between(start, end)
        step = len(self._flushed)
        return RecordedStep(
            loss=loss,
            sample_ids=self.sample_ids[step],
            learning_rate=self.learning_rates[step],
            started_at_seconds=at_seconds + self._clock.seconds_between(origin, spans[-1][1]),
            seconds=seconds,
        )
