"""Each way of training otherwise, taken for a strategy, is refused and named."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardmark.base.errors import InputError
from shardmark.base.results.verification import Verdict, read_verification, write_verification
from shardmark.bench.reference import reference
from shardmark.bench.reference.reference import Hypothesis, Noise
from shardmark.ranks.workloads.base import ParameterGroup
from tests import present
from tests.unit.bench.reference.verdicts import VERIFICATION
from tests.unit.bench.reference.verification_cases import (
    MODELS,
    STEPS,
    Task,
    VerificationCase,
    array,
    verification_case,
    with_tensor,
)

BF16 = torch.bfloat16
UNEXPLAINED = "no known explanation reproduces the numbers"

NAMED: dict[str, Hypothesis] = {
    "gradients are summed over the 2 ranks, not averaged": Hypothesis(gradient_factor=2.0),
    "gradients are divided by the 2 ranks twice": Hypothesis(gradient_factor=0.5),
    "gradients are clipped to norm 0.2": Hypothesis(clipping=0.2),
    "weight decay is not applied": Hypothesis(decays=lambda _, __: False),
    "weight decay is applied to biases and norms only": Hypothesis(
        decays=lambda _, shape: len(shape) < 2
    ),
    "gradients are reduced in a lower precision (bf16)": Hypothesis(reduction=BF16),
    "gradients are not averaged: only rank 1's is used": Hypothesis(only_rank=1),
    "the update of step 1 is skipped": Hypothesis(skipped=frozenset({0})),
    "the update of step 3 is skipped": Hypothesis(skipped=frozenset({2})),
    "rank 0's buffers are broadcast before each forward pass": Hypothesis(buffers="broadcast"),
    "buffers (batch norm's running statistics) are not updated": Hypothesis(buffers="frozen"),
    "every rank draws the same random numbers (dropout, proposal sampling)": Hypothesis(
        same_draws=True
    ),
    "different random draws (dropout, proposal sampling)": Hypothesis(seed_offset=17),
}
ROUNDING = Noise(seed=99, parameters=1e-7, gradients=1e-7)
"""Noise of another order of operations: no strategy repeats the reference's."""


def cause_text(verdict: Verdict) -> str:
    assert verdict.equivalent is False
    assert verdict.cause is not None
    assert verdict.cause.evidence
    assert verdict.cause.first_deviation != "none"
    return verdict.cause.text


@pytest.mark.parametrize("text", NAMED)
def test_verdict_names_the_cause(text: str) -> None:
    # What was rounded to a type would be rounded no longer.
    noise = None if "precision" in text else ROUNDING
    assert cause_text(verification_case().verdict_on_run(NAMED[text], noise)) == text


WHOLE = "(a mean of means), not by the whole step's"


