"""The step that single, dp, ddp and fsdp share, on a model of 58 parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmark.core.recipe import Recipe
from shardmark.measure.step.recorder import NoSpans
from shardmark.strategies import build_strategy
from shardmark.strategies.base import RankContext
from shardmark.strategies.step import EagerWorker, build_optimizer, state_tensors, whole
from tests.unit.training.toy import CPU, ToyWorkload, recipe

PROCESS = RankContext(rank=0, world_size=1, local_rank=0, local_world_size=1, device=CPU)


class SpanNames:
    def __init__(self) -> None:
        self.names: list[str] = []

    def span(self, name: str) -> AbstractContextManager[None]:
        self.names.append(name)
        return nullcontext()


def worker_on(workload: ToyWorkload, asked: Recipe, **changes: Any) -> EagerWorker:
    model = workload.build_model()
    return EagerWorker(model, workload=workload, recipe=asked, device=CPU, **changes)


def trained(asked: Recipe, steps: int = 2) -> dict[str, Tensor]:
    workload = ToyWorkload()
    worker = worker_on(workload, asked)
    for step in range(steps):
        worker.step(workload.batch(range(8 * step, 8 * step + 8)), NoSpans())
    return worker.full_parameters()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)


def test_accumulation_is_one_large_batch() -> None:
    assert_same(trained(recipe(gradient_accumulation=4)), trained(recipe()))


def test_loss_is_the_mean_of_its_micro_batches() -> None:
    workload = ToyWorkload()
    batch = workload.batch(range(8))
    expected = workload.loss(workload.build_model(), batch)
    worker = worker_on(workload, recipe(gradient_accumulation=2))
    loss = worker.step(batch, NoSpans())
    assert loss.shape == ()
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected.detach())


def test_clipping_is_torch_s() -> None:
    asked = recipe(gradient_clipping=0.05)
    workload = ToyWorkload()
    model = workload.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in range(2):
        optimizer.zero_grad()
        batch = workload.batch(range(8 * step, 8 * step + 8))
        workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.05, "else nothing is clipped"
        optimizer.step()
    assert_same(trained(asked), dict(model.state_dict()))


def test_only_the_last_micro_batch_reduces() -> None:
    workload = ToyWorkload()
    last: list[bool] = []

    worker = worker_on(workload, recipe(gradient_accumulation=4), synchronise=last.append)
    spans = SpanNames()
    worker.step(workload.batch(range(8)), spans)
    assert last == [False, False, False, True]
    assert spans.names == ["forward", "backward"] * 4 + ["optimizer"]


def test_learning_rate_holds_from_the_next_step_on() -> None:
    workload = ToyWorkload()
    worker = worker_on(workload, recipe())
    before = worker.full_parameters()
    worker.set_learning_rate(0.0)
    worker.step(workload.batch(range(8)), NoSpans())
    assert_same(worker.full_parameters(), before)
    worker.set_learning_rate(0.1)
    worker.step(workload.batch(range(8)), NoSpans())
    assert not torch.equal(worker.full_parameters()["0.weight"], before["0.weight"])


def test_scaled_infinite_gradients_are_skipped_and_counted() -> None:
    """The loss of the second of three steps is infinite; `GradScaler` leaves that step out."""
    workload = ToyWorkload(weight_of_step=lambda step: float("inf") if step == 1 else 1.0)
    worker = worker_on(workload, recipe(precision="fp16"))
    kept = []
    for step in range(3):
        worker.step(workload.batch(range(8 * step, 8 * step + 8)), NoSpans())
        kept.append(worker.full_parameters())
    assert worker.skipped_steps() == 1
    assert_same(kept[1], kept[0])
    assert not torch.equal(kept[2]["0.weight"], kept[1]["0.weight"])


def test_nothing_is_skipped_without_loss_scaling() -> None:
    workload = ToyWorkload(weight_of_step=lambda _: float("inf"))
    worker = worker_on(workload, recipe())
    worker.step(workload.batch(range(8)), NoSpans())
    assert worker.skipped_steps() == 0


def test_scaling_does_not_change_the_step() -> None:
    """fp16's loss scale without its rounding: autocast off."""
    workload = ToyWorkload()
    worker = worker_on(workload, recipe(precision="fp16", gradient_clipping=0.05), autocasts=False)
    worker.step(workload.batch(range(8)), NoSpans())
    assert_same(worker.full_parameters(), trained(recipe(gradient_clipping=0.05), steps=1))


