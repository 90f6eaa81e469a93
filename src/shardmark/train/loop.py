"""The training loop: plain and whole.  Reads no clock and no loss, writes and prints nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from shardmark.core.shares import StepShard
from shardmark.measure.step.recorder import Recorder
from shardmark.strategies.base import Worker
from shardmark.train.schedule import seed_step
from shardmark.workloads.base import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """What the loop needs to know of the trial."""

    devices: Sequence[torch.device]
    """Of this process, its own first."""
    seed: int
    learning_rate: Callable[[int], float]
    on_step: Callable[[int], None]
    """Told the number of steps taken; must cost nothing."""
    slow_rank: SlowRank | None = None


def train(
    worker: Worker,
    batches: Iterator[tuple[StepShard, Batch]],
    recorder: Recorder,
    options: LoopOptions,
    *,
    measured: bool,
) -> float:
    """Take a step for each batch, in one window where they are measured; their seconds."""
    recorder.start_window(measured=measured)  # waits for the device
    while True:
        recorder.start_step()
        if options.slow_rank is not None:
            options.slow_rank.step_started()
        with recorder.span("data"):
            taken = next(batches, None)
        if taken is None:
            break
        step_shard, batch = taken
        rate = options.learning_rate(step_shard.step)
        if not recorder.learning_rates or rate != recorder.learning_rates[-1]:
            worker.set_learning_rate(rate)
        seed_step(options.seed, step_shard, options.devices)
        loss = worker.step(batch, recorder)
        if options.slow_rank is not None:
            options.slow_rank.step_done()
        recorder.end_step(loss, batch.sample_ids, rate)
        options.on_step(step_shard.step + 1)
    return recorder.stop_window()  # waits for the device


class SlowRank:
    """Makes each step last `factor` times what the rank computes in it.

    Computing is what the thread that trains is busy with: waiting for others does not count, else
    a slow rank would slow itself down further.  On CUDA the thread only starts kernels, so there
    it is the device's time between the ends of the step, waiting included.
    """

    def __init__(
        self,
        factor: float,
        *,
        busy_seconds: Callable[[], float] | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._factor = factor
        self._busy_seconds = busy_seconds or _busy_seconds()
        self._sleep = sleep
        self._started = 0.0

    def step_started(self) -> None:
        self._started = self._busy_seconds()

    def step_done(self) -> None:
        self._sleep((self._factor - 1) * (self._busy_seconds() - self._started))


def _busy_seconds() -> Callable[[], float]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return time.thread_time

    def after_the_device() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return after_the_device
