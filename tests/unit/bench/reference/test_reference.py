"""The reference in one process equals plain torch, and gradients averaged by hand."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from shardmark.base.errors import InputError
from shardmark.base.layout import Shard, StepShard
from shardmark.base.numerics import Casts, Numerics
from shardmark.bench.reference.reference import Hypothesis, Reference
from shardmark.ranks.train.schedule import step_seed
from shardmark.ranks.workloads.base import BatchPlan
from tests.unit.ranks.train.toy import ToyWorkload, normed, plain, recipe

PLAN = BatchPlan(global_batch=8, seed=5)
STEPS = 3
HALVED = {"name": "step", "every_steps": 1, "gamma": 0.5}
"""The learning rate after every step."""


def reference(workload: ToyWorkload, shares: int, **changes: Any) -> Reference:
    asked = recipe(steps=STEPS, schedule=HALVED, **changes)
    return Reference(workload, asked, shares=shares, plan=PLAN, total_steps=STEPS)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def by_hand(workload: ToyWorkload, ranks: int) -> tuple[list[nn.Module], list[list[float]]]:
    """Replicas with buffers of their own whose gradients are averaged."""
    models = [workload.build_model() for _ in range(ranks)]
    optimizers = [sgd(model) for model in models]
    batches = [workload.batches(PLAN, Shard(index=r, count=ranks)) for r in range(ranks)]
    losses = []
    for step in range(STEPS):
        taken = []
        for rank, model in enumerate(models):
            shard = Shard(index=rank, count=ranks)
            torch.manual_seed(step_seed(5, StepShard(step=step, shard=shard)))
            model.zero_grad()
            loss = workload.mean_loss(model, next(batches[rank]))
            loss.backward()  # type: ignore[no-untyped-call]
            taken.append(float(loss.detach()))
        for same in zip(*(model.parameters() for model in models), strict=True):
            grads = [parameter.grad for parameter in same if parameter.grad is not None]
            mean = torch.stack(grads).mean(0)
            for parameter in same:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.1 * 0.5**step
            optimizer.step()
        losses.append(taken)
    return models, losses


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_are_averaged_and_keep_their_buffers(ranks: int) -> None:
    workload = ToyWorkload(normed)
    models, losses = by_hand(workload, ranks)
    played = reference(workload, ranks)
    for expected in losses:
        assert [float(loss) for loss in played.step()] == pytest.approx(expected, rel=1e-5)
    assert played.steps_taken == STEPS
    for name, parameter in models[0].named_parameters():
        torch.testing.assert_close(played.full_parameters()[name], parameter.detach())
    for rank, model in enumerate(models):
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(played.buffers(rank)[name], buffer)
    means = {tuple(played.buffers(rank)["1.running_mean"].tolist()) for rank in range(ranks)}
    assert len(means) == ranks, "each has statistics of its own"


def test_without_norms_ranks_and_micro_batches_make_one_large_batch() -> None:
    expected = reference(ToyWorkload(plain), shares=1, gradient_clipping=0.05)
    found = reference(ToyWorkload(plain), shares=2, gradient_clipping=0.05, gradient_accumulation=2)
    for _ in range(STEPS):
        expected.step()
        found.step()
    for name, parameter in expected.full_parameters().items():
        torch.testing.assert_close(found.full_parameters()[name], parameter)


@pytest.mark.parametrize("kept", ["fp32", "bf16"])
def test_passes_on_bf16_copies_update_fp32_parameters(kept: Literal["fp32", "bf16"]) -> None:
    """The expected side is plain torch: a model in bf16 for each micro-batch, an fp32 optimizer."""
    workload, dtype = ToyWorkload(plain), {"fp32": torch.float32, "bf16": torch.bfloat16}[kept]
    casts = Casts(precision="bf16", units="root", gradients=kept)
    played = Reference(
        workload,
        recipe(steps=STEPS, precision="bf16", gradient_accumulation=2),
        shares=1,
        plan=PLAN,
        total_steps=STEPS,
        numerics=Numerics(casts=casts),
    )
    model = workload.build_model()
    optimizer = sgd(model)
    for batch in islice(workload.batches(PLAN, Shard(index=0, count=1)), STEPS):
        added = [torch.zeros_like(parameter, dtype=dtype) for parameter in model.parameters()]
        for micro_batch in batch.split(2):
            copied = copy.deepcopy(model).bfloat16()
            inputs = replace(micro_batch, inputs=micro_batch.inputs.bfloat16())
            loss = workload.loss(copied, inputs).total / batch.step_weight
            loss.backward()  # type: ignore[no-untyped-call]
            for total, parameter in zip(added, copied.parameters(), strict=True):
                assert parameter.grad is not None
                total.add_(parameter.grad.to(dtype))
        for total, parameter in zip(added, model.parameters(), strict=True):
            parameter.grad = total.float()
        optimizer.step()
        played.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(played.full_parameters()[name], parameter.detach())


def norm_only() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.parametrize("shares", [2, 4])
def test_with_synchronised_norms_ranks_make_one_large_batch(shares: int) -> None:
    """The batch norm of one device is the definition: no rank exchanges statistics there."""
    workload = ToyWorkload(norm_only, uneven=True)
    expected = reference(workload, shares=1)
    found = reference(workload, shares=shares, sync_batch_norm=True)
    for _ in range(STEPS):
        losses = torch.stack(found.step())
        torch.testing.assert_close(losses.mean(), expected.step()[0])
    for name, parameter in expected.full_parameters().items():
        torch.testing.assert_close(found.full_parameters()[name], parameter)
    for rank in range(shares):
        for name, buffer in expected.buffers().items():
            torch.testing.assert_close(found.buffers(rank)[name], buffer)


class Beside(nn.Module):
    """A norm that changes nothing, so that what is drawn before and after it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, affine=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.norm(inputs)
        return inputs