@pytest.mark.parametrize(
    ("divisor", "text"),
    [
        ("share", f"each rank divides its loss by its own weight {WHOLE}"),
        ("micro-batch", f"each micro-batch divides its loss by its own weight {WHOLE}"),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_a_mean_of_means_is_named_where_samples_weigh_differently(
    divisor: Any, text: str, known: bool
) -> None:
    case = verification_case("plain", 2, uneven=True, weights_known=known)
    assert case.verdict_on_run().equivalent
    assert case.reference.weights == verification_case("plain", 2, uneven=True).reference.weights
    assert cause_text(case.verdict_on_run(Hypothesis(divisor=divisor), ROUNDING)) == text
    assert verification_case("plain").verdict_on_run(Hypothesis(divisor=divisor)).equivalent, (
        "all weigh the same"
    )


def test_parameter_groups_that_are_not_used_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = frozenset(name for name, p in MODELS["plain"]().named_parameters() if p.dim() > 1)
    biases = frozenset(dict(MODELS["plain"]().named_parameters())) - weights
    groups = [
        ParameterGroup(names=weights, options={"lr": 0.03}),
        ParameterGroup(names=biases, options={"weight_decay": 0.0}),
    ]
    monkeypatch.setattr(Task, "parameter_groups", groups)
    case = VerificationCase("plain")
    assert case.verdict_on_run(noise=ROUNDING).equivalent
    verdict = case.verdict_on_run(Hypothesis(one_group=True), ROUNDING)
    assert "parameter groups are not used" in cause_text(verdict)


@pytest.mark.parametrize("model", ["plain", "dropout"])
def test_the_reference_itself_adds_up_to_the_whole_batch(model: str) -> None:
    case = verification_case(model, 2, uneven=True)
    assert case.whole_batch.holds
    assert case.whole_batch.in_tolerances is not None
    assert case.verdict_on_run().checks[-1] == case.whole_batch
    assert "batch norm" in str(verification_case("norm only").whole_batch.found), (
        "it couples samples"
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        # The mean of the samples that each part has: weights that nobody divides by.
        (lambda loss, batch: replace(loss, total=loss.total / batch.weight), False),
        (lambda loss, _: replace(loss, total=loss.total.square()), False),
        (lambda loss, _: replace(loss, total=3 * loss.total), True),
    ],
)
def test_a_loss_that_does_not_add_up_is_refused_whatever_the_strategy(
    monkeypatch: pytest.MonkeyPatch, wrong: Any, said: bool
) -> None:
    right = Task.loss
    monkeypatch.setattr(Task, "loss", lambda self, m, batch: wrong(right(self, m, batch), batch))
    case = VerificationCase("plain", uneven=True)
    assert case.verdict_on_run().equivalent is said
    if not said:
        assert "not the sum of its parts" in cause_text(case.verdict_on_run())
    monkeypatch.setattr(Task, "not_additive", "it divides by what it draws")
    assert "divides by what it draws" in str(
        VerificationCase("plain", uneven=True).whole_batch.found
    )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda loss, step_weight, _: loss.total / step_weight,  # nobody undoes the mean over ranks
        lambda loss, *_: loss.total / loss.weight,  # a mean of means
    ],
)
def test_a_mistake_that_reference_and_strategies_share_is_found(
    monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    monkeypatch.setattr(reference, "share_of_step", wrong)
    case = VerificationCase("plain", uneven=True)
    assert not case.whole_batch.holds
    assert case.verdict_on_run().equivalent is False


class Odd(nn.Module):
    """A model whose evaluation mode or whole batch is another thing than its training."""

    count: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.attention_dropout = kind, nn.Linear(4, 2), 0.5
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        if self.kind == "train only":
            assert self.training or not torch.is_grad_enabled(), "as cuDNN says"
            return functional.dropout(outputs, self.attention_dropout)
        if self.kind == "fixed rate":
            return functional.dropout(outputs, 0.3, self.training)
        if self.kind == "counts" and self.training:
            self.count += 1
            return outputs * self.count
        if self.kind == "noisy":
            return outputs + torch.randn(2)
        if self.kind == "small":
            assert len(inputs) <= 8, "too many"
        if self.kind == "memory" and len(inputs) > 8:
            raise torch.OutOfMemoryError
        return outputs


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("train only", None),
        ("fixed rate", None),
        ("counts", None),
        ("noisy", "the loss draws random numbers"),
        ("small", "AssertionError: too many"),
        ("memory", "too large for one device"),
    ],
)
def test_whole_batch_is_compared_in_a_deterministic_mode(
    monkeypatch: pytest.MonkeyPatch, kind: str, told: str | None
) -> None:
    monkeypatch.setitem(MODELS, kind, lambda: Odd(kind))
    whole_batch = VerificationCase(kind, uneven=True, gradient_accumulation=2).whole_batch
    assert whole_batch.holds
    assert (whole_batch.in_tolerances is None) is (told is not None)
    assert told is None or told in str(whole_batch.found)


def test_a_loss_of_another_weight_than_its_batch_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = Task.loss
    monkeypatch.setattr(
        Task, "loss", lambda self, m, batch: replace(right(self, m, batch), weight=len(batch))
    )
    with pytest.raises(InputError, match=r"weight 8 for samples that weigh 2\d together"):
        VerificationCase("plain", uneven=True)


