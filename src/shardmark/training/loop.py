"""The training loop: plain and whole.  Reads no clock and no loss, writes and prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from shardmark.measure.recorder import Recorder
from shardmark.strategies._protocol import Worker
from shardmark.workloads._protocol import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What the loop needs to know of the recipe."""

    warmup_steps: int
    """First steps of the whole training that belong to no window."""
    learning_rate: Callable[[int], float]
    seed_of_step: Callable[[int], int]
    """Seeds what the step draws (dropout): the same for a share of the data in every strategy."""
    on_step: Callable[[int], None]
    """Told the number of steps taken; must cost nothing."""


def train(
    worker: Worker,
    batches: Iterator[Batch],
    recorder: Recorder,
    steps: Steps,
    *,
    end_step: int,
    device: torch.device,
) -> None:
    """Take steps until `end_step` have been taken; measure those after the warm-up."""
    current_rate: float | None = None
    windowed = False
    while recorder.step < end_step:
        if not windowed and recorder.step >= steps.warmup_steps:
            recorder.start_window()  # waits for the device
            windowed = True
        with recorder.span("step"):
            rate = steps.learning_rate(recorder.step)
            if rate != current_rate:
                worker.set_learning_rate(rate)
                current_rate = rate
            torch.manual_seed(steps.seed_of_step(recorder.step))
            with recorder.span("data"):
                batch = next(batches).to(device)
            loss = worker.step(batch, recorder)
        recorder.end_step(loss, batch)
        steps.on_step(recorder.step)
    if windowed:
        recorder.stop_window()  # waits for the device
