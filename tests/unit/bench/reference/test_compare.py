"""Each check fails when its quantity is off, and by as many tolerances as it is."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from shardmark.base.evidence.captures import MARGIN, PARTS, Capture, Tolerances
from shardmark.base.evidence.checks import LARGEST, Check
from shardmark.bench.reference.compare import NAMES, checks_of, first_deviation
from tests.unit.bench.reference.verification_cases import (
    array,
    handmade,
    tight,
    tolerances_of,
    with_tensor,
)


def off(part: str) -> Capture:
    """That part's tensor is 1 too large in its first element."""
    made = handmade()
    ((name, tensor),) = made.tensors[part].items()
    return with_tensor(made, part, {name: tensor + array(1.0, 0.0)})


def failing(capture: Capture, tolerances: Tolerances | None = None) -> list[Check]:
    return [check for check in checks_of(capture, tolerances or tight()) if not check.holds]


DEVIATIONS: dict[str, tuple[Capture, str | None]] = {
    "initial weights": (handmade(initial_sha256=("a" * 64, "b" * 64)), None),
    "sample ids": (handmade(sample_ids=(((0, 1), (4, 5)), ((2, 3), (7, 6)))), "rank 1, step 2"),
    "sample weights": (handmade(weights=((2.0, 2.0), (2.0, 3.0))), "rank 1, step 2"),
    "random draws": (handmade(draws=((("a",), ("b",)), (("c",), ("x",)))), "rank 1, step 2"),
    "learning rate": (handmade(learning_rates=(0.5, 0.5)), "rank 0, step 2"),
    "losses": (handmade(losses=((2.0, 1.0), (4.0, 3.1))), "rank 1, step 2"),
    "skipped steps": (handmade(skipped=((), (1,))), "rank 1"),
    "gradients of the first update": (off("gradient"), "weight"),
    "parameters after the first update": (off("parameters after the first update"), "weight"),
    "parameters after the last step": (off("parameters"), "weight"),
    "optimizer state after the last step": (off("optimizer state"), "weight/momentum_buffer"),
    "buffers": (handmade(buffers=({"mean": array(1.0)}, {"mean": array(2.1)})), "rank 1, mean"),
    "evaluation: validation_loss": (
        handmade(quality={"validation_loss": 2.1, "accuracy_top1": 0.5}),
        None,
    ),
    "evaluation: accuracy_top1": (
        handmade(quality={"validation_loss": 2.0, "accuracy_top1": 0.52}),
        None,
    ),
}
"""Captures that only one check refuses, by its name, and where; in the order of a training."""


def test_the_reference_passes_in_the_order_of_a_training() -> None:
    checks = checks_of(handmade(), tight())
    assert [check.name for check in checks] == [*DEVIATIONS]
    assert all(check.holds for check in checks)
    assert {check.in_tolerances for check in checks} == {None, 0.0}


@pytest.mark.parametrize("name", DEVIATIONS)
def test_only_the_check_of_what_is_off_fails(name: str) -> None:
    capture, where = DEVIATIONS[name]
    (check,) = failing(capture)
    assert (check.name, check.where) == (name, where)


def test_deviation_is_a_norm_in_units_of_the_tolerance() -> None:
    """The gradient (3, 4) has norm 5; its floor is 0.005; (1, 0) is 200 of them."""
    (check,) = failing(off("gradient"))
    assert check.found == pytest.approx(1.0)
    assert check.tolerance == pytest.approx(0.005)
    assert check.in_tolerances == pytest.approx(200.0)


