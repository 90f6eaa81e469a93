"""Finds the cause of a deviation: directly, or as the hypothesis that reproduces it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import itemgetter

import numpy as np
import torch

from shardmark.base.evidence.captures import (
    TINY,
    Array,
    Capture,
    Tolerances,
    deviation,
    equal,
    norm,
)
from shardmark.base.evidence.checks import Check
from shardmark.base.numerics import ONE_DEVICE, Numerics
from shardmark.base.recipe import Recipe
from shardmark.base.results.verification import Cause
from shardmark.bench.reference.compare import (
    DATA_SET,
    NAMES,
    SKIPPED,
    checks_of,
    first_deviation,
    step_numbers,
)
from shardmark.bench.reference.reference import Hypothesis
from shardmark.ranks.train.exchanged_group import CannotPlayError

REDUCED_IN = "precision of the reduction"

EXPLAINED_BY_REPRESENTATION = 0.9
"""Part of the deviation that may remain if every captured value is representable in the suspected
type: the ranks may add up in another order."""

TENSOR_CHECKS = frozenset(NAMES.values())

ROUNDING = float(np.finfo(np.float32).eps)

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

DECAYS: dict[str, Callable[[str, tuple[int, ...]], bool]] = {
    "weight decay is not applied": lambda _, __: False,
    "weight decay spares biases and norms": lambda _, shape: len(shape) > 1,
    "weight decay spares biases": lambda name, _: not name.endswith("bias"),
    "weight decay is applied to biases and norms only": lambda _, shape: len(shape) < 2,
}
"""Cause -> function that returns true for parameters that decay, by name and shape."""

RunReference = Callable[[Hypothesis], Capture]
"""Runs the reference with a hypothesis and returns its capture."""


def cause_of(
    capture: Capture,
    checks: Sequence[Check],
    tolerances: Tolerances,
    *,
    recipe: Recipe,
    numerics: Numerics,
    run: RunReference,
) -> Cause:
    """Return the cause of the first failed check, or a list of excluded causes."""
    first = first_deviation(capture, checks, tolerances)
    tried = chain(
        _numerics_hypotheses(numerics, len(capture.losses)),
        hypotheses(capture, first, tolerances.reference, recipe),
    )
    cause = (
        _direct_cause(capture, first, tolerances)
        or _clipping_cause(capture, first, tolerances.reference, recipe)
        or _reproduced_cause(capture, checks, tolerances, tried, run)
        or _cause_by_elimination(capture, first, tolerances, run)
    )
    location = f" ({first.where})" if first.where else ""
    return cause.model_copy(update={"first_deviation": f"{first.name}{location}"})


def _cause(text: str, evidence: str, setting: str | None = None) -> Cause:
    return Cause(text=text, evidence=evidence, setting=setting, first_deviation="")


def _reproduced_cause(
    capture: Capture,
    checks: Sequence[Check],
    tolerances: Tolerances,
    tried: Iterable[Hypothesis],
    run: RunReference,
) -> Cause | None:
    """Return the hypothesis that leaves the smallest deviation, or None if none explains it."""
    explaining: list[tuple[float, Hypothesis]] = []
    for hypothesis in tried:
        try:
            expected = replace(tolerances, reference=run(hypothesis))
        except CannotPlayError:
            continue  # the reference cannot test this hypothesis
        remaining = _deviation(checks_of(capture, expected), hypothesis.compares)
        before = _deviation(checks, hypothesis.compares)
        if before > 1 and remaining <= max(1.0, hypothesis.leaves_at_most * before):
            explaining.append((remaining, hypothesis))
    if not explaining:
        return None
    remaining, hypothesis = min(explaining, key=itemgetter(0))
    return _cause(
        hypothesis.text,
        f"the reference with this change differs by {remaining:.3g} tolerances; "
        f"the reference as defined, by {_deviation(checks, hypothesis.compares):.3g}",
        hypothesis.setting,
    )


def _deviation(checks: Sequence[Check], compared: frozenset[str] | None) -> float:
    """Return the largest deviation of the compared checks, in units of their tolerances."""
    return max(
        check.in_tolerances
        for check in checks
        if check.in_tolerances is not None and (compared is None or check.name in compared)
    )


def hypotheses(
    capture: Capture, first: Check, expected: Capture, recipe: Recipe
) -> Iterator[Hypothesis]:
    """Yield the hypotheses that may explain the first failed check."""
    if first.name == "losses":
        yield from _forward_hypotheses(len(expected.losses), recipe)
    yield from _weighting_hypotheses(expected, recipe)
    yield from _gradient_hypotheses(capture, expected, recipe)
    yield from _update_hypotheses(capture, expected, recipe)
    yield from _buffer_hypotheses(len(expected.losses), first)


def _numerics_hypotheses(numerics: Numerics, ranks: int) -> Iterator[Hypothesis]:
    if numerics != ONE_DEVICE:
        described = "; ".join(numerics.descriptions)
        yield Hypothesis(
            text=f"it computes as one device does, although its definition is: {described}",
            one_device=True,
        )
    for rank in range(ranks if numerics.local_steps is not None else 0):
        yield Hypothesis(
            text=f"only rank {rank}'s steps of the first round are used: the others are discarded",
            first_round_of=rank,
        )


def _forward_hypotheses(ranks: int, recipe: Recipe) -> Iterator[Hypothesis]:
    for name, dtype in TYPES.items():
        if name != recipe.precision:
            yield Hypothesis(
                text=f"computation in a lower precision ({name})",
                setting="precision",
                leaves_at_most=0.5,
                compute=dtype,
            )
    yield Hypothesis(
        text="every rank draws the same random numbers (dropout, proposal sampling)",
        same_draws=True,
    )
    if ranks > 1:
        synchronised = "all ranks (synchronised batch norm)"
        samples = "each rank's share" if recipe.sync_batch_norm else synchronised
        yield Hypothesis(
            text=f"batch norm takes its statistics over {samples}",
            setting="sync_batch_norm",
            sync_batch_norm=not recipe.sync_batch_norm,
        )


def _weighting_hypotheses(expected: Capture, recipe: Recipe) -> Iterator[Hypothesis]:
    """Yield hypotheses on the division by weights, if a sample has another weight than 1."""
    ids = chain.from_iterable(expected.sample_ids)
    weights = chain.from_iterable(expected.weights)
    if all(weight == len(share) for share, weight in zip(ids, weights, strict=True)):
        return
    if len(expected.losses) > 1:
        yield Hypothesis(
            text="each rank divides its loss by its own weight (a mean of means), "
            "not by the whole step's",
            divisor="share",
        )
    if recipe.gradient_accumulation > 1:
        yield Hypothesis(
            text="each micro-batch divides its loss by its own weight (a mean of means), "
            "not by the whole step's",
            divisor="micro-batch",
        )


def _gradient_hypotheses(
    capture: Capture, expected: Capture, recipe: Recipe
) -> Iterator[Hypothesis]:
    ranks, parts = len(expected.losses), recipe.gradient_accumulation
    candidates: list[tuple[float, str]] = []
    if ranks > 1:
        candidates.append((ranks, f"gradients are summed over the {ranks} ranks, not averaged"))
        candidates.append((1 / ranks, f"gradients are divided by the {ranks} ranks twice"))
    if parts > 1:
        candidates.append(
            (parts, f"gradients of the {parts} micro-batches are summed, not averaged")
        )
        candidates.append((1 / parts, f"gradients are divided by the {parts} micro-batches twice"))
    if ranks > 1 and parts > 1:
        both = "gradients are summed over ranks and micro-batches, not averaged"
        candidates.append((ranks * parts, both))
    factor = _fitted_factor(capture, expected)
    if factor is not None and abs(factor - 1) > 1e-4:
        # With as many ranks as micro-batches the numbers cannot tell them apart.
        near = [(value, text) for value, text in candidates if abs(value - factor) < 1e-3 * value]
        yield Hypothesis(
            text=" or ".join(text for _, text in near) or f"gradients are scaled by {factor:.6g}",
            gradient_factor=near[0][0] if near else factor,
        )
    for rank in range(ranks if ranks > 1 else 0):
        yield Hypothesis(
            text=f"gradients are not averaged: only rank {rank}'s is used",
            compares=TENSOR_CHECKS,  # parameters differ between ranks after the first update
            only_rank=rank,
        )
    for name, dtype in TYPES.items():
        gradients = capture.tensors.get("gradient", {}).values()
        if recipe.precision != name and _representable(gradients, dtype):
            yield Hypothesis(
                text=f"gradients are reduced in a lower precision ({name})",
                setting="the strategy's precision of the reduction",
                leaves_at_most=EXPLAINED_BY_REPRESENTATION,
                reduction=dtype,
            )


def _update_hypotheses(capture: Capture, expected: Capture, recipe: Recipe) -> Iterator[Hypothesis]:
    clipping = "gradient_clipping"
    if recipe.gradient_clipping is not None:
        yield Hypothesis(text="gradients are not clipped", setting=clipping, clipping=math.inf)
    for value in _clipping_values(capture, expected, recipe):
        default = ", DeepSpeed's default" if abs(value - 1.0) < 1e-3 else ""
        text = f"gradients are clipped to norm {value:.4g}{default}"
        yield Hypothesis(text=text, setting=clipping, clipping=value)
    text = "parameters that got no gradient are updated as with a gradient of zero"
    yield Hypothesis(text=text, unused_as_zero=True)
    yield Hypothesis(
        text="the task's parameter groups are not used: all parameters are one", one_group=True
    )
    if recipe.optimizer.weight_decay:
        for text, decays in DECAYS.items():
            yield Hypothesis(text=text, setting="weight_decay", decays=decays)
    for name, dtype in TYPES.items():
        parameters = capture.tensors["parameters after the first update"].values()
        if recipe.weights != name and _representable(parameters, dtype):
            yield Hypothesis(
                text=f"master weights are kept in a lower precision ({name})",
                setting="the strategy's precision of master weights",
                leaves_at_most=EXPLAINED_BY_REPRESENTATION,
                masters=dtype,
            )
    if recipe.optimizer.path is not None and len(expected.losses) > 1:
        yield Hypothesis(
            text="the optimizer updates flat pieces of the parameters, one for each rank, and does "
            "not work element by element",
            setting="recipe.optimizer: one that works element by element; or a strategy that keeps "
            "parameters whole (ddp, zro)",
            compares=TENSOR_CHECKS - {NAMES["optimizer state"]},  # pieces have other names
            flat_pieces=True,
        )
    for step in range(len(expected.learning_rates)):
        text = f"the update of step {step + 1} is skipped"
        yield Hypothesis(text=text, skipped=frozenset({step}))


def _buffer_hypotheses(ranks: int, first: Check) -> Iterator[Hypothesis]:
    for rank in range(1, ranks):
        yield Hypothesis(text=_evaluates_other_buffers(rank), evaluated_rank=rank)
    yield Hypothesis(
        text="rank 0's buffers are broadcast before each forward pass",
        setting="broadcast_buffers",
        buffers="broadcast",
    )
    yield Hypothesis(
        text="buffers (batch norm's running statistics) are not updated", buffers="frozen"
    )
    if ranks > 1 and first.name.startswith("evaluation"):
        yield Hypothesis(
            text="the model's own statistics are those of a share: it updates buffers in evaluation"
            " mode too, where each rank evaluates its samples",
            setting="the model: keep its statistics fixed in evaluation (observers: "
            "torch.ao.quantization.disable_observer)",
            evaluated_in_shares=True,
        )


def _evaluates_other_buffers(rank: int) -> str:
    return f"buffers are not synchronised: rank {rank}'s are evaluated, not rank 0's"


def _fitted_factor(capture: Capture, expected: Capture) -> float | None:
    """Return the factor of the least-squares fit of the captured to the expected gradient."""
    actual = capture.tensors.get("gradient", {})
    product = square = 0.0
    for name, tensor in expected.tensors["gradient"].items():
        if name in actual:
            product += float(np.vdot(actual[name].astype(np.float64), tensor.astype(np.float64)))
            square += norm(tensor) ** 2
    return product / square if square else None


def _clipping_values(capture: Capture, expected: Capture, recipe: Recipe) -> list[float]:
    """Return norms to try: DeepSpeed's default, and for SGD the norm that fits the first update."""
    gradient = expected.tensors["gradient"]
    total_norm = float(np.sqrt(sum(norm(tensor) ** 2 for tensor in gradient.values())))
    values = [1.0]
    skipped, rates = expected.skipped[0], enumerate(expected.learning_rates)
    rate = next((rate for step, rate in rates if step not in skipped), 0.0)
    if recipe.optimizer.name == "sgd" and total_norm > 0 and rate > 0:
        part = "parameters after the first update"
        product = sum(
            float(np.vdot(expected.tensors[part][n] - capture.tensors[part].get(n, 0.0), tensor))
            for n, tensor in gradient.items()
        )
        remaining = 1 + product / (rate * total_norm**2)
        if 0 < remaining < 1 and abs(remaining * total_norm - 1.0) > 1e-2:
            values.append(remaining * total_norm)
    return [value for value in values if value < total_norm]


