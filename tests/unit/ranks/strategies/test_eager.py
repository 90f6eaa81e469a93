"""The step that single, dp, ddp and fsdp share, on a model of 58 parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmark.base.errors import DataError, InputError
from shardmark.ranks.measure.step.recorder import NoSpans
from shardmark.ranks.strategies import build_strategy
from shardmark.ranks.strategies.base import Server
from shardmark.ranks.strategies.step import (
    EagerWorker,
    build_optimizer,
    loss_scaler,
    set_learning_rates,
    state_keys,
)
from shardmark.ranks.workloads.base import ParameterGroup
from tests.unit.ranks.train.toy import ALONE, CPU, ToyWorkload, assert_same, recipe, trained

LIMIT = 0.05
CLIPPED = {"gradient_clipping": LIMIT}


def worker_on(workload: ToyWorkload, asked: Any = None, **changes: Any) -> EagerWorker:
    model, asked = workload.build_model(), asked or recipe()
    return EagerWorker(model, workload=workload, recipe=asked, device=CPU, shares=1, **changes)


def by_torch(clipping: float | None = None, steps: int = 2) -> dict[str, Tensor]:
    """torch's own loop."""
    workload = ToyWorkload()
    model = workload.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        batch = workload.batch(range(8 * step, 8 * step + 8))
        workload.mean_loss(model, batch).backward()  # type: ignore[no-untyped-call]
        if clipping is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clipping)
            assert norm > clipping, "else nothing is clipped"
        optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    ("asked", "how", "clipping"),
    [
        ({}, {}, None),
        ({"gradient_accumulation": 4}, {}, None),
        (CLIPPED, {}, LIMIT),
        # The loss scale without fp16's rounding.
        ({"precision": "fp16", **CLIPPED}, {"casts_of": "fsdp"}, LIMIT),
    ],
)
def test_step_equals_that_of_torch(
    asked: dict[str, Any], how: dict[str, Any], clipping: float | None
) -> None:
    assert_same(trained(worker_on(ToyWorkload(), recipe(**asked), **how)), by_torch(clipping))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("asked", [{}, {"gradient_accumulation": 4, **CLIPPED}])
def test_weights_returned_by_the_loss_divide_the_step(asked: dict[str, Any], alone: bool) -> None:
    """The first of four micro-batches weighs 3 where all of them together weigh 21."""
    known, unknown = (ToyWorkload(uneven=True, weights_known=known) for known in (True, False))
    worker, expected = (worker_on(task, recipe(**asked)) for task in (unknown, known))
    worker.accumulates_alone = alone
    batch = unknown.batch(range(8))
    loss = worker.step(batch, NoSpans())
    torch.testing.assert_close(loss, expected.step(known.batch(range(8)), NoSpans()))
    assert_same(worker.full_parameters(), expected.full_parameters())
    assert worker.share_weight(batch) == sum(known.weights[:8]) == 21
    assert worker.settings() == {"weights": "the ranks add up the weights that losses return"}
    assert expected.settings() == {}


