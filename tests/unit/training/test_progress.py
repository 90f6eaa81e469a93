"""How far a rank has come, through a file that may be missing or cut, and at what cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardmark.core.shares import Shard, StepShard
from shardmark.measure.step.progress import ProgressWriter, Reached, progress_file, reached
from shardmark.measure.step.recorder import Recorder
from shardmark.train.loop import LoopOptions, train
from shardmark.workloads.base import Batch
from tests.unit.training.toy import CPU, CountingClock, FakeWorker, ToyWorkload

HOST_COPIES = ("_local_scalar_dense", "_to_copy", "copy_", "is_nonzero", "equal", "nonzero")


def test_round_trip(tmp_path: Path) -> None:
    losses: list[Tensor] = []
    assert reached(tmp_path, 1) is None
    for _ in range(2):  # an earlier attempt's file is overwritten
        with ProgressWriter.opened(tmp_path, 1, total_steps=2**40, losses=losses) as progress:
            start = Reached(steps=0, total_steps=2**40, loss=None, loss_steps=None)
            assert reached(tmp_path, 1) == start
            progress.stepped(6)
            losses.append(torch.tensor(0.25))
            progress.stepped(7)
            told = Reached(steps=7, total_steps=2**40, loss=0.25, loss_steps=7)
            assert reached(tmp_path, 1) == told
            losses.append(torch.tensor(math.nan))
            progress.stepped(8)
        losses.clear()
    ended = reached(tmp_path, 1)
    assert ended is not None
    assert (ended.steps, ended.loss_steps) == (8, 8)
    assert ended.loss is not None
    assert math.isnan(ended.loss), "a loss that is no number is news"
    assert reached(tmp_path, 0) is None


@pytest.mark.parametrize("left", [12, 0])
def test_cut_file_tells_nothing(tmp_path: Path, left: int) -> None:
    with ProgressWriter.opened(tmp_path, 0, total_steps=5) as progress:
        progress.stepped(3)
    file = progress_file(tmp_path, 0)
    file.write_bytes(file.read_bytes()[:left])
    assert reached(tmp_path, 0) is None


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


class Losing(FakeWorker):
    """Its loss lies on `device`: the meta device has no values, so that reading one raises."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def step(self, batch: Any, recorder: Any) -> Tensor:
        return super().step(batch, recorder).to(self._device)


class Told:
    """A training of five steps, two of them warm-up, and what it tells."""

    def __init__(self, directory: Path, *, on_host: bool, device: str = "cpu") -> None:
        self.clock = CountingClock()
        self.recorder = Recorder(self.clock)
        self.directory = directory
        self.worker = Losing(device)
        self._on_host = on_host
        self.losses: list[float | None] = []

    def run(self, end_step: int = 5, *, watched: bool = True) -> Reached:
        with ProgressWriter.opened(
            self.directory, 0, 5, losses=self.recorder.losses, on_host=self._on_host
        ) as progress:
            if watched:
                self.recorder.observe(progress)

            def on_step(step: int) -> None:
                progress.stepped(step)
                shown = reached(self.directory, 0)
                assert shown is not None
                assert shown.steps == step
                self.losses.append(shown.loss)

            options = LoopOptions(
                device=CPU, seed=1, warmup_steps=2, learning_rate=lambda _: 0.1, on_step=on_step
            )
            train(self.worker, self._batches(end_step), self.recorder, options)
        shown = reached(self.directory, 0)
        assert shown is not None
        return shown

    @staticmethod
    def _batches(end_step: int) -> Iterator[tuple[StepShard, Batch]]:
        for step in range(end_step):
            step_shard = StepShard(step=step, shard=Shard(index=0, count=1))
            yield step_shard, ToyWorkload().batch(range(2))


def test_losses_in_host_memory_are_told_at_each_step(tmp_path: Path) -> None:
    told = Told(tmp_path, on_host=True)
    told.run()
    assert told.losses == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_losses_on_a_device_are_told_when_the_window_has_closed(tmp_path: Path) -> None:
    told = Told(tmp_path, on_host=False)
    shown = told.run()
    assert told.losses == [None] * 5
    assert (shown.loss, shown.loss_steps) == (5.0, 5)
    before_a_window = Told(tmp_path, on_host=False).run(end_step=1)
    assert (before_a_window.steps, before_a_window.loss) == (1, None)


def test_the_loop_copies_nothing_to_the_host_for_those_who_watch(tmp_path: Path) -> None:
    """With the loss on a device, its one reading comes after the wait that ends the window, and
    after the clock was read; within the window every operator is the training's own."""
    operators: dict[bool, list[str]] = {}
    for watched in (False, True):
        told = Told(tmp_path, on_host=False)
        with Operators(told.clock):
            told.run(watched=watched)
        operators[watched] = told.clock.calls
    alone, seen = operators[False], operators[True]
    assert seen[: len(alone)] == alone
    assert alone[-2:] == ["wait", "wall"], "the end of the window"
    assert seen[len(alone) :] == ["_local_scalar_dense"]
    assert not [name for name in alone if name in HOST_COPIES]


def test_the_watch_would_be_caught_reading(tmp_path: Path) -> None:
    """The test above can fail: a loss told at each step is a copy inside the window."""
    told = Told(tmp_path, on_host=True)
    with Operators(told.clock):
        told.run()
    assert told.clock.calls.count("_local_scalar_dense") == 5 + 1


def test_a_loss_without_a_value_does_not_disturb_the_steps(tmp_path: Path) -> None:
    """On the meta device nothing can be read; all steps are taken before anybody tries."""
    told = Told(tmp_path, on_host=False, device="meta")
    with pytest.raises(RuntimeError, match="meta"):
        told.run()
    assert told.recorder.step == 5
    assert torch.stack(told.recorder.losses).is_meta
    assert len(told.recorder.windows) == 1