def test_perturbed_runs_widen_the_tolerance_of_their_own_quantity_alone() -> None:
    near = with_tensor(handmade(), "gradient", {"weight": array(3.0, 4.25)})
    far = handmade(
        tensors={**handmade().tensors, "gradient": {"weight": array(3.0, 3.5)}},
        losses=((2.0, 1.0), (4.0, 3.5)),
        buffers=({"mean": array(1.0)}, {"mean": array(2.5)}),
        quality={"validation_loss": 2.25, "accuracy_top1": 0.5},
    )
    tolerances = tight(near, far)
    for widened, kept in (
        (("tensors", "gradient", "weight"), ("tensors", "parameters", "weight")),
        (("losses", 1, 1), ("losses", 0, 0)),
        (("buffers", 1, "mean"), ("buffers", 0, "mean")),
    ):
        assert tolerances.allowed(*widened) == pytest.approx(MARGIN * 0.5, rel=2e-3)
        assert tolerances.allowed(*kept) <= 0.002
    assert tolerances.allowed("quality", "validation_loss") == pytest.approx(MARGIN * 0.25 + 0.002)
    assert tolerances.allowed("quality", "accuracy_top1") == pytest.approx(0.01)
    assert failing(off("gradient"), tolerances) == []
    assert len(failing(off("parameters"), tolerances)) == 1


@pytest.mark.parametrize("given", ["sample_ids", "weights", "draws"])
def test_values_with_equal_prefixes_are_not_equal(given: str) -> None:
    """Ids in another order after the eighth, weights after the sixth digit, equally many draws."""
    entries: dict[str, Any] = {
        "sample_ids": (tuple(range(10)), (*range(8), 9, 8)),
        "weights": (1234567.0, 1234568.0),
        "draws": (("a", "b"), ("b", "a")),
    }
    expected, other = (handmade(**{given: ((entry,) * 2,) * 2}) for entry in entries[given])
    (check,) = failing(other, tolerances_of(expected))
    assert check.where == "rank 0, step 1"


def test_weights_of_losses_may_round() -> None:
    """Ranks add them up in fp32."""
    expected = handmade(weights=((1234567.0,) * 2,) * 2)
    rounded = handmade(weights=((1234568.0,) * 2,) * 2, weight_source="ranks add them up")
    assert failing(rounded, tolerances_of(expected)) == []
    checks = {check.name: check.found for check in checks_of(rounded, tolerances_of(expected))}
    assert checks["sample weights"] == "equal in 2 steps: ranks add them up"
    assert len(failing(replace(rounded, weights=((1.3e6,) * 2,) * 2), tolerances_of(expected))) == 1


@pytest.mark.parametrize(
    ("name", "value", "perturbed", "allowed"),
    [
        # A share may differ by one sample: a tie of scores turns the ranking.
        ("accuracy_top1", 0.5, 0.5, 0.01),
        ("map", 0.5, 0.5, 0.01),
        # One's own: counts, no count, and no share.
        ("iou", 0.5, 0.5, 0.01),
        ("rmse", 0.5, 0.5001, 0.0008 + 0.0005),
        ("rmse", 20.0, 20.0, 0.02),
    ],
)
def test_tolerance_of_a_share_is_one_sample(
    name: str, value: float, perturbed: float, allowed: float
) -> None:
    made, run = handmade(quality={name: value}), handmade(quality={name: perturbed})
    tolerances = tolerances_of(made, run)
    assert tolerances.allowed("quality", name) == pytest.approx(allowed)
    near, far = (handmade(quality={name: value - part * allowed}) for part in (0.99, 1.1))
    assert failing(near, tolerances) == []
    assert [check.name for check in failing(far, tolerances)] == [f"evaluation: {name}"]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_nonfinite_value_fails_and_is_a_number_in_json(value: float) -> None:
    for found in (
        handmade(losses=((2.0, 1.0), (4.0, value))),
        with_tensor(handmade(), "parameters", {"weight": array(0.0, value)}),
        handmade(buffers=({"mean": array(value)}, {"mean": array(2.0)})),
    ):
        (check,) = failing(found)
        assert check.in_tolerances == LARGEST
        assert Check.model_validate_json(check.model_dump_json()) == check


