"""The recorder with a clock that counts its marks."""

from __future__ import annotations

import pytest
import torch

from shardmark.measure.step.recorder import Recorder, Window
from tests.unit.training.toy import CountingClock, ToyWorkload

WORKLOAD = ToyWorkload()


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
    with recorder.span("step"):
        for _ in range(micro_batches):
            with recorder.span("forward"):
                pass
    recorder.end_step(torch.zeros(()), (recorder.step,))


def test_observers_are_called_outside_of_the_window() -> None:
    clock = CountingClock()
    recorder = Recorder(clock, [Observer(clock), Observer(clock)])
    recorder.start_window()
    take_step(recorder)
    recorder.stop_window()
    assert clock.calls == [
        *("wait", "started", "started", "wall"),
        *("wait", "wall", "stopped", "stopped"),
    ]
    assert recorder.windows[0].window_seconds == 4 + 10


def test_several_windows() -> None:
    clock = CountingClock()
    recorder = Recorder(clock)
    take_step(recorder)
    for _ in range(2):
        recorder.start_window()
        take_step(recorder)
        take_step(recorder)
        recorder.stop_window()
        clock.now += 500
    first, second = recorder.windows
    assert first == Window(1, 3, 1e9 + 4 + 10, 8 + 10)
    assert (second.first_step, second.end_step, second.window_seconds) == (3, 5, 18)
    assert second.started_at_seconds == first.started_at_seconds + 18 + 500 + 10


def test_spans_of_a_step_add_up() -> None:
    recorder = Recorder(CountingClock())
    take_step(recorder, micro_batches=3)
    take_step(recorder)
    assert recorder.seconds_by_step("forward") == {0: 3.0, 1: 1.0}
    assert recorder.seconds_by_step("step") == {0: 7.0, 1: 3.0}
    assert recorder.seconds_by_step("unheard of") == {}
    assert recorder.span_names == ("forward", "step")


def test_steps_are_tied_to_the_calendar() -> None:
    recorder = Recorder(CountingClock())
    assert recorder.first_step_at_seconds is None
    recorder.start_training()
    take_step(recorder)
    take_step(recorder)
    began = 1e9 + 11
    assert recorder.first_step_at_seconds == began
    assert recorder.started_at_seconds_by_step() == {0: began + 1, 1: began + 5}


def test_span_that_fails_is_not_marked() -> None:
    recorder = Recorder(CountingClock())
    with pytest.raises(ValueError, match="bad"), recorder.span("forward"):
        raise ValueError("bad")
    assert recorder.seconds_by_step("forward") == {}


def test_losses_are_kept_and_not_read() -> None:
    recorder = Recorder(CountingClock())
    loss = torch.zeros((), device="meta")  # reading it would raise
    recorder.end_step(loss, (4, 5))
    assert recorder.losses == [loss]
    assert recorder.sample_ids == [(4, 5)]
    assert recorder.step == 1
