"""Each variation of the reference, taken for a strategy, is refused and named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from shardmark.equivalence.evidence import Evidence
from shardmark.equivalence.variation import Noise, Variation
from tests.unit.verification.evidence import Court, array, court, with_tensor

BF16 = torch.bfloat16

NAMED: dict[str, Variation] = {
    "gradients are scaled by 1.7": Variation(gradient_factor=1.7),
    "gradients are summed over the 2 ranks, not averaged": Variation(gradient_factor=2.0),
    "gradients are divided by the 2 ranks twice": Variation(gradient_factor=0.5),
    "gradients are clipped to norm 0.2": Variation(clipping=0.2),
    "weight decay is not applied": Variation(decays=lambda _, __: False),
    "weight decay spares biases and norms": Variation(decays=lambda _, shape: len(shape) > 1),
    "weight decay spares biases": Variation(decays=lambda name, _: not name.endswith("bias")),
    "weight decay is applied to biases and norms only": Variation(
        decays=lambda _, shape: len(shape) < 2
    ),
    "gradients are reduced in a lower precision (bf16)": Variation(reduction=BF16),
    "gradients are reduced in a lower precision (fp16)": Variation(reduction=torch.float16),
    "master weights are kept in a lower precision (bf16)": Variation(masters=BF16),
    "gradients are not averaged: only rank 0's is used": Variation(only_rank=0),
    "gradients are not averaged: only rank 1's is used": Variation(only_rank=1),
    "the update of step 1 is skipped": Variation(skipped=frozenset({0})),
    "the update of step 2 is skipped": Variation(skipped=frozenset({1})),
    "the update of step 3 is skipped": Variation(skipped=frozenset({2})),
    "rank 0's buffers are broadcast before each forward pass": Variation(buffers="broadcast"),
    "buffers (batch norm's running statistics) are not updated": Variation(buffers="frozen"),
    "every rank draws the same random numbers (dropout, proposal sampling)": Variation(
        same_draws=True
    ),
    "different random draws (dropout, proposal sampling)": Variation(seed_offset=17),
    "computation in a lower precision (bf16)": Variation(compute=BF16),
    "buffers are not synchronised: rank 1's are evaluated, not rank 0's": Variation(
        evaluated_rank=1
    ),
}


def rounded(variation: Variation) -> Variation:
    """With the rounding of another order of operations: no strategy repeats the reference's."""
    return replace(variation, noise=Noise(seed=99, parameters=1e-7, gradients=1e-7))


@pytest.mark.parametrize("text", NAMED)
def test_the_cause_is_named(text: str) -> None:
    judged = court()
    verdict = judged.verdict(judged.bench.run(NAMED[text]))
    assert verdict.equivalent is False
    assert verdict.cause is not None
    assert verdict.cause.text == text, verdict.cause
    assert verdict.cause.evidence
    assert verdict.cause.first_deviation != "none"


SURVIVES_ROUNDING = [
    text
    for text in NAMED
    if "precision" not in text  # rounding itself: what was rounded is rounded no longer
]


@pytest.mark.parametrize("text", SURVIVES_ROUNDING)
def test_the_cause_is_named_through_rounding(text: str) -> None:
    judged = court()
    cause = judged.verdict(judged.bench.run(rounded(NAMED[text]))).cause
    assert cause is not None
    assert cause.text == text, cause


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (4.0, "gradients of the 4 micro-batches are summed, not averaged"),
        (0.25, "gradients are divided by the 4 micro-batches twice"),
        (8.0, "gradients are summed over ranks and micro-batches, not averaged"),
        (2.0, "gradients are summed over the 2 ranks, not averaged"),
    ],
)
def test_accumulation_is_told_from_averaging(factor: float, text: str) -> None:
    judged = court("plain", accumulation=4)
    cause = judged.verdict(judged.bench.run(Variation(gradient_factor=factor))).cause
    assert cause is not None
    assert cause.text == text


def test_what_the_numbers_cannot_tell_apart_is_said_together() -> None:
    judged = court("plain", accumulation=2)
    cause = judged.verdict(judged.bench.run(Variation(gradient_factor=2.0))).cause
    assert cause is not None
    assert cause.text == (
        "gradients are summed over the 2 ranks, not averaged"
        " or gradients of the 2 micro-batches are summed, not averaged"
    )


def test_deepspeeds_clipping_is_called_by_its_name() -> None:
    judged = Court("plain", target_scale=50.0)
    cause = judged.verdict(judged.bench.run(Variation(clipping=1.0))).cause
    assert cause is not None
    assert cause.text == "gradients are clipped to norm 1, DeepSpeed's default"
    assert cause.setting == "gradient_clipping"


ADAMW = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1}


