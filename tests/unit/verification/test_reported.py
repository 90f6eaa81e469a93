"""What the prover once got wrong."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmark.equivalence.compare import verdict_on
from shardmark.equivalence.parity import LARGEST
from shardmark.equivalence.variation import Variation
from shardmark.launch.verification import shown_number
from shardmark.results.verification import Verdict, read_verification, write_verification
from tests.unit.verification.evidence import STEPS, Court, OneBench, court
from tests.unit.verification.verdicts import VERIFICATION


@pytest.mark.parametrize("model", ["plain", "normed"])
def test_no_variation_explains_equal_numbers(model: str) -> None:
    judged = court(model)
    cause = judged.verdict(replace(judged.tolerances.reference, optimizer_steps=2)).cause
    assert cause is not None
    assert cause.text == "no known explanation reproduces the numbers"
    assert cause.first_deviation == "optimizer steps"


def test_missing_buffers_are_a_deviation() -> None:
    judged = court()
    verdict = judged.verdict(replace(judged.tolerances.reference, buffers=({}, {})))
    assert verdict.equivalent is False
    assert [check.name for check in verdict.checks if not check.holds] == ["buffers"]


def test_the_first_loss_comes_before_the_count_of_steps() -> None:
    judged = court()
    found = replace(judged.bench.run(Variation(compute=torch.bfloat16)), optimizer_steps=2)
    cause = judged.verdict(found).cause
    assert cause is not None
    assert cause.text == "computation in a lower precision (bf16)"


def test_what_is_not_finite_is_shown_so() -> None:
    assert shown_number(LARGEST) == "not finite"


def test_a_diverging_reference_leaves_readable_verdicts(tmp_path: Path) -> None:
    judged = Court("plain", optimizer={"name": "sgd", "lr": 1e30})
    found = judged.bench.run()
    assert math.isnan(found.quality["validation_loss"] or 0.0)
    made = VERIFICATION.model_copy(update={"verdicts": (judged.verdict(found),)})
    write_verification(tmp_path, made)
    assert read_verification(tmp_path) == made
    json.dumps(made.model_dump(mode="json"), allow_nan=False)


def test_synchronised_batch_norm_is_tested_before_draws_are_blamed() -> None:
    judged = court()
    whole = replace(judged.bench, ranks=1).run()
    reference = judged.tolerances.reference
    found = replace(
        whole,
        losses=whole.losses * 2,
        buffers=whole.buffers * 2,
        sample_ids=reference.sample_ids,
        draws=reference.draws,
        initial_sha256=reference.initial_sha256,
    )
    cause = judged.verdict(found).cause
    assert cause is not None
    assert "synchronised batch norm" in cause.text


def test_what_rounding_hides_is_neither_proven_nor_refuted() -> None:
    judged = court()
    exact = replace(judged.tolerances, exact_forward=True)
    benches = OneBench(judged.bench)
    benches._only = judged.bench, exact
    reference = exact.reference

    def told(factor: float, **changes: Any) -> Verdict:
        first = tuple((losses[0] * factor, *losses[1:]) for losses in reference.losses)
        found = replace(reference, losses=first, **changes)
        return verdict_on(found, judged.trial, STEPS, benches)

    assert told(1.0).equivalent is True
    undecided = told(1 + 1e-7)
    assert undecided.equivalent is None
    assert undecided.cause is not None
    assert undecided.cause.text.startswith("cannot be told")
    assert told(1.01).equivalent is False
    other = tuple((("x",),) * STEPS for _ in reference.draws)
    assert told(1 + 1e-7, draws=other).equivalent is False
