"""The recorder with a clock that counts its marks, and the time of compilations."""

from __future__ import annotations

import weakref
from itertools import count

import pytest
import torch
from torch._dynamo.callback import CallbackTrigger, callback_handler

from shardmark.ranks.measure.step.compilation import Compilation
from shardmark.ranks.measure.step.recorder import Recorder, Window
from tests.unit.ranks.train.toy import CountingClock


class Observer:
    """Writes into the clock's own list of calls."""

    def __init__(self, clock: CountingClock) -> None:
        self._clock = clock

    def window_started(self) -> None:
        self._clock.calls.append("started")
        self._clock.now += 1000

    def window_stopped(self) -> None:
        self._clock.calls.append("stopped")
        self._clock.now += 1000


def take_step(recorder: Recorder, micro_batches: int = 1) -> None:
    recorder.start_step()
    for _ in range(micro_batches):
        with recorder.span("forward"):
            pass
    recorder.end_step(torch.zeros(()), (recorder.step,), 0.1)


def test_observers_are_called_outside_of_measured_windows() -> None:
    clock = CountingClock()
    recorder = Recorder(clock, [Observer(clock), Observer(clock)])
    for measured in (False, True):
        recorder.start_window(measured=measured)
        take_step(recorder)
        assert recorder.stop_window() == 4 + 10
    assert clock.calls == [
        *("wait", "wall") * 2,
        *("wait", "started", "started", "wall"),
        *("wait", "wall", "stopped", "stopped"),
    ]
    assert [(window.first_step, window.end_step) for window in recorder.windows] == [(1, 2)]
    assert recorder.measured_seconds == 14


def test_empty_windows_are_dropped() -> None:
    clock = CountingClock()
    recorder = Recorder(clock)
    take_step(recorder)
    for steps in (2, 0, 2):
        recorder.start_window()
        for _ in range(steps):
            take_step(recorder)
        recorder.stop_window()
        clock.now += 500
    first, second = recorder.windows
    assert first == Window(1, 3, 1e9 + 4 + 10, 8 + 10)
    assert (second.first_step, second.end_step, second.window_seconds) == (3, 5, 18)
    assert second.started_at_seconds == first.started_at_seconds + 18 + 500 + 20 + 500 + 10


def test_spans_of_a_name_add_up() -> None:
    """Spans of a name add up, and the step is tied to the calendar."""
    recorder = Recorder(CountingClock())
    assert recorder.first_step_at_seconds is None
    recorder.start_training()
    take_step(recorder, micro_batches=3)
    take_step(recorder)
    began = 1e9 + 11
    assert recorder.first_step_at_seconds == began
    first, second = recorder.recorded_steps()
    assert (first.seconds, second.seconds) == (
        {"forward": 3.0, "step": 7.0},
        {"forward": 1.0, "step": 3.0},
    )
    assert (first.started_at_seconds, second.started_at_seconds) == (began + 1, began + 9)
    assert recorder.recorded_steps()[1:] == [second]
    assert recorder.recorded_steps()[2:] == []


def test_unfinished_steps_and_spans_are_not_recorded() -> None:
    recorder = Recorder(CountingClock())
    recorder.start_training()
    recorder.start_step()
    with recorder.span("data"):
        pass
    with pytest.raises(ValueError, match="bad"), recorder.span("forward"):
        raise ValueError("bad")
    assert (recorder.step, recorder.recorded_steps()) == (0, [])
    take_step(recorder)
    assert recorder.recorded_steps()[0].seconds.keys() == {"forward", "step"}


def test_flush_releases_losses_and_marks() -> None:
    recorder = Recorder(CountingClock())
    recorder.start_training()
    take_step(recorder)
    loss, losses = weakref.ref(recorder.losses[0]), recorder.losses
    recorder.flush()
    assert loss() is None
    take_step(recorder)
    assert losses is recorder.losses, "the list is known to others"
    assert (recorder.step, len(losses)) == (2, 1)
    assert [step.sample_ids for step in recorder.recorded_steps()] == [(0,), (1,)]


compiling = callback_handler.install_callbacks
DYNAMO, BACKWARD = CallbackTrigger.DYNAMO, CallbackTrigger.LAZY_BACKWARD


def test_nested_compilations_are_one_and_those_in_windows_are_counted() -> None:
    ticks = count()
    compilation = Compilation(clock=lambda: float(next(ticks)))
    with compilation:
        for measured in (False, True):
            if measured:
                compilation.window_started()
            with compiling(DYNAMO, "0"), compiling(BACKWARD, "1"):
                pass
            if measured:
                compilation.window_stopped()
        with pytest.raises(ZeroDivisionError), compiling(DYNAMO, "2"):
            raise ZeroDivisionError
    with compiling(DYNAMO, "3"):
        pass
    assert (compilation.seconds, compilation.in_windows) == (3.0, 1)
