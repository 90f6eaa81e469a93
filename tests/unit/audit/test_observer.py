"""The observer records the steps of the script's optimizers, whatever they are made of."""

from __future__ import annotations

import atexit
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from shardmark.audit.observer import Observer
from shardmark.audit.plan import Plan


@pytest.fixture
def observer(tmp_path: Path) -> Iterator[Observer]:
    observer = Observer(Plan(directory=str(tmp_path), steps=9))
    yield observer
    atexit.unregister(observer.write)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)


def test_an_optimizer_inside_of_another_one_takes_no_step_of_the_script(observer: Observer) -> None:
    outer, inner = optimizer(), optimizer()
    for _ in range(2):
        observer.before_step(outer)
        observer.before_step(inner)
        observer.after_step(inner)
        observer.after_step(outer)
    assert len(observer.record.steps) == 2
    assert observer.record.refusal == ""


def test_an_optimizer_may_have_no_learning_rate(observer: Observer) -> None:
    adafactor = optimizer()
    adafactor.param_groups[0]["lr"] = None
    observer.before_step(adafactor)
    observer.after_step(adafactor)
    assert observer.record.steps[0].rates == []


class Augmented(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])


def test_a_look_at_a_data_set_changes_no_random_numbers(observer: Observer) -> None:
    data = Augmented()
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data, num_replicas=2, rank=0)
    loader = DataLoader(data, batch_size=2, sampler=sampler)

    def first(iterate: Callable[[], Iterator[torch.Tensor]]) -> torch.Tensor:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        return next(iterate())

    seen = first(lambda: observer.batches(loader, 0, lambda: iter(loader)))
    assert torch.equal(seen, first(lambda: iter(loader)))
    assert observer.record.draws == []
