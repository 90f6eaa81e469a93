"""DeepSpeed's worker without DeepSpeed: a fake engine says what is asked of the real one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardmark.strategies
from shardmark.measure.step.recorder import NoSpans
from shardmark.strategies.step import build_optimizer
from tests.unit.training.toy import CPU, ToyWorkload, recipe

STUBS = ("deepspeed", "deepspeed.utils", "shardmark.strategies.deepspeed.preload")
"""Importing the real ones takes seconds, and minutes where an operator has to be compiled."""


@pytest.fixture(scope="module")
def zero() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name in STUBS:
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setattr(sys.modules["deepspeed"], "initialize", None, raising=False)
        utilities = sys.modules["deepspeed.utils"]
        for name in ("full_fp32_param", "full_grad", "full_optimizer_state"):
            patch.setattr(utilities, f"safe_get_{name}", lambda p, *_: p.full, raising=False)
        patch.delitem(sys.modules, "shardmark.strategies.deepspeed.worker", raising=False)
        patch.delattr(shardmark.strategies, "_zero", raising=False)
        from shardmark.strategies.deepspeed import worker as _zero

        yield _zero
        patch.delitem(sys.modules, "shardmark.strategies.deepspeed.worker")


class Engine:
    """DeepSpeed's engine as stage 0 without other ranks: it divides by the micro-batches."""

    def __init__(self, module: nn.Module, asked: Any, *, sharded: bool = False) -> None:
        self.module = module
        self.optimizer: Any = build_optimizer(module.parameters(), asked)
        self._count = asked.gradient_accumulation
        self._seen = 0
        self._sharded = sharded
        self.overflows = False

    def __call__(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.module(inputs)
        return out

    def backward(self, loss: Tensor) -> None:
        (loss / self._count).backward()

    def step(self) -> None:
        self._seen += 1
        if self._seen % self._count == 0:
            if not self.overflows:
                self.optimizer.step()
            self.optimizer.zero_grad()

    def bfloat16_enabled(self) -> bool:
        return False

    def fp16_enabled(self) -> bool:
        return False

    def zero_optimization(self) -> bool:
        return self._sharded


def worker_of(zero: Any, **changes: Any) -> tuple[Any, Engine, ToyWorkload]:
    workload, asked = ToyWorkload(), recipe(**changes)
    engine = Engine(workload.build_model(), asked)
    return zero.ZeroWorker(engine, workload, asked, CPU), engine, workload


def test_micro_batches_are_counted_and_averaged(zero: Any) -> None:
    worker, engine, workload = worker_of(zero, gradient_accumulation=4)
    loss = worker.step(workload.batch(range(8)), NoSpans())
    other, _, _ = worker_of(zero)
    expected = other.step(workload.batch(range(8)), NoSpans())
    torch.testing.assert_close(loss, expected)
    for name, tensor in worker.full_parameters().items():
        torch.testing.assert_close(tensor, other.full_parameters()[name])
    assert engine._seen == 4


def test_skipped_steps_are_those_without_an_update(zero: Any) -> None:
    worker, engine, workload = worker_of(zero)
    for overflows in (False, True, False):
        engine.overflows = overflows
        worker.step(workload.batch(range(8)), NoSpans())
    assert worker.skipped_steps() == 1


def test_sub_groups_of_stage_3_are_one_step(zero: Any) -> None:
    worker, engine, workload = worker_of(zero)
    step = engine.optimizer.step

    def twice() -> None:
        step()
        step()

    engine.optimizer.step = twice
    worker.step(workload.batch(range(8)), NoSpans())
    assert worker.skipped_steps() == 0


def test_base_optimizer_inside_deepspeed_s_is_found(zero: Any) -> None:
    workload, asked = ToyWorkload(), recipe()
    engine = Engine(workload.build_model(), asked)
    base = engine.optimizer
    engine.optimizer = SimpleNamespace(optimizer=base, param_groups=base.param_groups)
    worker = zero.ZeroWorker(engine, workload, asked, CPU)
    worker.set_learning_rate(0.5)
    assert base.param_groups[0]["lr"] == 0.5


def test_full_parameters_are_asked_of_deepspeed_where_it_shards(zero: Any) -> None:
    workload, asked = ToyWorkload(), recipe()
    engine = Engine(workload.build_model(), asked, sharded=True)
    for parameter in engine.module.parameters():
        parameter.full = torch.full((2,), 3.0)  # type: ignore[attr-defined]
    worker = zero.ZeroWorker(engine, workload, asked, CPU)
    assert all(tensor.tolist() == [3.0, 3.0] for tensor in worker.full_parameters().values())


def test_held_state_knows_where_deepspeed_keeps_things(zero: Any) -> None:
    worker, engine, _ = worker_of(zero)
    base = engine.optimizer
    master = nn.Parameter(torch.ones(5))
    master.grad = torch.ones(5)
    engine.optimizer = SimpleNamespace(
        optimizer=base,
        bit16_groups_flat=[torch.ones(7)],
        averaged_gradients={0: [torch.ones(3)]},
        ipg_buckets={torch.float32: SimpleNamespace(buffer=[torch.ones(2)])},
        single_partition_of_fp32_groups=[master],
    )
    state = worker.held_state()
    assert sum(tensor.numel() for tensor in state.parameters) == 58 + 7
    assert sum(tensor.numel() for tensor in state.gradients) == 5 + 3 + 2
    assert sum(tensor.numel() for tensor in state.optimizer_state) == 5


def test_tensors_in_nested_values(zero: Any) -> None:
    a, b, c, d = (torch.full((1,), float(i)) for i in range(4))
    bucket = SimpleNamespace(buffer=[c, None])
    value = {0: [a, (b, None)], "bucket": bucket, "text": "x", "deep": {"in": {"it": [d]}}}
    assert [float(tensor) for tensor in zero.tensors_in(value)] == [0.0, 1.0, 2.0, 3.0]
    assert list(zero.tensors_in(None)) == []


def test_held_takes_the_attributes_that_are_there(zero: Any) -> None:
    owner = SimpleNamespace(averaged_gradients={0: [torch.ones(3)]}, other=torch.ones(1))
    (found,) = zero.attributes(owner, zero.GRADIENTS)
    assert found.numel() == 3