@pytest.mark.parametrize(
    "text",
    [
        "gradients are summed over the 2 ranks, not averaged",
        "weight decay is not applied",
        "weight decay spares biases and norms",
        "gradients are reduced in a lower precision (bf16)",
        "the update of step 2 is skipped",
        "gradients are not averaged: only rank 1's is used",
    ],
)
def test_adamw_hides_no_cause(text: str) -> None:
    """It forgets the gradient's scale, and the gradient of the first step does not."""
    judged = Court("plain", optimizer=ADAMW)
    cause = judged.verdict(judged.bench.run(NAMED[text])).cause
    assert cause is not None
    assert cause.text == text, cause


def other_samples(ids: tuple[tuple[tuple[int, ...], ...], ...]) -> Evidence:
    return replace(court().tolerances.reference, sample_ids=ids)


def test_samples_are_told_apart() -> None:
    judged = court()
    ids = judged.tolerances.reference.sample_ids
    moved = tuple(tuple(tuple((i + 1) % 24 for i in step) for step in rank) for rank in ids)
    for found, text, evidence in (
        ((ids[0], ids[0]), "repeated samples", "step 1 takes 8 samples more than once"),
        (ids[::-1], "different batch shares", "the same samples, shared out otherwise"),
        (moved, "different batch shares", "step 1 has other samples"),
    ):
        cause = judged.verdict(other_samples(found)).cause
        assert cause is not None
        assert cause.text == text
        assert evidence in cause.evidence


def test_weights_and_rates_are_read_off() -> None:
    judged = court()
    reference = judged.tolerances.reference
    weights = judged.verdict(replace(reference, initial_sha256=("f" * 64,) * 2)).cause
    assert weights is not None
    assert weights.text == "different initial weights"
    assert "ffffffffffff" in weights.evidence
    rates = judged.verdict(replace(reference, learning_rates=(0.1, 0.1, 0.2))).cause
    assert rates is not None
    assert rates.text == "different learning rate"
    assert rates.first_deviation == "learning rate (step 3)"
    assert rates.evidence == "0.2 where the recipe gives 0.1"


def test_synchronised_batch_norm_is_known() -> None:
    """Without dropout, one device on the whole batch has the same gradient and statistics."""
    judged = Court("norm only")
    whole = replace(judged.bench, ranks=1).run()
    reference = judged.tolerances.reference
    found = replace(
        reference,
        tensors=whole.tensors,
        losses=tuple(tuple(loss + 0.1 for loss in rank) for rank in reference.losses),
        buffers=whole.buffers * 2,
    )
    cause = judged.verdict(found).cause
    assert cause is not None
    assert "synchronised batch norm" in cause.text


def test_no_cause_is_made_up() -> None:
    judged = court()
    reference = judged.tolerances.reference
    draws = np.random.default_rng(3)
    noise = {
        name: (tensor + draws.normal(size=tensor.shape)).astype(np.float32)
        for name, tensor in reference.tensors["parameters"].items()
    }
    verdict = judged.verdict(with_tensor(reference, "parameters", noise))
    assert verdict.equivalent is False
    assert verdict.cause is not None
    assert verdict.cause.text == "no known explanation reproduces the numbers"
    assert verdict.cause.first_deviation.startswith("parameters after the last step")


def test_a_diverged_training_is_refused_without_a_cause() -> None:
    judged = court()
    reference = judged.tolerances.reference
    nan = {"0.weight": array(*[np.nan] * 32).reshape(8, 4)}
    broken = {**reference.tensors["gradient"], **nan}
    verdict = judged.verdict(with_tensor(reference, "gradient", broken))
    assert verdict.equivalent is False
    assert verdict.cause is not None
    assert verdict.cause.text == "no known explanation reproduces the numbers"


@pytest.mark.parametrize("model", ["plain", "normed"])
@pytest.mark.parametrize("seed", range(20))
def test_rounding_alone_is_no_deviation(model: str, seed: int) -> None:
    """Disturbances of the size that tolerances are derived from, in draws that they never saw."""
    judged = court(model)
    rounding = judged.tolerances.floor / 4
    noise = Noise(seed=1000 + seed, parameters=rounding, gradients=2 * rounding)
    verdict = judged.verdict(judged.bench.run(Variation(noise=noise)))
    assert verdict.equivalent, [check for check in verdict.checks if not check.holds]
    assert verdict.cause is None


def test_the_reference_is_equivalent_to_itself() -> None:
    judged = court()
    verdict = judged.verdict(judged.bench.run())
    assert verdict.equivalent
    assert verdict.worst == 0.0


def test_a_hundred_times_the_rounding_is_seen() -> None:
    """The margin is 8: what is far above it does not pass."""
    judged = court("plain")
    rounding = judged.tolerances.floor / 4
    loud = Noise(seed=5, parameters=100 * rounding, gradients=100 * rounding)
    assert judged.verdict(judged.bench.run(Variation(noise=loud))).equivalent is False
