"""fp16: the reference scales its loss as strategies do, and skips the steps that they skip."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from shardmark.base.results.verification import Verdict
from shardmark.bench.reference.reference import Hypothesis, Noise
from tests.unit.bench.reference.verification_cases import VerificationCase, with_tensor

LOUD = 2.4
"""Targets so large that the first loss overflows when it is scaled, and a later one does not."""


@cache
def loud(target_scale: float = LOUD) -> VerificationCase:
    return VerificationCase(
        "plain", precision="fp16", target_scale=target_scale, optimizer={"lr": 1e-2}
    )


def cause_text(verdict: Verdict) -> str:
    assert verdict.cause is not None
    return verdict.cause.text


def test_overflowing_steps_are_skipped_and_later_ones_compared() -> None:
    case = loud()
    skipped = case.reference.skipped[0]
    assert skipped == (0,)
    assert case.reference.tensors["gradient"], "of the step after it"
    assert case.verdict_on_run().equivalent
    rounding = case.tolerances.floor / 4
    verdict = case.verdict_on_run(noise=Noise(seed=7, parameters=rounding, gradients=2 * rounding))
    assert verdict.equivalent, [check for check in verdict.checks if not check.holds]
    wrong = case.verdict_on_run(Hypothesis(gradient_factor=2.0))
    assert "summed over the 2 ranks" in cause_text(wrong)


@pytest.mark.parametrize("step", [1, 2])
def test_another_skipped_step_is_refused_and_named(step: int) -> None:
    verdict = loud().verdict_on_run(Hypothesis(skipped=frozenset({step})))
    assert verdict.equivalent is False
    assert cause_text(verdict) == f"the update of step {step + 1} is skipped"
    (check,) = (check for check in verdict.checks if check.name == "skipped steps")
    assert (check.found, check.expected) == (f"1, {step + 1}", "1")


def test_a_training_that_never_updates_proves_nothing() -> None:
    case = loud(1e6)
    assert case.reference.skipped[0] == (0, 1, 2)
    verdict = case.verdict_on_run()
    assert verdict.equivalent is None
    assert "every step overflows" in cause_text(verdict)


def test_skipped_steps_that_rounding_decides_are_undecided() -> None:
    case = loud()
    other = replace(case.reference, skipped=((0, 1),) * 2)
    near = replace(case.tolerances, perturbed=(*case.tolerances.perturbed, other))
    assert case.verdict(case.reference, near).equivalent
    undecided = case.verdict(other, near)
    assert undecided.equivalent is None
    assert "rounding alone decides" in cause_text(undecided)
    # The run that skips otherwise says nothing of how far rounding goes.
    far = with_tensor(other, "parameters", {})
    assert replace(near, perturbed=(case.reference, far)).allowed("losses", 0, 1) < 1
