"""Verdicts on tasks that draw by themselves, communicate, fail, diverge or use other types."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

from shardmark.base.results.verification import Verdict, is_accepted, is_undecided
from shardmark.bench.reference.capture import arrays
from shardmark.bench.reference.compare import nonfinite_step
from shardmark.bench.reference.reference import Hypothesis
from shardmark.bench.reference.verdict import NoReferenceError, ReferenceCache
from shardmark.ranks.strategies.casting import lossless_copy
from shardmark.ranks.train.exchanged_group import CannotPlayError
from tests import present
from tests.unit.bench.reference.verification_cases import (
    MODELS,
    STEPS,
    Task,
    VerificationCase,
    handmade,
)
from tests.unit.ranks.train.toy import ToyBatch

Loss = Callable[[Task, nn.Module, ToyBatch], Any]


@pytest.fixture
def change_loss(monkeypatch: pytest.MonkeyPatch) -> Callable[[Loss], None]:
    """Replaces the toy task's loss."""
    return lambda loss: monkeypatch.setattr(Task, "loss", loss)


right = Task.loss


def cause_text_of(verdict: Verdict) -> str:
    return present(verdict.cause).text


def test_a_loss_that_does_not_repeat_itself_is_not_blamed_on_the_strategy(
    change_loss: Callable[[Loss], None],
) -> None:
    own = random.Random(1)

    def noisy(task: Task, model: nn.Module, batch: ToyBatch) -> Any:
        loss = right(task, model, batch)
        return replace(loss, total=loss.total * (1 + 0.1 * own.random()))

    change_loss(noisy)
    verdict = VerificationCase("plain").verdict_on_run()
    assert is_undecided(verdict)
    assert not is_accepted(verdict)
    assert "other values when it is run again" in cause_text_of(verdict)
    assert "the model or the loss has its own random generator" in present(verdict.cause).evidence


def test_a_data_set_that_does_not_repeat_itself_is_told_from_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, of_rows = [0], Task.batch

    def counted(task: Task, *given: Any) -> ToyBatch:
        read[0] += 1
        batch = of_rows(task, *given)
        return replace(batch, inputs=batch.inputs + 0.01 * read[0])

    monkeypatch.setattr(Task, "batch", counted)
    verdict = VerificationCase("plain").verdict_on_run()
    assert is_undecided(verdict)
    assert "samples differ when they are read twice" in present(verdict.cause).evidence


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: torch.rand(()).item()])
def test_draws_from_seeded_generators_repeat_and_are_equivalent(
    change_loss: Callable[[Loss], None], draw: Callable[[], float]
) -> None:
    def drawn(task: Task, model: nn.Module, batch: ToyBatch) -> Any:
        loss = right(task, model, batch)
        return replace(loss, total=loss.total * (1 + 0.1 * draw()))

    change_loss(drawn)
    case = VerificationCase("plain")
    assert case.verdict_on_run().equivalent
    assert "draws random numbers" in str(case.whole_batch.found)


def test_a_loss_that_is_not_finite_is_the_cause() -> None:
    case = VerificationCase("plain")
    losses = tuple((loss, math.nan, math.nan) for loss, *_ in case.reference.losses)
    verdict = case.verdict(replace(case.reference, losses=losses))
    assert (verdict.equivalent, cause_text_of(verdict)) == (False, "the loss is NaN from step 2 on")
    diverging = VerificationCase("plain", optimizer={"name": "sgd", "lr": 1e30})
    verdict = diverging.verdict_on_run()
    assert verdict.equivalent is None, "the reference's is not finite either"
    assert present(verdict.cause).training_fails
    assert not is_accepted(verdict)
    assert not is_undecided(verdict), "it is worse: exit code 1"


def test_first_nonfinite_step_is_searched_in_unequal_ranks() -> None:
    """Asynchronous workers take whatever share of the data is left."""
    made = handmade(losses=((2.0, 1.0, 0.5), (math.inf,)))
    assert nonfinite_step(made) == (0, 1, math.inf)
    assert nonfinite_step(handmade(losses=((2.0, 1.0, 0.5), ()))) is None


def contrastive(gather: Callable[[Tensor], Tensor]) -> Loss:
    """Compares each sample with those of all ranks."""

    def loss(task: Task, model: nn.Module, batch: ToyBatch) -> Any:
        outputs, targets = model(batch.inputs), batch.targets
        if dist.is_initialized() and dist.get_world_size() > 1:
            outputs, targets = gather(outputs), gather(targets)
        mean = torch.cdist(outputs, targets).square().mean()
        return replace(right(task, model, batch), total=mean * batch.weight)

    return loss