def test_a_weight_that_is_the_number_of_samples_communicates_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decided in the first step; another weight later on is refused."""
    task = ToyWorkload(weights_known=False)
    right, weights = task.loss, iter((8, 8, 7))
    monkeypatch.setattr(task, "loss", lambda *given: replace(right(*given), weight=next(weights)))
    worker = worker_on(task)
    assert_same(trained(worker, task), by_torch())
    assert worker.settings() == {}
    with pytest.raises(InputError, match=r"returned the weight 7 for samples that weigh 8.*tensor"):
        worker.step(task.batch(range(8)), NoSpans())


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_that_weighs_nothing_is_refused(parts: int) -> None:
    task = ToyWorkload(weights_known=False)
    task.weights = [0.0] * 4 + [1.0] * 20
    worker = worker_on(task, recipe(gradient_accumulation=parts))
    worker.step(task.batch(range(8)), NoSpans())  # the first half has weight 0
    assert all(p.isfinite().all() for p in worker.full_parameters().values())
    with pytest.raises(DataError, match=r"samples of a step weigh 0 together.*leave out"):
        worker.step(task.batch(range(4)), NoSpans())
    alone = worker_on(task, recipe(gradient_accumulation=parts), weighs_alone=True)
    assert alone.step(task.batch(range(4)), NoSpans()) == 0, "the others' samples may weigh more"


def test_single_has_the_workload_s_weights_and_the_same_step() -> None:
    asked = recipe(activation_checkpointing=True)
    worker = build_strategy("single", {}).start(ToyWorkload(), asked, ALONE)
    assert not isinstance(worker, Server)
    assert_same(worker.full_parameters(), dict(ToyWorkload().build_model().state_dict()))
    assert_same(trained(worker), by_torch())


class Spans:
    """Notes the spans, and the gradients held when the optimizer begins."""

    def __init__(self, worker: EagerWorker) -> None:
        self.worker = worker
        self.names: list[str] = []
        self.gradients = 0

    def span(self, name: str) -> AbstractContextManager[None]:
        self.names.append(name)
        self.gradients = len(self.worker.held_state().gradients)
        return nullcontext()


def test_micro_batches_reduce_at_the_last_and_return_the_mean_loss() -> None:
    workload, last = ToyWorkload(), list[bool]()
    batch = workload.batch(range(8))
    expected = workload.mean_loss(workload.build_model(), batch)
    asked = recipe(gradient_accumulation=4)
    worker = worker_on(workload, asked, synchronise=last.append)
    spans = Spans(worker)
    loss = worker.step(batch, spans)
    assert last == [False, False, False, True]
    assert spans.names == ["forward", "backward"] * 4 + ["optimizer"]
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected.detach())


def test_learning_rate_holds_from_the_next_step_on() -> None:
    worker = worker_on(ToyWorkload())
    before = worker.full_parameters()
    worker.set_learning_rate(0.0)
    assert_same(trained(worker), before)
    worker.set_learning_rate(0.1)
    assert not torch.equal(trained(worker)["0.weight"], before["0.weight"])


FUSED = {"name": "sgd", "implementation": "fused"}


@pytest.mark.parametrize(
    ("changes", "skipped"),
    [
        ({"precision": "fp16"}, 1),
        ({"precision": "fp16", "optimizer": FUSED}, 1),  # called, and skips by itself
        ({"precision": "fp32"}, 0),
    ],
)
def test_scaled_infinite_gradients_are_skipped_and_counted(
    changes: dict[str, Any], skipped: int
) -> None:
    """The loss of the second of three steps is infinite; only `GradScaler` leaves it out."""
    workload = ToyWorkload(factor_of_step=lambda step: float("inf") if step == 1 else 1.0)
    worker = worker_on(workload, recipe(**changes))
    weights = [trained(worker, workload, steps=1)["0.weight"] for _ in range(3)]
    assert worker.skipped_steps() == skipped
    assert torch.equal(weights[1], weights[0]) is bool(skipped)
    assert bool(weights[2].isfinite().all()) is bool(skipped)
    assert not torch.equal(weights[2], weights[1])


def test_bf16_computes_in_bf16_and_keeps_fp32_parameters() -> None:
    found, exact = trained(worker_on(ToyWorkload(), recipe(precision="bf16"))), by_torch()
    assert all(tensor.dtype is torch.float32 for tensor in found.values())
    assert not torch.equal(found["0.weight"], exact["0.weight"])
    torch.testing.assert_close(found["0.weight"], exact["0.weight"], rtol=0.05, atol=0.01)


def test_held_state_lists_parameters_gradients_and_momentum() -> None:
    workload = ToyWorkload()
    worker = worker_on(workload, untracked_bytes=lambda: 12)
    fresh, spans = worker.held_state(), Spans(worker)
    assert (fresh.gradients, fresh.optimizer_state, fresh.untracked_bytes) == ((), (), 12)
    worker.step(workload.batch(range(8)), spans)
    after = worker.held_state()
    assert spans.gradients >= 4
    assert after.gradients == (), "dropped after the step"
    assert [t.data_ptr() for t in after.parameters] == [t.data_ptr() for t in fresh.parameters]
    assert sum(tensor.numel() for tensor in after.optimizer_state) == 58  # momentum


OWN = {"name": "own", "path": "torch.optim:RMSprop", "lr": 0.01}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "torch.optim:Missing"}, "cannot import"),
        ({"options": {"nesterov": True}}, "unexpected keyword argument 'nesterov'"),
        ({"path": "torch.nn:Parameter", "options": {}}, "cannot be made"),
        ({"path": "torch.optim:Muon"}, "cannot be made: Muon only supports 2D parameters"),
    ],
)
def test_optimizer_that_cannot_be_built_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        worker_on(ToyWorkload(), recipe(optimizer=OWN | changes))


def group(name: str, **options: Any) -> ParameterGroup:
    return ParameterGroup(names=frozenset({name, "frozen"}), options=options)


def test_groups_follow_the_schedule_in_proportion() -> None:
    """The recipe's learning rate is 0.1; a group without a trained parameter is none."""
    named = {name: nn.Parameter(torch.ones(2)) for name in "ab"}
    groups = (group("a", lr=0.02), group("b", weight_decay=0.0), group("c"))
    built = build_optimizer(named, recipe(), groups)
    set_learning_rates(built.param_groups, 0.5)
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in built.param_groups] == [
        (pytest.approx(0.1), 0.01, 1),
        (0.5, 0.0, 1),
    ]
    with pytest.raises(InputError, match="SGD has no betas"):
        build_optimizer(named, recipe(), [group("a", betas=(0.9, 0.9))])


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ({"name": "sgd", "lr": 0.2, "momentum": 0.5, "nesterov": True}, torch.optim.SGD),
        ({"name": "sgd", "lr": 0.2, "momentum": 0.5, "dampening": 0.25}, torch.optim.SGD),
        ({"name": "adam", "betas": (0.8, 0.9), "eps": 1e-6}, torch.optim.Adam),
        ({"name": "adamw", "weight_decay": 0.25}, torch.optim.AdamW),
        ({"name": "adamw", "implementation": "foreach"}, torch.optim.AdamW),
        (OWN | {"options": {"momentum": 0.5, "centered": True}}, torch.optim.RMSprop),
    ],
)
def test_optimizer_has_the_recipe_s_settings(spec: dict[str, Any], kind: type) -> None:
    built = build_optimizer({"w": nn.Parameter(torch.ones(2))}, recipe(optimizer=spec))
    asked = recipe(optimizer=spec).optimizer
    beside = {"name", "path", "options", "implementation", "state_bits"}
    settings = asked.model_dump(exclude=beside) | spec.get("options", {})
    settings |= {name: asked.implementation == name or None for name in ("foreach", "fused")}
    assert type(built) is kind
    assert {key: built.param_groups[0].get(key) for key in settings} == settings
    if kind is torch.optim.RMSprop:
        assert set(state_keys(asked)) == {"square_avg", "momentum_buffer", "grad_avg"}


def test_the_loss_scale_stays_where_the_gradients_are() -> None:
    """`meta` stands for a GPU whose gradients are offloaded."""
    scaler = loss_scaler(recipe(precision="fp16"), CPU)
    assert scaler.scale(torch.ones((), device="meta")).device.type == "meta"
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.full((1,), 2.0**16)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.step(optimizer)
    assert weight.item() == 0.0


def test_after_step_of_the_task_is_called_after_each_update() -> None:
    class Counting(ToyWorkload):
        has_after_step = True

        def after_step(self, model: nn.Module, step: int) -> None:
            weights = [parameter.detach().clone() for parameter in model.parameters()]
            calls.append((step, weights))

    calls: list[tuple[int, list[Tensor]]] = []
    worker = worker_on(workload := Counting())
    for step in range(2):
        worker.step(workload.batch(range(8 * step, 8 * step + 8)), NoSpans())
    assert [step for step, _ in calls] == [1, 2]
    assert all(map(torch.equal, calls[-1][1], worker.module.parameters()))