def masked(*values: float) -> Capture:
    """Both ranks have a buffer with infinite numbers, as causal masks and observers have."""
    return handmade(buffers=({"mask": array(0.0, *values)}, {"mask": array(0.0, *values)}))


def test_equal_infinite_numbers_of_a_buffer_are_equal() -> None:
    reference = masked(-math.inf, math.inf, 2.0)
    tolerances = tolerances_of(reference)
    assert failing(reference, tolerances) == []
    for values in ((-math.inf, math.inf, 3.0), (-math.inf, -math.inf, 2.0), (1.0, math.inf, 2.0)):
        (check,) = failing(masked(*values), tolerances)
        assert check.name == "buffers", "the infinite ones allow no deviation of the others"


def test_a_data_set_of_another_size_comes_before_its_samples() -> None:
    sizes, ids = ("24 samples", "12 samples"), (((0, 2),) * 2,) * 2
    checks = failing(handmade(data_set=sizes, sample_ids=ids))
    assert [check.name for check in checks] == ["data set", "sample ids"]
    assert (checks[0].found, checks[0].where) == ("12 samples", "rank 1")


def test_a_quality_that_one_side_lacks_fails() -> None:
    nothing = handmade(quality={"validation_loss": None})
    assert [(c.name, c.found) for c in failing(nothing)] == [
        ("evaluation: validation_loss", "None"),
        ("evaluation: accuracy_top1", "None"),
    ]


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_tensor_counts_as_zeros(part: str) -> None:
    made = handmade()
    without = {other: made.tensors[other] for other in PARTS if other != part}
    for capture in (with_tensor(made, part, {}), replace(made, tensors=without)):
        (check,) = failing(capture)
        assert check.name == NAMES[part]
        assert check.in_tolerances == pytest.approx(1000.0)


LATE_LOSS = ((2.0, 1.5), (4.0, 3.0))
EARLY_LOSS = ((2.5, 9.0), (4.0, 3.0))


@pytest.mark.parametrize(
    ("part", "losses", "given", "name", "where"),
    [
        ("gradient", LATE_LOSS, {}, "gradients of the first update", "weight"),
        (
            "parameters after the first update",
            LATE_LOSS,
            {},
            "parameters after the first update",
            "weight",
        ),
        ("parameters", LATE_LOSS, {}, "losses", "rank 0, step 2"),
        ("gradient", EARLY_LOSS, {}, "losses", "rank 0, step 1"),
        # What precedes the first loss comes before it.
        ("gradient", EARLY_LOSS, {"initial_sha256": ("b" * 64,) * 2}, "initial weights", None),
        ("gradient", EARLY_LOSS, {"learning_rates": (0.1, 0.1)}, "learning rate", "rank 0, step 1"),
    ],
)
def test_the_first_deviation_is_the_one_that_the_training_makes_first(
    part: str, losses: Any, given: dict[str, Any], name: str, where: str | None
) -> None:
    capture, tolerances = replace(off(part), losses=losses, **given), tight()
    check = first_deviation(capture, checks_of(capture, tolerances), tolerances)
    assert (check.name, check.where) == (name, where)


def test_tolerances_that_hide_a_factor_of_two_are_reported() -> None:
    far = with_tensor(handmade(), "gradient", {"weight": array(3.5, 4.0)})
    assert tight(far).hide_errors  # 8 x 0.5 of a norm of 5
    assert not tight().hide_errors


def test_an_exact_forward_pass_must_be_equal_to_the_last_bit() -> None:
    exact = replace(tight(), exact_forward=True)
    assert failing(handmade(), exact) == []
    nearly = handmade(losses=((2.0 + 1e-12, 1.0), (4.0, 3.0)))
    assert [check.name for check in failing(nearly, exact)] == ["losses"]
    later = handmade(losses=((2.0, 1.0 + 1e-6), (4.0, 3.0)))
    assert failing(later, exact) == []
