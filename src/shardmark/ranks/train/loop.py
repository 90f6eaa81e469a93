"""The training loop.  It reads no clock and no loss, and writes and prints nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from shardmark.base.layout import StepShard
from shardmark.ranks.measure.step.recorder import Recorder
from shardmark.ranks.strategies.base import Worker
from shardmark.ranks.train.schedule import seed_step
from shardmark.ranks.workloads.base import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """Parameters of the loop that come from the trial."""

    devices: Sequence[torch.device]
    """Devices of this process; the one that it computes on comes first."""
    seed: int
    learning_rate: Callable[[int], float]
    on_step: Callable[[int], None]
    """Called after every step with the number of steps so far.  Must not synchronise the device."""
    slow_rank: SlowRank | None = None


def train(
    worker: Worker,
    batches: Iterator[tuple[StepShard, Batch]],
    recorder: Recorder,
    options: LoopOptions,
    *,
    measured: bool,
) -> float:
    """Take a step for each batch, in one window if they are measured; return their seconds."""
    recorder.start_window(measured=measured)  # waits for the device
    while True:
        recorder.start_step()
        if options.slow_rank is not None:
            options.slow_rank.step_started()
        with recorder.span("data"):
            following = next(batches, None)
        if following is None:
            break
        step_shard, batch = following
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
    """Lengthens each step to `factor` times the rank's computing time.

    On a CPU, computing time is the time for which the training thread is busy.  Waiting for other
    ranks does not count, because a slow rank would then slow itself down further.  On CUDA it is
    the device's time between the two ends of the step, waiting included.
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