def reduction_checks(capture: Capture, recipe: Recipe, numerics: Numerics) -> Iterator[Check]:
    """Check that reduced gradients are representable in the type of the reduction.

    A loss scale, which fp16 has, would take them out of its range.
    """
    gradients = capture.tensors.get("gradient", {}).values()
    dtype = TYPES.get(numerics.reduction_precision)
    if gradients and dtype is not None and recipe.precision != "fp16":
        actual = (
            numerics.reduction_precision
            if _representable(gradients, dtype)
            else "a higher precision"
        )
        yield equal(REDUCED_IN, actual, numerics.reduction_precision)


def _representable(arrays: Iterable[Array], dtype: torch.dtype) -> bool:
    """Return True if at least 99 % of the values are representable in the type."""
    total = exact = 0
    for array in arrays:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        exact += int((tensor.to(dtype).float() == tensor).sum())
        total += tensor.numel()
    return total > 0 and exact >= 0.99 * total


def _direct_cause(capture: Capture, first: Check, tolerances: Tolerances) -> Cause | None:
    """Return a cause that follows from the failed check without a run of the reference."""
    difference = f"{first.where}: {first.found}, expected {first.expected}"
    read = {
        REDUCED_IN: (f"gradients are not reduced in {first.expected}", f"found {first.found}"),
        "learning rate": (
            "different learning rate",
            f"{first.found} where the recipe gives {first.expected}",
        ),
        "random draws": (
            "different random draws (proposal sampling)",
            f"{difference}; weights and samples are the same",
        ),
        "sample weights": (
            "different weights of the same samples",
            f"{difference}; samples are the same",
        ),
    }
    if first.name in read:
        return _cause(*read[first.name])
    compared = {
        "initial weights": _initial_weights_cause,
        DATA_SET: _data_set_cause,
        "sample ids": _samples_cause,
        "buffers": _buffers_cause,
        SKIPPED: _skips_cause,
    }.get(first.name)
    return compared(capture, tolerances) if compared is not None else None


