"""The observer records the steps of the script's optimizers, whatever they are made of."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

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