def test_a_model_that_goes_on_training_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each run of the reference would begin where the last one ended."""
    kept = MODELS["plain"]()
    monkeypatch.setattr(Task, "build_model", lambda _: kept)
    with pytest.raises(InputError, match=r"other initial weights each time.*return a new"):
        VerificationCase("plain")


@pytest.mark.parametrize(
    ("accumulation", "factor", "text"),
    [
        (4, 4.0, "gradients of the 4 micro-batches are summed, not averaged"),
        (4, 8.0, "gradients are summed over ranks and micro-batches, not averaged"),
        # What the numbers cannot tell apart is said together.
        (
            2,
            2.0,
            "gradients are summed over the 2 ranks, not averaged"
            " or gradients of the 2 micro-batches are summed, not averaged",
        ),
    ],
)
def test_scaled_gradients_are_attributed_to_accumulation_or_averaging(
    accumulation: int, factor: float, text: str
) -> None:
    verdict = verification_case("plain", accumulation).verdict_on_run(
        Hypothesis(gradient_factor=factor)
    )
    assert cause_text(verdict) == text


def test_deepspeeds_clipping_is_called_by_its_name() -> None:
    verdict = VerificationCase("plain", target_scale=50.0).verdict_on_run(Hypothesis(clipping=1.0))
    assert cause_text(verdict) == "gradients are clipped to norm 1, DeepSpeed's default"
    assert present(verdict.cause).setting == "gradient_clipping"


UNUSED_AS_ZERO = "parameters that got no gradient are updated as with a gradient of zero"
ADAMW = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1}


def test_unused_parameters_have_no_gradient_to_be_decayed_with() -> None:
    case = verification_case("unused")
    assert "unused.weight" not in case.reference.tensors["gradient"]
    assert case.verdict_on_run().equivalent
    assert cause_text(case.verdict_on_run(Hypothesis(unused_as_zero=True))) == UNUSED_AS_ZERO


def test_a_parameter_may_be_unused_in_later_steps_alone() -> None:
    case = VerificationCase("early used", optimizer=ADAMW)
    assert "early.weight" in case.reference.tensors["gradient"]
    assert case.verdict_on_run().equivalent
    assert cause_text(case.verdict_on_run(Hypothesis(unused_as_zero=True))) == UNUSED_AS_ZERO


def test_adamw_hides_no_cause() -> None:
    """It forgets the gradient's scale, and the gradient of the first step does not."""
    case = VerificationCase("plain", optimizer=ADAMW)
    for text in (
        "gradients are summed over the 2 ranks, not averaged",
        "weight decay is not applied",
        "gradients are reduced in a lower precision (bf16)",
        "the update of step 3 is skipped",
    ):
        assert cause_text(case.verdict_on_run(NAMED[text])) == text


def moved(ids: Any) -> Any:
    return tuple(tuple(tuple((i + 1) % 24 for i in step) for step in rank) for rank in ids)


@pytest.mark.parametrize(
    ("changes", "text", "evidence"),
    [
        (lambda ids: (ids[0], ids[0]), "repeated samples", "step 1 takes 8 samples"),
        (lambda ids: ids[::-1], "different batch shares", "in other shares"),
        (moved, "different batch shares", "step 1 has other samples"),
        ({"initial_sha256": ("f" * 64,) * 2}, "different initial weights", "ffffffffffff"),
        ({"learning_rates": (0.1, 0.1, 0.2)}, "different learning rate", "0.2 where"),
        ({"weights": ((8.0,) * 3, (9.0,) * 3)}, "different weights of the same samples", "9"),
        ({"skipped": ((), (1,))}, "ranks do not skip the same steps", "rank 1: 2"),
        ({"skipped": ((1,), (1,))}, UNEXPLAINED, "tried"),  # no hypothesis explains equal numbers
    ],
)
def test_causes_in_the_capture_are_named(changes: Any, text: str, evidence: str) -> None:
    """Some are made of the sample ids of the reference."""
    case = verification_case()
    if callable(changes):
        changes = {"sample_ids": changes(case.reference.sample_ids)}
    verdict = case.verdict(replace(case.reference, **changes))
    assert cause_text(verdict) == text
    assert evidence in present(verdict.cause).evidence


