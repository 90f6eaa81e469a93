"""The hooks that find a script's steps, on small loops as scripts write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shardmark.ranks.measure.step.hooks import StepHooks, samples_in, tokens_in
from shardmark.ranks.measure.step.recorder import Recorder
from tests.unit.ranks.train.toy import CountingClock

X, Y = torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)
IDS = torch.ones(4, 6, dtype=torch.long)


class Observed:
    """A recorder whose steps a script's loop fills through the hooks."""

    def __init__(self) -> None:
        self.recorder = Recorder(CountingClock())
        self.hooks = StepHooks(self._begin, lambda: None)

    def _begin(self, device: torch.device) -> Recorder:
        assert device.type == "cpu"
        self.recorder.start_training()
        return self.recorder

    @property
    def samples(self) -> list[int]:
        return [len(ids) for ids in self.recorder.sample_ids]

    @property
    def losses(self) -> list[float | None]:
        return [step.loss for step in self.recorder.recorded_steps()]

    def spans(self, step: int) -> set[str]:
        return set(self.recorder.recorded_steps()[step].seconds)


@pytest.fixture
def observed() -> Iterator[Observed]:
    observed = Observed()
    with observed.hooks.installed():
        yield observed


def loader(samples: int = 24) -> DataLoader[tuple[Tensor, ...]]:
    data = TensorDataset(torch.randn(samples, 3), torch.zeros(samples, dtype=torch.long))
    return DataLoader(data, batch_size=4)


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), 0.25)


def test_a_plain_loop(observed: Observed) -> None:
    """Each step has its batch, its loss and its rate, and the parts that hooks can see."""
    model, optimizer = linear()
    losses = []
    for inputs, labels in loader():
        loss = nn.functional.cross_entropy(model(inputs), labels)
        losses.append(loss.item())
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        loss.detach().zero_()  # such as an all-reduce for the log
    assert observed.samples == [4] * 6
    assert observed.losses == pytest.approx(losses)
    assert observed.recorder.learning_rates == [0.25] * 6
    assert observed.spans(1) == {"step", "data", "backward", "optimizer"}
    assert observed.hooks.batches.source == "the batches of the script's DataLoader"
    assert observed.hooks.tokens == [0] * 6


def test_batches_of_an_evaluation_do_not_count(observed: Observed) -> None:
    model, optimizer = linear()
    for inputs, _ in loader(8):
        with torch.no_grad():
            for batch, _ in loader(100):
                model(batch)
        for micro_batch in inputs.split(2):
            backward(model(micro_batch).mean() / 2)
        optimizer.step()
    assert observed.samples == [4, 4]  # the step's own batch, once


def test_batches_of_a_step_that_are_loaded_before_it(observed: Observed) -> None:
    """Trainer loads all micro-batches first, and Accelerate one batch ahead of its use."""
    model, optimizer = linear()
    batches = iter(loader(24))
    for _ in range(2):
        for inputs, _ in [next(batches), next(batches)]:
            backward(model(inputs).sum())
        optimizer.step()
    ahead = next(batches)
    for following in (*batches, None):
        backward(model(ahead[0]).sum())
        optimizer.step()
        ahead = following
    assert observed.samples == [8, 8, 4, 4]


def test_a_backward_pass_inside_of_the_update(observed: Observed) -> None:
    """Lightning passes both passes to the optimizer as a closure."""
    model, optimizer = linear()
    for inputs, _ in loader():

        def closure(inputs: Tensor = inputs) -> float:
            loss = model(inputs).sum()
            backward(loss)
            return float(loss.item())

        optimizer.step(closure)
    assert observed.samples == [4] * 6
    assert observed.spans(0) == {"step", "backward", "optimizer"}
    for step in observed.recorder.recorded_steps():
        assert step.seconds["optimizer"] < step.seconds["backward"] + step.seconds["optimizer"]


def test_accumulated_losses_add_up_to_that_of_the_step(observed: Observed) -> None:
    weight = torch.ones((), requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.0)
    for _ in range(2):
        for factor in (1, 2, 3):
            backward(weight * factor)
        optimizer.step()
    assert observed.losses == [6, 6]


def test_a_step_is_an_update_of_the_first_optimizer(observed: Observed) -> None:
    """A second optimizer has its own backward pass, as in a GAN."""
    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], 0.0) for weight in weights]
    for _ in range(3):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            backward(weight.sum())
            optimizer.step()
    assert observed.recorder.step == 3


def test_an_update_in_parts_is_one_step(observed: Observed) -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.0)
    for _ in range(3):
        backward(weight.sum())
        optimizer.step()
        optimizer.step()
    assert observed.recorder.step == 3


class Outer(torch.optim.Optimizer):
    """An optimizer around another one, as ZeroRedundancyOptimizer is."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


def test_an_optimizer_inside_another_one_is_one_step(observed: Observed) -> None:
    model, inner = linear()
    optimizer = Outer(inner)
    for inputs, _ in loader():
        backward(model(inputs).sum())
        optimizer.step()
    assert observed.samples == [4] * 6


def test_losses_are_those_before_the_scaler(observed: Observed) -> None:
    weight = torch.ones((), requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], 0.0), torch.amp.GradScaler("cpu")
    backward(scaler.scale(weight * 3))
    scaler.step(optimizer)
    assert observed.losses == [3]


def test_a_loss_that_is_no_number_is_unknown(observed: Observed) -> None:
    model, optimizer = linear()
    model(X).backward(torch.ones(8, 2))
    optimizer.step()
    assert observed.losses == [None]


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Embedding(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.inside(ids).sum()
        return result


def test_without_a_loader_the_input_of_the_outermost_module_counts(observed: Observed) -> None:
    """It is found in the second step, which is warm-up."""
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        backward(model(IDS))
        optimizer.step()
        with torch.no_grad():
            model(IDS)
        model.eval()(IDS)
        model.train()
    assert observed.samples == [0, 0, 4, 4]
    assert observed.hooks.tokens == [0, 0, 24, 24]
    assert observed.hooks.batches.source == "the input of Language"


def test_nothing_stays_installed() -> None:
    before = torch.autograd.backward
    observed = Observed()
    with observed.hooks.installed():
        assert torch.autograd.backward is not before
    assert torch.autograd.backward is before
    model, optimizer = linear()
    backward(model(X).sum())
    optimizer.step()
    assert observed.recorder.step == 0


BATCHES: tuple[tuple[object, int | None, int | None], ...] = (
    (X, 8, None),
    ([X, Y], 8, None),
    (IDS, 4, 24),
    ([IDS, Y], 4, 24),
    ({"labels": Y, "pixels": X}, 8, None),
    ({"input_ids": IDS, "attention_mask": IDS.tril()}, 4, 10),
    ({"name": "x", "input_ids": IDS}, 4, 24),
    (((X, X, X), (Y, Y, Y)), 3, None),  # fields of three pictures
    ([(X, 1), (X, 2)], 2, None),  # two samples
    ([{"picture": X}, {"picture": X}], 2, None),
    (["a", "b", "c"], 3, None),
    (torch.zeros(()), None, None),
    ({"name": "x"}, None, None),
    ([], None, None),
    ("text", None, None),
)


@pytest.mark.parametrize(("batch", "samples", "tokens"), BATCHES)
def test_sizes_of_batches(batch: object, samples: int | None, tokens: int | None) -> None:
    counts: tuple[Callable[[object], int | None], ...] = (samples_in, tokens_in)
    assert [count(batch) for count in counts] == [samples, tokens]