def dropped(between: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.Dropout(0.5), between, nn.Dropout(0.5), nn.Linear(8, 2)
    )


def test_ranks_that_take_turns_draw_as_each_alone_does() -> None:
    alone = reference(ToyWorkload(lambda: dropped(nn.Identity())), 4)
    normed = ToyWorkload(lambda: dropped(Beside()))
    waiting = reference(normed, 4, sync_batch_norm=True)
    for _ in range(STEPS):
        found, expected = (torch.stack(played.step()) for played in (waiting, alone))
        torch.testing.assert_close(found, expected)
    counts = [int(waiting.buffers(rank)["2.norm.num_batches_tracked"]) for rank in range(4)]
    assert counts == [STEPS] * 4


class Unsteady(nn.Module):
    """Another number of norms for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.norm(inputs) if inputs.sum() > 0 else inputs)
        return outputs


def test_different_numbers_of_norm_calls_are_refused() -> None:
    workload = ToyWorkload(Unsteady)
    workload.inputs = workload.inputs.abs()
    workload.inputs[4:8] *= -1
    with pytest.raises(InputError, match="different numbers of times"):
        reference(workload, 2, sync_batch_norm=True).step()


def test_silently_dropped_update_is_compared_in_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A strategy that drops its first update does not tell: its gradient is the first step's."""
    monkeypatch.setattr(Reference, "quality", lambda _: {})
    workload = ToyWorkload(plain)
    dropped = Reference(
        workload,
        recipe(steps=STEPS),
        shares=2,
        plan=PLAN,
        total_steps=STEPS,
        hypothesis=Hypothesis(text="", skipped=frozenset({0})),
    )
    gradients = [
        each.capture(STEPS).tensors["gradient"] for each in (dropped, reference(workload, 2))
    ]
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert (gradient == gradients[1][name]).all()


class Follower(nn.Module):
    """A norm, and a teacher that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.teacher = nn.Linear(4, 2).requires_grad_(False)
        self.register_buffer("sums", torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.norm(inputs))
        return outputs


class Following(ToyWorkload):
    has_after_step = True
    of_rank = False
    """True if the teacher takes what the ranks have of their own."""

    def after_step(self, model: Any, step: int) -> None:
        model.sums += step * model.norm.running_mean
        model.teacher.weight.lerp_(model.last.weight, 0.25)
        if self.of_rank:
            model.teacher.weight.add_(model.norm.running_mean)


def test_after_a_step_each_rank_changes_its_buffers_and_all_the_same_weights() -> None:
    made = reference(Following(Follower), 2)
    model: Any = made.model
    teacher = model.teacher.weight.clone()
    sums = [torch.zeros(4), torch.zeros(4)]
    for step in (1, 2, 3):
        made.step()
        teacher.lerp_(model.last.weight.detach(), 0.25)
        for rank in (0, 1):
            sums[rank] += step * made.buffers(rank)["norm.running_mean"]
    torch.testing.assert_close(model.teacher.weight, teacher)
    assert not torch.equal(*sums)
    for rank in (0, 1):
        torch.testing.assert_close(made.buffers(rank)["sums"], sums[rank])
    workload = Following(Follower)
    workload.of_rank = True
    with pytest.raises(InputError, match=r"makes teacher\.weight different on ranks 0 and 1"):
        reference(workload, 2).step()
