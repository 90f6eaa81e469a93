"""The training loop: plain and whole.  Reads no clock and no loss, writes and prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardmark.core.shares import StepShard
from shardmark.measure.step.recorder import Recorder
from shardmark.strategies.base import Worker
from shardmark.workloads.base import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What the loop needs to know of the recipe."""

    warmup_steps: int
    """First steps of the whole training that belong to no window."""
    learning_rate: Callable[[int], float]
    seed_of: Callable[[StepShard], int]
    """Seeds what the step draws (dropout): the same for a share of the data in every strategy."""
    on_step: Callable[[int], None]
    """Told the number of steps taken; must cost nothing."""
    pace: Callable[[], AbstractContextManager[object]] = nullcontext
    """Around each step: where a slow rank loses its time."""
    learning_rates: list[float] = field(default_factory=list)
    """Of each step taken so far."""


class NothingLeft(Exception):  # noqa: N818  (not an error)
    """All shares are taken."""


def train(
    worker: Worker,
    batches: Iterator[Batch],
    recorder: Recorder,
    steps: Steps,
    *,
    end_step: int | None,
    step_shard_of: Callable[[int], StepShard],
    device: torch.device,
) -> None:
    """Take steps until `end_step`, or until no batch is left; measure those after the warm-up.

    `step_shard_of` tells what the batch of this rank's step of that index is of.
    """
    windowed = False
    while end_step is None or recorder.step < end_step:
        if not windowed and recorder.step >= steps.warmup_steps:
            recorder.start_window()  # waits for the device
            windowed = True
        try:
            loss, batch, step_shard = _step(
                worker, batches, recorder, steps, step_shard_of=step_shard_of, device=device
            )
        except NothingLeft:
            break
        recorder.end_step(loss, batch.sample_ids)
        steps.on_step(step_shard.step + 1)
    if windowed:
        recorder.stop_window()  # waits for the device


def _step(
    worker: Worker,
    batches: Iterator[Batch],
    recorder: Recorder,
    steps: Steps,
    *,
    step_shard_of: Callable[[int], StepShard],
    device: torch.device,
) -> tuple[Tensor, Batch, StepShard]:
    with recorder.span("step"), steps.pace():
        with recorder.span("data"):
            batch = next(batches, None)
            if batch is None:
                raise NothingLeft  # a span that is left so leaves no mark
            batch = batch.to(device)
        step_shard = step_shard_of(recorder.step)
        rate = steps.learning_rate(step_shard.step)
        if not steps.learning_rates or rate != steps.learning_rates[-1]:
            worker.set_learning_rate(rate)
        steps.learning_rates.append(rate)
        torch.manual_seed(steps.seed_of(step_shard))
        return worker.step(batch, recorder), batch, step_shard
