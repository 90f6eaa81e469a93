"""Marks what happens in a step; everything that waits, divides or writes comes after the window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Spans(Protocol):
    """What a worker's step needs of a recorder."""

    def span(self, name: str) -> AbstractContextManager[None]: ...


class Clock(Protocol):
    """Device marks come from CUDA events, host marks from `perf_counter`, tests' from a counter."""

    def mark(self) -> object: ...
    def seconds_between(self, start: object, end: object) -> float: ...
    def wall_seconds(self) -> float: ...
    def unix_seconds(self) -> float: ...
    def synchronize(self) -> None: ...


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
    """Seconds since the Unix epoch."""
    window_seconds: float


@dataclass(slots=True)
class Span:
    """All marks of one name; `steps` says which step each belongs to."""

    steps: list[int] = field(default_factory=list)
    marks: list[tuple[object, object]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenStep:
    """All that was recorded of one step, in numbers."""

    loss: float
    sample_ids: tuple[int, ...]
    started_at_seconds: float
    """Unix time."""
    seconds: dict[str, float]
    """By span."""


class Recorder:
    """`windows` are the headline, from wall time; the spans only explain it.

    A span may occur several times in a step (micro-batches): `seconds_by_step` adds them up.
    """

    def __init__(self, clock: Clock, observers: Sequence[WindowObserver] = ()) -> None:
        self._clock = clock
        self._observers = [*observers]
        self._origin: tuple[object, float] | None = None
        self._spans: dict[str, Span] = {}
        self._seconds: dict[str, dict[int, float]] = {}
        self._starts: dict[int, float] = {}
        self._began_at_seconds: float | None = None
        self._opened: tuple[int, float, float] | None = None
        self.step = 0
        """Index of the step under way; the number of steps taken, between steps."""
        self.losses: list[Tensor] = []
        self.sample_ids: list[tuple[int, ...]] = []
        self.windows: list[Window] = []

    def observe(self, observer: WindowObserver) -> None:
        """Tell one more of each window, after those that are told already."""
        self._observers.append(observer)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = self._clock.mark()
        yield
        span = self._spans.setdefault(name, Span())
        span.steps.append(self.step)
        span.marks.append((start, self._clock.mark()))

    def end_step(self, loss: Tensor, sample_ids: tuple[int, ...]) -> None:
        """Keep the step's loss (not read here) and which samples it really had."""
        self.losses.append(loss)
        self.sample_ids.append(sample_ids)
        self.step += 1

    def start_training(self) -> None:
        """Tie device marks to the calendar; called once, before the first step."""
        self._clock.synchronize()
        self._origin = (self._clock.mark(), self._clock.unix_seconds())
        self._began_at_seconds = self._began_at_seconds or self._origin[1]

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
        self.windows.append(Window(first_step, self.step, started_at, elapsed))
        self._opened = None
        for observer in self._observers:
            observer.window_stopped()

    @property
    def first_step_at_seconds(self) -> float | None:
        """Unix time at which the first step began; None before it."""
        return self._began_at_seconds

    def started_at_seconds_by_step(self) -> dict[int, float]:
        """Step index -> Unix time at which it began.  Waits for the device: call it last."""
        assert self._origin is not None, "start_training comes before the first step"
        self._settle()
        return dict(self._starts)

    def seconds_by_step(self, name: str) -> dict[int, float]:
        """Step index -> seconds in the span of that name.  Waits for the device: call it last."""
        self._settle()
        return dict(self._seconds.get(name, {}))

    @property
    def span_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self._seconds, *self._spans)))

    def taken(self, first: int) -> list[TakenStep]:
        """The steps from that one on, in numbers.  Between windows: it waits for the device."""
        self._settle()
        return [
            TakenStep(
                loss=float(self.losses[step]),
                sample_ids=self.sample_ids[step],
                started_at_seconds=self._starts[step],
                seconds={name: by[step] for name, by in self._seconds.items() if step in by},
            )
            for step in range(first, self.step)
        ]

    def go_on_from(
        self,
        taken: Sequence[TakenStep],
        *,
        losses: Sequence[Tensor],
        windows: Sequence[Window],
        first_step_at_seconds: float,
    ) -> None:
        """Begin after steps that an earlier process took; `losses` are theirs as tensors."""
        self.step = len(taken)
        self.losses[:] = losses  # the list itself is known to others
        self.sample_ids = [step.sample_ids for step in taken]
        self.windows = [*windows]
        self._began_at_seconds = first_step_at_seconds
        for index, step in enumerate(taken):
            self._starts[index] = step.started_at_seconds
            for name, seconds in step.seconds.items():
                self._seconds.setdefault(name, {})[index] = seconds

    def _settle(self) -> None:
        """Turn all marks into numbers."""
        self._clock.synchronize()
        for name, span in list(self._spans.items()):
            totals = self._seconds.setdefault(name, {})
            for step, (start, end) in zip(span.steps, span.marks, strict=True):
                totals[step] = totals.get(step, 0.0) + self._clock.seconds_between(start, end)
            if name == "step" and self._origin is not None:
                origin, at_seconds = self._origin
                for step, (start, _) in zip(span.steps, span.marks, strict=True):
                    self._starts[step] = at_seconds + self._clock.seconds_between(origin, start)
            del self._spans[name]