def test_bf16_computes_in_bf16_and_keeps_fp32_parameters() -> None:
    found, exact = trained(recipe(precision="bf16")), trained(recipe())
    assert all(tensor.dtype is torch.float32 for tensor in found.values())
    assert not torch.equal(found["0.weight"], exact["0.weight"])
    torch.testing.assert_close(found["0.weight"], exact["0.weight"], rtol=0.05, atol=0.01)


class LookAtGradients:
    def __init__(self, worker: EagerWorker) -> None:
        self.worker = worker
        self.gradients = 0

    def span(self, name: str) -> AbstractContextManager[None]:
        if name == "optimizer":
            self.gradients = len(self.worker.held_state().gradients)
        return nullcontext()


def test_held_state() -> None:
    workload = ToyWorkload()
    worker = worker_on(workload, recipe(), untracked_bytes=lambda: 12)
    fresh = worker.held_state()
    assert (fresh.gradients, fresh.optimizer_state) == ((), ())
    assert fresh.untracked_bytes == 12
    spans = LookAtGradients(worker)
    worker.step(workload.batch(range(8)), spans)
    assert spans.gradients >= 4
    after = worker.held_state()
    assert {tensor.data_ptr() for tensor in after.parameters} == {
        tensor.data_ptr() for tensor in fresh.parameters
    }
    assert after.gradients == (), "dropped after the step"
    assert sum(tensor.numel() for tensor in after.optimizer_state) == 58  # momentum


def test_parameters_and_buffers_are_copies() -> None:
    workload = ToyWorkload(model=lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
    worker = worker_on(workload, recipe())
    worker.full_parameters()["1.weight"].zero_()
    worker.buffers()["0.running_mean"].fill_(9)
    assert worker.full_parameters()["1.weight"].any()
    assert set(worker.buffers()) == {
        "0.running_mean",
        "0.running_var",
        "0.num_batches_tracked",
    }
    assert not worker.buffers()["0.running_mean"].any()


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ({"name": "sgd", "lr": 0.2, "momentum": 0.5, "nesterov": True}, torch.optim.SGD),
        ({"name": "sgd", "lr": 0.2, "momentum": 0.5, "dampening": 0.25}, torch.optim.SGD),
        ({"name": "adam", "betas": (0.8, 0.9), "eps": 1e-6}, torch.optim.Adam),
        ({"name": "adamw", "weight_decay": 0.25}, torch.optim.AdamW),
    ],
)
def test_optimizer_is_the_recipe_s(spec: dict[str, Any], kind: type) -> None:
    built = build_optimizer([nn.Parameter(torch.ones(2))], recipe(optimizer=spec))
    assert type(built) is kind
    assert len(built.param_groups) == 1
    for key, value in recipe(optimizer=spec).optimizer.model_dump().items():
        if key != "name":
            assert built.param_groups[0][key] == value, key


def test_state_tensors_are_all_of_them() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    assert list(state_tensors(optimizer)) == []
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert sorted(tensor.numel() for tensor in state_tensors(optimizer)) == [1, 2, 2]


def test_whole_of_a_plain_tensor_is_its_copy() -> None:
    tensor = nn.Parameter(torch.ones(2))
    copied = whole(tensor)
    assert torch.equal(copied, tensor)
    assert copied.data_ptr() != tensor.data_ptr()
    assert not copied.requires_grad


def test_single_starts_with_the_workload_s_weights() -> None:
    workload = ToyWorkload()
    asked = recipe(activation_checkpointing=True)
    worker = build_strategy("single", {}).start(workload, asked, PROCESS)
    assert isinstance(worker, EagerWorker)
    assert_same(worker.full_parameters(), dict(workload.build_model().state_dict()))
    worker.step(workload.batch(range(8)), NoSpans())
    assert_same(worker.full_parameters(), trained(recipe(), steps=1))