@pytest.mark.parametrize("model", ["norm only", "normed"])
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_batch_norm_over_other_samples_than_asked_is_named(
    model: str, asked: bool, accumulation: int
) -> None:
    """Draws are not blamed for it; asked for, shares and the whole batch are one thing."""
    case = VerificationCase(
        model, uneven=True, sync_batch_norm=asked, gradient_accumulation=accumulation
    )
    assert case.verdict_on_run(noise=ROUNDING).equivalent
    text = "each rank's share" if asked else "all ranks (synchronised batch norm)"
    verdict = case.verdict_on_run(Hypothesis(sync_batch_norm=not asked), ROUNDING)
    assert cause_text(verdict) == f"batch norm takes its statistics over {text}"
    assert case.whole_batch.holds
    compared = case.whole_batch.in_tolerances is not None
    assert compared is (asked and accumulation == 1), case.whole_batch.found


def test_unknown_fault_has_no_cause() -> None:
    case = verification_case()
    draws = np.random.default_rng(3)
    noise = {
        name: (tensor + draws.normal(size=tensor.shape)).astype(np.float32)
        for name, tensor in case.reference.tensors["parameters"].items()
    }
    verdict = case.verdict(with_tensor(case.reference, "parameters", noise))
    assert cause_text(verdict) == UNEXPLAINED
    assert present(verdict.cause).first_deviation.startswith("parameters after the last step")
    nan = {"0.weight": array(*[np.nan] * 32).reshape(8, 4)}  # a diverged training
    broken = {**case.reference.tensors["gradient"], **nan}
    diverged = case.verdict(with_tensor(case.reference, "gradient", broken))
    assert cause_text(diverged) == UNEXPLAINED


def test_the_first_loss_comes_before_a_skipped_step() -> None:
    case = verification_case()
    capture = replace(case.runs.run(Hypothesis(compute=BF16)), skipped=((1,), (1,)))
    assert cause_text(case.verdict(capture)) == "computation in a lower precision (bf16)"


@pytest.mark.parametrize("model", ["plain", "normed"])
@pytest.mark.parametrize("seed", range(2))
def test_rounding_alone_is_no_deviation(model: str, seed: int) -> None:
    """Perturbations of the size that tolerances are derived from, in draws that they never saw."""
    case = verification_case(model)
    rounding = case.tolerances.floor / 4
    noise = Noise(seed=1000 + seed, parameters=rounding, gradients=2 * rounding)
    verdict = case.verdict_on_run(noise=noise)
    assert verdict.equivalent, [check for check in verdict.checks if not check.holds]
    assert verdict.cause is None


def test_the_reference_is_equivalent_to_itself_and_a_hundred_times_the_rounding_is_seen() -> None:
    """The margin is 8: what is far above it does not pass.  The longest sums have 8 terms."""
    case = verification_case("plain")
    assert case.tolerances.floor == pytest.approx(4 * 8**0.5 * 2.0**-24)
    assert case.verdict_on_run().worst == case.whole_batch.in_tolerances
    loud = 100 * case.tolerances.floor / 4
    noisy = case.verdict_on_run(noise=Noise(seed=5, parameters=loud, gradients=loud))
    assert noisy.equivalent is False


def test_a_diverging_reference_leaves_readable_verdicts(tmp_path: Path) -> None:
    case = VerificationCase("plain", optimizer={"name": "sgd", "lr": 1e30})
    capture = case.runs.run()
    assert math.isnan(capture.quality["validation_loss"] or 0.0)
    made = VERIFICATION.model_copy(update={"verdicts": (case.verdict(capture),)})
    write_verification(tmp_path, made)
    assert read_verification(tmp_path) == made
    json.dumps(made.model_dump(mode="json"), allow_nan=False)


def test_what_rounding_hides_is_neither_proven_nor_refuted() -> None:
    case = verification_case()
    exact = replace(case.tolerances, exact_forward=True)

    def told(factor: float, **changes: Any) -> Verdict:
        first = tuple((losses[0] * factor, *losses[1:]) for losses in exact.reference.losses)
        return case.verdict(replace(exact.reference, losses=first, **changes), exact)

    assert told(1.0).equivalent is True
    undecided = told(1 + 1e-7)
    assert undecided.equivalent is None
    assert present(undecided.cause).text.startswith("undecided")
    assert told(1.01).equivalent is False
    other = tuple((("x",),) * STEPS for _ in exact.reference.draws)
    assert told(1 + 1e-7, draws=other).equivalent is False