def _initial_weights_cause(capture: Capture, tolerances: Tolerances) -> Cause:
    expected = tolerances.reference
    names, defined = capture.tensors["parameters"].keys(), expected.tensors["parameters"].keys()
    if names > defined:
        return _cause(
            f"tied weights are not tied any more: {', '.join(sorted(names - defined))}",
            "the strategy has parameters that the model does not have",
        )
    shas = dict(enumerate(sha[:12] for sha in capture.initial_sha256))
    seeds = expected.initial_sha256[0][:12]
    return _cause("different initial weights", f"hash by rank {shas}, the seed's {seeds}")


def _clipping_cause(
    capture: Capture, first: Check, expected: Capture, recipe: Recipe
) -> Cause | None:
    """Detect from SGD's first update if parts of the model are clipped by their norms.

    The update divided by the gradient gives the factor of the clipping, which is the same for all
    parameters of a part.
    """
    part, largest = "parameters after the first update", recipe.gradient_clipping
    skipped = set(expected.skipped[0])
    rate = next((r for step, r in enumerate(expected.learning_rates) if step not in skipped), 0.0)
    if first.name != NAMES[part] or largest is None or recipe.optimizer.name != "sgd" or not rate:
        return None
    squares = {name: norm(tensor) ** 2 for name, tensor in expected.tensors["gradient"].items()}
    total_norm = math.sqrt(sum(squares.values()))
    expected_factor = min(1.0, largest / total_norm) if total_norm else 1.0
    factor_of = {
        name: expected_factor
        + float(np.vdot(expected.tensors[part][name] - capture.tensors[part][name], gradient))
        / (rate * squares[name])
        for name, gradient in expected.tensors["gradient"].items()
        if name in capture.tensors[part]
        # The update by a small gradient vanishes in the rounding of the parameter.
        and ROUNDING * norm(expected.tensors[part][name])
        < 0.002 * expected_factor * rate * math.sqrt(squares[name])
    }
    parts: list[list[str]] = []
    for name in sorted(factor_of, key=factor_of.__getitem__):
        if parts and math.isclose(factor_of[name], factor_of[parts[-1][0]], rel_tol=0.01):
            parts[-1].append(name)
        else:
            parts.append([name])
    norms = [math.sqrt(sum(squares[name] for name in names)) for names in parts]
    factors = [factor_of[names[0]] for names in parts]
    by_part = (min(1.0, largest / part_norm) for part_norm in norms if part_norm)
    if len(parts) < 2 or not np.allclose(factors, [*by_part], rtol=0.02):
        return None
    return _cause(
        "gradients are clipped by the norms of parts of the model, not by the norm of all",
        f"norms of the parts: {', '.join(f'{value:.4g}' for value in norms)}; of all gradients: "
        f"{total_norm:.4g}. The ranks have to add up the squares of their norms",
        "gradient_clipping",
    )


