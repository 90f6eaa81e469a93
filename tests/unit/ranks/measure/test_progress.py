"""A rank's progress is read from a file that may be missing or cut; writing it is cheap."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardmark.base.layout import Shard, StepShard
from shardmark.ranks.measure.step.progress import (
    ProgressWriter,
    RankProgress,
    progress_file,
    read_progress,
)
from shardmark.ranks.measure.step.recorder import Recorder
from shardmark.ranks.train.loop import LoopOptions, train
from tests import present
from tests.unit.ranks.train.toy import CPU, CountingClock, FakeWorker, ToyWorkload

HOST_COPIES = ("_local_scalar_dense", "_to_copy", "copy_", "is_nonzero", "equal", "nonzero")


def test_progress_is_written_and_read(tmp_path: Path) -> None:
    losses: list[Tensor] = []
    assert read_progress(tmp_path, 1) is None
    for _ in range(2):  # an earlier attempt's file is overwritten
        with ProgressWriter.opened(tmp_path, 1, total_steps=2**40, losses=losses) as progress:
            start = RankProgress(steps=0, total_steps=2**40, loss=None, loss_steps=None)
            assert read_progress(tmp_path, 1) == start
            losses.append(torch.tensor(0.25))
            progress.stepped(7)
            told = RankProgress(steps=7, total_steps=2**40, loss=0.25, loss_steps=7)
            assert read_progress(tmp_path, 1) == told
            losses.append(torch.tensor(math.nan))
            progress.lengthen(2**41)
            progress.stepped(8)
        losses.clear()
    ended = present(read_progress(tmp_path, 1))
    assert (ended.steps, ended.loss_steps, ended.total_steps) == (8, 8, 2**41)
    assert math.isnan(ended.loss or 0), "a loss that is no number is news"
    file = progress_file(tmp_path, 1)
    for left in (12, 0):
        file.write_bytes(file.read_bytes()[:left])
        assert read_progress(tmp_path, 1) is None, "a cut file tells nothing"


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Notes every operator between the clock's notes; copies to the host and waits are some."""

    def __init__(self, clock: CountingClock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clock = clock

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self._clock.calls.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Told:
    """A training of five steps, two of them warm-up, and what it tells after each."""

    def __init__(self, directory: Path, *, on_host: bool, watched: bool = True) -> None:
        self.clock = CountingClock()
        self.recorder = Recorder(self.clock)
        self.losses: list[float | None] = []
        self._directory = directory
        self._on_host, self._watched = on_host, watched

    def run(self) -> RankProgress | None:
        steps = (StepShard(step=step, shard=Shard(index=0, count=1)) for step in range(5))
        batches = ((step_shard, ToyWorkload().batch(range(2))) for step_shard in steps)
        with ProgressWriter.opened(
            self._directory, 0, 5, losses=self.recorder.losses, on_host=self._on_host
        ) as progress:
            if self._watched:
                self.recorder.observe(progress)

            def on_step(step: int) -> None:
                progress.stepped(step)
                shown = present(read_progress(self._directory, 0))
                assert shown.steps == step
                self.losses.append(shown.loss)

            options = LoopOptions(
                devices=(CPU,), seed=1, learning_rate=lambda _: 0.1, on_step=on_step
            )
            for count, measured in ((2, False), (3, True)):
                some = islice(batches, count)
                train(FakeWorker(), some, self.recorder, options, measured=measured)
        return read_progress(self._directory, 0)


def test_losses_on_a_device_are_written_after_the_window(tmp_path: Path) -> None:
    on_host, on_device = (Told(tmp_path, on_host=on_host) for on_host in (True, False))
    for told, losses in ((on_host, [1.0, 2.0, 1.0, 2.0, 3.0]), (on_device, [None] * 5)):
        assert told.run() == RankProgress(steps=5, total_steps=5, loss=3.0, loss_steps=5)
        assert told.losses == losses


def test_progress_copies_no_loss_to_the_host_during_a_window(tmp_path: Path) -> None:
    """The single reading of a loss on a device comes after the window."""

    def calls(*, on_host: bool = False, watched: bool = True) -> list[str]:
        told = Told(tmp_path, on_host=on_host, watched=watched)
        with Operators(told.clock):
            told.run()
        return told.clock.calls

    alone, seen = calls(watched=False), calls()
    assert seen == [*alone, "_local_scalar_dense"]
    assert alone[-2:] == ["wait", "wall"], "the end of the window"
    assert not [name for name in alone if name in HOST_COPIES]
    # It can fail: a loss told at each step is a copy inside the window.
    assert calls(on_host=True).count("_local_scalar_dense") == 5 + 1