def with_gradient(rows: Tensor) -> Tensor:
    """torch's functional collective, or the older one that it is to replace."""
    new = getattr(functional, "all_gather_single_autograd", None)
    world: Any = dist.group.WORLD
    rows_of_all: Tensor = (new or functional.all_gather_tensor_autograd)(rows, 0, world)
    return rows_of_all


def without_gradient(rows: Tensor) -> Tensor:
    """Gather as code does that forgets that gathered features have no gradient."""
    parts = [torch.zeros_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows)
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


def test_reference_reproduces_a_task_that_gathers_over_ranks(
    change_loss: Callable[[Loss], None],
) -> None:
    change_loss(contrastive(with_gradient))
    case = VerificationCase("plain")
    assert case.runs.communicates
    assert case.verdict_on_run().equivalent
    assert case.whole_batch.in_tolerances is not None, "held against the batch in one piece"
    change_loss(contrastive(without_gradient))
    verdict = VerificationCase("plain").verdict_on_run()
    assert verdict.equivalent is False
    assert "gathers values of other ranks without their gradients" in cause_text_of(verdict)


@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "reduce_scatter", "all_to_all"])
def test_reference_reproduces_other_collectives(
    change_loss: Callable[[Loss], None], kind: str
) -> None:
    def exchanged(value: Tensor) -> Tensor:
        """The mean over two ranks, by several ways."""
        made, both = value.clone(), [value.clone(), value.clone()]
        if kind == "all_reduce":
            dist.all_reduce(made, op=dist.ReduceOp.AVG, async_op=True).wait()
        elif kind == "broadcast":
            for rank in range(2):
                dist.broadcast(both[rank], src=rank)
            made = (both[0] + both[1]) / 2
        elif kind == "reduce_scatter":
            dist.reduce_scatter_tensor(made, torch.stack(both))
            made = made / 2
        else:
            received = [torch.zeros_like(value) for _ in range(2)]
            dist.all_to_all(received, both)
            made = (received[0] + received[1]) / 2
        return made

    means = []

    def loss(task: Task, model: nn.Module, batch: ToyBatch) -> Any:
        mean = batch.targets.mean(0)
        if dist.get_world_size() > 1:
            mean = exchanged(mean)
            means.append(mean)
        return right(task, model, replace(batch, targets=batch.targets - mean))

    change_loss(loss)
    assert VerificationCase("plain").verdict_on_run().equivalent
    assert torch.equal(means[0], means[1]), "both ranks have the same"


def test_task_that_communicates_by_itself_is_not_decided() -> None:
    def loss(task: Task, model: nn.Module, batch: ToyBatch) -> Any:
        if dist.is_initialized() and dist.get_rank() == 0:
            dist.barrier()
        return right(task, model, batch)

    with pytest.raises(NoReferenceError) as found:
        reference_of(loss)
    assert found.value.cause.text == "undecided: the task communicates by itself"