def _skips_cause(capture: Capture, _: Tolerances) -> Cause | None:
    """Find ranks that skip different steps."""
    if len(set(capture.skipped)) == 1:
        return None
    evidence = "; ".join(
        f"rank {r}: {step_numbers(steps)}" for r, steps in enumerate(capture.skipped)
    )
    return _cause("ranks do not skip the same steps", evidence)


def _buffers_cause(capture: Capture, tolerances: Tolerances) -> Cause | None:
    """Find the rank whose buffers rank 0 evaluates in place of its own."""
    for rank, buffers in enumerate(tolerances.reference.buffers):
        deviations = [
            deviation(capture.buffers[0].get(name), buffer)
            / max(tolerances.allowed("buffers", rank, name), TINY)
            for name, buffer in buffers.items()
        ]
        if rank > 0 and deviations and max(deviations) <= 1:
            return _cause(
                _evaluates_other_buffers(rank),
                f"rank 0 reports rank {rank}'s buffers, to within {max(deviations):.3g} tolerances",
            )
    return None


def _data_set_cause(capture: Capture, tolerances: Tolerances) -> Cause:
    sizes = [f"rank {rank} has {size}" for rank, size in enumerate(capture.data_set)]
    return _cause(
        "the data set differs between the ranks, or from that of one process",
        f"{'; '.join(sizes)}; one process has {tolerances.reference.data_set[0]}",
        "the task: return all samples in every process, whatever its RANK; Shardmark divides them"
        " over the ranks",
    )


