"""The steps before the last window of an epoch are skipped, and the script sees no difference."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shardmark.scripts.epoch import EpochSkip
from shardmark.scripts.observer import Observer
from shardmark.scripts.recording import Plan

ACCUMULATION = 4


class Model(nn.Linear):
    """A model that counts how often it computes."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x).mul_(1.0)


@pytest.fixture
def observer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Observer]:
    observer = Observer(Plan(directory=str(tmp_path), steps=9, until_epoch=True))
    monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__)
    for name in ("step", "unscale_", "update"):
        monkeypatch.setattr(torch.amp.GradScaler, name, getattr(torch.amp.GradScaler, name))
    EpochSkip(observer).install()
    yield observer
    atexit.unregister(observer.write)


def batches(observer: Observer, loader: DataLoader[tuple[Tensor, ...]]) -> Iterator[Tensor]:
    return (x for (x,) in observer.batches(loader, 0, lambda: DataLoader.__iter__(loader)))


def train(
    observer: Observer, count: int, *, ahead: bool = False, scaler: bool = False
) -> tuple[Model, list[tuple[int, float]]]:
    """Train an epoch; return the position and the first value of each batch."""
    loader = DataLoader(TensorDataset(torch.arange(1.0, 1 + count)[:, None]))
    model = Model(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = torch.amp.GradScaler("cpu", enabled=scaler)
    seen = []
    epoch = batches(observer, loader)
    following = next(epoch) if ahead else None
    for index in range(count):
        x = following if following is not None else next(epoch)
        following = next(epoch, None) if ahead else None
        seen.append((index, float(x[0, 0])))
        loss = model(x).sum() + 9 * (model.bias - 1).square().sum()
        scale.scale(loss).backward()
        observer.after_backward()
        if (index + 1) % ACCUMULATION == 0 or index + 1 == count:
            observer.before_step(optimizer)
            scale.unscale_(optimizer)
            scale.step(optimizer)
            scale.update()
            observer.after_step(optimizer)
            optimizer.zero_grad()
    assert next(epoch, None) is None
    return model, seen


@pytest.mark.parametrize("scaler", [False, True])
def test_only_the_last_window_of_an_epoch_is_computed(observer: Observer, scaler: bool) -> None:
    model, seen = train(observer, 10, scaler=scaler)
    assert [index for index, _ in seen] == [*range(10)]
    assert [value for _, value in seen] == [*[1.0] * 8, 9.0, 10.0]
    assert model.calls == 1 + 2  # once for the first batch
    assert (observer.record.skipped, observer.record.window) == (2, ACCUMULATION)
    assert not observer.skips
    assert observer.record.refusal == ""


def test_a_skipped_step_changes_no_weight(observer: Observer) -> None:
    observer.skipped_by_ranks = 99
    torch.manual_seed(0)
    model, _ = train(observer, 10)
    assert observer.skips
    torch.manual_seed(0)
    assert model.state_dict() == Model(1, 1).state_dict()
    assert model.calls == 1
    assert "before the last window" in observer.record.refusal


def test_a_loader_may_load_a_batch_ahead(observer: Observer) -> None:
    _, seen = train(observer, 10, ahead=True)
    assert [value for _, value in seen] == [*[1.0] * 9, 10.0]
    assert observer.record.skipped == 2


def test_a_replay_skips_as_many_windows_as_the_ranks(observer: Observer) -> None:
    observer.skipped_by_ranks = 1
    _, seen = train(observer, 10)
    assert [value for _, value in seen] == [*[1.0] * 4, *map(float, range(5, 11))]


def test_a_stream_without_a_length_is_refused(
    observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream(torch.utils.data.IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(torch.ones(8, 1))

    def end() -> None:
        raise SystemExit

    monkeypatch.setattr(observer, "finish", end)
    loader = DataLoader(Stream())
    epoch = observer.batches(loader, 0, lambda: DataLoader.__iter__(loader))
    next(epoch)
    observer.after_step(None)
    with pytest.raises(SystemExit):
        next(epoch)
    assert "a loader with a length" in observer.record.refusal


def test_outputs_of_a_skipped_model_depend_on_its_inputs(observer: Observer) -> None:
    """A script may ask for the gradient of an input, as a gradient penalty does."""
    loader = DataLoader(TensorDataset(torch.ones(4, 1)))
    next(batches(observer, loader))
    model, x = Model(1, 1), torch.ones(1, 1, requires_grad=True)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(model(x).sum(), x)
        assert gradient.tolist() == [[0.0]]
    assert model.calls == 1