@pytest.mark.parametrize("asked", ["get_world_size", "get_rank"])
def test_models_are_built_with_the_world_size_of_all_ranks(
    change_loss: Callable[[Loss], None], monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """A rank that the task keeps would be the same for all: they share one task."""
    change_loss(contrastive(with_gradient))
    build, found = Task.build_model, []

    def built(task: Task) -> nn.Module:
        found.append(getattr(dist, asked)() if dist.is_initialized() else 1)
        return build(task)

    monkeypatch.setattr(Task, "build_model", built)
    if asked == "get_world_size":
        assert VerificationCase("plain").verdict_on_run().equivalent
        assert set(found) == {1, 2}, "one for the whole batch in one piece"
        return
    with pytest.raises(CannotPlayError, match="its rank while its model is built"):
        VerificationCase("plain")


def test_unreproducible_hypothesis_explains_nothing(
    change_loss: Callable[[Loss], None],
) -> None:
    """Synchronised batch norm is one of them for a task that communicates."""
    change_loss(contrastive(with_gradient))
    verification_case = VerificationCase("plain")
    with pytest.raises(CannotPlayError, match="beside synchronised batch norm"):
        verification_case.runs.run(Hypothesis(sync_batch_norm=True))
    verdict = verification_case.verdict_on_run(Hypothesis(gradient_factor=1.5))
    assert verdict.equivalent is False
    assert "gradient" in cause_text_of(verdict)


def test_a_reference_that_fails_is_one_cells_not_tried() -> None:
    def loss(*_: object) -> Any:
        raise ZeroDivisionError("no positive samples")

    with pytest.raises(NoReferenceError) as found:
        reference_of(loss)
    assert found.value.cause.text == "not tried"
    assert "ZeroDivisionError: no positive samples (test_tasks_of_users.py, line" in str(
        found.value
    )


@pytest.mark.parametrize("divisor", [1.0, 16.0])
def test_a_sum_that_is_divided_by_a_constant_is_told_from_a_loss_that_does_not_add_up(
    change_loss: Callable[[Loss], None], divisor: float
) -> None:
    """Each share takes the sum of its samples for its mean."""

    def loss(task: Task, model: nn.Module, batch: ToyBatch) -> Any:
        made = right(task, model, batch)
        return replace(made, total=made.total / divisor * batch.weight)

    change_loss(loss)
    verdict = VerificationCase("plain", gradient_accumulation=2).verdict_on_run()
    assert verdict.equivalent is False
    assert "the gradient is 4 times too small" in cause_text_of(verdict)
    assert "loss_adds_up" not in str(present(verdict.cause).setting), "it would hide the fault"


def test_a_constant_divisor_is_not_hidden_by_a_declaration(
    change_loss: Callable[[Loss], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`loss_adds_up = False` is for losses that compare samples with each other."""
    monkeypatch.setattr(Task, "not_additive", "the task declares it")
    monkeypatch.setattr(Task, "not_additive_declared", True)
    change_loss(lambda task, m, b: replace(right(task, m, b), total=right(task, m, b).total * 2))
    assert VerificationCase("plain").verdict_on_run().equivalent
    assert "the task declares it" in str(VerificationCase("plain").whole_batch.found)

    def loss(task: Task, model: nn.Module, batch: ToyBatch) -> Any:
        made = right(task, model, batch)
        return replace(made, total=made.total / 16 * batch.weight)

    change_loss(loss)
    assert "2 times too small" in cause_text_of(VerificationCase("plain").verdict_on_run())


class Counting(nn.Module):
    """Scales its outputs by a counter that is no buffer, or by draws of its own generator."""

    def __init__(self, *, draws: bool) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(4, 2), 0
        self.generator = torch.Generator().manual_seed(3) if draws else None

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += 1
        outputs: Tensor = self.layer(inputs)
        if self.generator is not None:
            return outputs + torch.randn(2, generator=self.generator)
        return outputs * self.count


@pytest.mark.parametrize("draws", [False, True])
def test_a_model_with_state_of_its_own_blames_no_strategy(
    monkeypatch: pytest.MonkeyPatch, draws: bool
) -> None:
    """It begins anew with each model, so that the reference repeats; its ranks share the state."""
    monkeypatch.setitem(MODELS, "counting", lambda: Counting(draws=draws))
    case = VerificationCase("counting")
    verdict = case.verdict_on_run(Hypothesis(gradient_factor=2.0))
    assert is_undecided(verdict)
    assert cause_text_of(verdict).endswith("the model or the loss keeps state outside of buffers")
    assert "keeps state" in str(case.whole_batch.found)


class Growing(nn.Module):
    """A buffer that the first step creates, one that it resizes, and one that is a mask."""

    grown: Tensor
    made: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("grown", torch.zeros(0))
        self.register_buffer("made", None)
        self.register_buffer("mask", torch.full((2,), -math.inf))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.grown = torch.cat([self.grown, inputs.detach().mean().reshape(1)])
            self.made = inputs.detach().mean(0)
        outputs: Tensor = self.layer(inputs)
        return outputs


def test_buffers_may_be_created_and_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "growing", Growing)
    case = VerificationCase("growing")
    assert [buffers["grown"].shape for buffers in case.reference.buffers] == [(STEPS,)] * 2
    assert case.verdict_on_run().equivalent
    assert case.verdict_on_run(Hypothesis(buffers="frozen")).equivalent is False


class Observed(nn.Module):
    """Scales by the largest input, which it observes in evaluation mode too."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.largest.copy_(inputs.detach().abs().max())
        outputs: Tensor = self.layer(inputs / self.largest)
        return outputs


class Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        weight: Any = self.layer.weight
        weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        return outputs


@pytest.mark.parametrize(
    ("model", "text", "evidence"),
    [
        (Observed, "the model's own statistics are those of each rank's samples", "largest"),
        (Clamped, "the gradient of a batch is not the sum", "without the hooks of layer.weight"),
    ],
)
def test_what_keeps_gradients_from_adding_up_is_told_from_the_loss(
    monkeypatch: pytest.MonkeyPatch, model: type[nn.Module], text: str, evidence: str
) -> None:
    monkeypatch.setitem(MODELS, "made", model)
    verdict = VerificationCase("made").verdict_on_run()
    assert verdict.equivalent is False
    assert cause_text_of(verdict).startswith(text)
    assert evidence in present(verdict.cause).evidence


def test_all_verified_batches_are_held_against_one_piece(
    change_loss: Callable[[Loss], None],
) -> None:
    """The halves add up for the first batch only."""

    def loss(task: Task, model: nn.Module, batch: ToyBatch) -> Any:
        made = right(task, model, batch)
        return made if batch.sample_ids[0] < 16 else replace(made, total=made.total.square())

    change_loss(loss)
    verdict = VerificationCase("plain").verdict_on_run()
    assert "not the sum of its parts" in cause_text_of(verdict)
    (check,) = [check for check in verdict.checks if check.name == "whole batch in one piece"]
    assert str(check.where).startswith("batch 2") or str(check.where).startswith("batch 3")


def test_an_optimizer_on_flat_pieces_is_named_unless_it_works_element_by_element() -> None:
    """DeepSpeed's stages 1 and 2 update one row of all parameters, a piece on each rank."""
    adafactor = {"name": "own", "path": "torch.optim:Adafactor", "lr": 0.01}
    verdict = VerificationCase("plain", optimizer=adafactor).verdict_on_run(
        Hypothesis(flat_pieces=True)
    )
    assert verdict.equivalent is False
    assert "flat pieces of the parameters" in cause_text_of(verdict)
    assert "differs by 0 tolerances" in present(verdict.cause).evidence
    nadam = {"name": "own", "path": "torch.optim:NAdam", "lr": 0.01}
    flat = VerificationCase("plain", optimizer=nadam).verdict_on_run(Hypothesis(flat_pieces=True))
    assert {check.name for check in flat.checks if not check.holds} <= {
        "optimizer state after the last step"
    }


class Mixed(nn.Module):
    """Complex, double and half-precision parameters, an integer counter and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.randn(4, 8, dtype=torch.complex64))
        self.base = nn.Linear(4, 8).to(torch.bfloat16).requires_grad_(False)
        self.head = nn.Linear(8, 2).double()
        self.count = nn.Parameter(torch.zeros(1, dtype=torch.long), requires_grad=False)
        self.prefix = nn.Parameter(torch.zeros(0, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        waves = torch.view_as_real(inputs.to(torch.complex64) @ self.waves).sum(-1)
        hidden = waves + self.base(inputs.to(torch.bfloat16)).float() + self.prefix.sum()
        outputs: Tensor = self.head(hidden.double()).float()
        return outputs


def test_parameters_of_any_type_are_compared_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "mixed", Mixed)
    case = VerificationCase("mixed")
    assert case.verdict_on_run().equivalent
    assert case.reference.tensors["parameters"]["waves"].shape == (4, 8, 2)
    assert case.reference.tensors["parameters"]["head.weight"].dtype == np.float64
    gradient = {**case.reference.tensors["gradient"]}
    gradient["waves"] = gradient["waves"] * np.array([1.0, 0.0])
    wrong = replace(case.reference, tensors={**case.reference.tensors, "gradient": gradient})
    assert case.verdict(wrong).equivalent is False, "imaginary parts count"


def test_copies_keep_all_digits() -> None:
    index = torch.tensor([[0, 2, 0]])
    values = torch.tensor([1.0, 2.0, 3.0])
    sparse = torch.sparse_coo_tensor(index, values, (3,), check_invariants=True)
    assert lossless_copy(sparse).tolist() == [4.0, 0.0, 2.0]
    assert lossless_copy(torch.tensor([1.5], dtype=torch.bfloat16)).dtype is torch.float32
    third = torch.tensor([1 / 3], dtype=torch.float64)
    assert lossless_copy(third).item() == 1 / 3
    made = arrays({"complex": torch.tensor([1 + 2j]), "count": torch.tensor([3])})
    assert made["complex"].tolist() == [[1.0, 2.0]]
    assert made["count"].dtype == np.float64


def reference_of(loss: Loss) -> object:
    """The cache's answer for the toy task with that loss."""
    case = VerificationCase("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Task, "loss", loss)
        patch.setattr(
            "shardmark.bench.reference.verdict.build_workload", lambda *_: case.runs.workload
        )
        return ReferenceCache().get(case.trial, STEPS)