def _samples_cause(capture: Capture, tolerances: Tolerances) -> Cause:
    expected = tolerances.reference
    for step in range(len(expected.learning_rates)):
        actual = [i for rank in capture.sample_ids for i in rank[step]]
        correct = [i for rank in expected.sample_ids for i in rank[step]]
        if actual == correct:
            continue
        repeated = sorted(i for i, count in Counter(actual).items() if count > 1)
        if repeated and len(set(correct)) == len(correct):
            return _cause(
                "repeated samples",
                f"step {step + 1} takes {len(repeated)} samples more than once: {repeated[:8]}",
            )
        same = sorted(actual) == sorted(correct)
        samples = "the same samples in other shares" if same else "other samples"
        return _cause("different batch shares", f"step {step + 1} has {samples}")
    return _cause("different batch shares", "the ranks have each other's shares")


def _cause_by_elimination(
    capture: Capture, first: Check, tolerances: Tolerances, run: RunReference
) -> Cause:
    """Return the most specific cause that the checks show; no hypothesis reproduces the numbers."""
    expected = tolerances.reference
    gradient = capture.tensors.get("gradient", {})
    if first.name == "losses" and first.where is not None and first.where.endswith("step 1"):
        drawn = run(Hypothesis(seed_offset=1))
        spread = abs(drawn.losses[0][0] - expected.losses[0][0])
        deviation = abs(capture.losses[0][0] - expected.losses[0][0])
        if spread > tolerances.allowed("losses", 0, 0):
            return _cause(
                "different random draws (dropout, proposal sampling)",
                "weights and samples are the same; other draws alone change the reference's first "
                f"loss by {spread:.3g}; the strategy's first loss differs by {deviation:.3g}",
            )
        return _cause(
            "the model computes something else from the same samples",
            "weights are the same, and no random numbers are drawn; the first loss differs by "
            f"{deviation:.3g}. If ranks have parts of a sequence, check positions and masks",
        )
    wrong = [
        name
        for name in expected.tensors["gradient"]
        if norm(gradient.get(name, np.float32(0)) - expected.tensors["gradient"][name])
        > tolerances.allowed("tensors", "gradient", name)
    ]
    if first.name == NAMES["gradient"] and len(wrong) > len(expected.tensors["gradient"]) / 2:
        return _cause(
            "gradients are wrong although losses are right",
            f"for {len(wrong)} parameters, not by a constant factor. Ranks that have parts of a "
            "sample need the sum of their gradients",
        )
    if first.name == NAMES["gradient"] and wrong:
        others = len(expected.tensors["gradient"]) - len(wrong)
        return _cause(
            "only the gradients of some parameters are wrong",
            f"{', '.join(wrong[:3])}{', ...' if len(wrong) > 3 else ''}; {others} others hold. "
            "A layer that gets a part of its inputs on each rank needs the sum over those ranks",
        )
    return _cause(
        "no known explanation reproduces the numbers",
        "tried: scale, averaging, clipping, weight decay, precision, skipped steps, random draws, "
        "batch norm, buffers",
    )
