"""The cause of a deviation: read off, or the hypothesis with which the reference repeats it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from shardmark.core.numerics import ONE_DEVICE, Numerics
from shardmark.core.recipe import Recipe
from shardmark.equivalence.capture import Array, Capture
from shardmark.equivalence.compare import (
    NAMES,
    SKIPPED,
    TINY,
    Tolerances,
    checks_of,
    equal,
    first_deviation,
    norm,
    step_numbers,
)
from shardmark.equivalence.reference import Hypothesis
from shardmark.results.verification import Cause, Check
from shardmark.train.exchanged_group import CannotPlayError

REDUCED_IN = "precision of the reduction"

EXPLAINED_BY_REPRESENTATION = 0.9
"""Enough where every value captured also fits into the suspected type: orders of adding differ."""

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

Run = Callable[[Hypothesis], Capture]
"""The reference's capture with a hypothesis."""


def cause_of(
    capture: Capture,
    checks: Sequence[Check],
    tolerances: Tolerances,
    *,
    recipe: Recipe,
    numerics: Numerics,
    run: Run,
) -> Cause:
    """The cause of the first check that does not hold, or what could be excluded."""
    first = first_deviation(capture, checks, tolerances)
    cause = (
        _read_off(capture, first, tolerances)
        or _clipped_in_parts(capture, first, tolerances.reference, recipe)
        or _repeated(capture, checks, first, tolerances, recipe=recipe, numerics=numerics, run=run)
        or _by_elimination(capture, first, tolerances, run=run)
    )
    location = f" ({first.where})" if first.where else ""
    return cause.model_copy(update={"first_deviation": f"{first.name}{location}"})


def _cause(text: str, evidence: str, setting: str | None = None) -> Cause:
    return Cause(text=text, evidence=evidence, setting=setting, first_deviation="")


def _repeated(
    capture: Capture,
    checks: Sequence[Check],
    first: Check,
    tolerances: Tolerances,
    *,
    recipe: Recipe,
    numerics: Numerics,
    run: Run,
) -> Cause | None:
    """The hypothesis that leaves least of the deviation, if one explains it."""
    best: tuple[float, Hypothesis] | None = None
    possible = hypotheses(capture, first, tolerances.reference, recipe)
    for hypothesis in chain(_of_own(numerics, len(capture.losses)), possible):
        try:
            expected = replace(tolerances, reference=run(hypothesis))
        except CannotPlayError:
            continue  # neither shown nor refuted
        left = _deviation(checks_of(capture, expected), hypothesis.compares)
        before = _deviation(checks, hypothesis.compares)
        explains = before > 1 and left <= max(1.0, hypothesis.leaves_at_most * before)
        if explains and (best is None or left < best[0]):
            best = (left, hypothesis)
    if best is None:
        return None
    left, hypothesis = best
    return _cause(
        hypothesis.text,
        f"the reference trained so differs by {left:.3g} tolerances; "
        f"trained as defined, by {_deviation(checks, hypothesis.compares):.3g}",
        hypothesis.setting,
    )


def _deviation(checks: Sequence[Check], compared: frozenset[str] | None) -> float:
    """The largest deviation in tolerances, of the checks that have one."""
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
        yield from _of_forward(len(expected.losses), recipe)
    yield from _of_weights(expected, recipe)
    yield from _of_gradient(capture, expected, recipe)
    yield from _of_update(capture, expected, recipe)
    yield from _of_buffers(len(expected.losses))


def _of_own(numerics: Numerics, ranks: int) -> Iterator[Hypothesis]:
    if numerics != ONE_DEVICE:
        promised = "; ".join(numerics.descriptions)
        yield Hypothesis(
            text=f"it computes as one device does, and not as it says: {promised}", one_device=True
        )
    for rank in range(ranks if numerics.local_steps is not None else 0):
        yield Hypothesis(
            text=f"of the first round only rank {rank}'s steps count: the other ranks' are"
            " discarded",
            first_round_of=rank,
        )


def _of_forward(ranks: int, recipe: Recipe) -> Iterator[Hypothesis]:
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


def _of_weights(expected: Capture, recipe: Recipe) -> Iterator[Hypothesis]:
    """A mean of means differs only where samples weigh other than 1."""
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


def _of_gradient(capture: Capture, expected: Capture, recipe: Recipe) -> Iterator[Hypothesis]:
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
            compares=TENSOR_CHECKS,  # every rank has parameters of its own by then
            only_rank=rank,
        )
    for name, dtype in TYPES.items():
        gradients = capture.tensors.get("gradient", {}).values()
        if recipe.precision != name and _fits(gradients, dtype):
            yield Hypothesis(
                text=f"gradients are reduced in a lower precision ({name})",
                setting="the strategy's precision of the reduction",
                leaves_at_most=EXPLAINED_BY_REPRESENTATION,
                reduction=dtype,
            )


def _of_update(capture: Capture, expected: Capture, recipe: Recipe) -> Iterator[Hypothesis]:
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
        if _fits(capture.tensors["parameters after the first update"].values(), dtype):
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


def _of_buffers(ranks: int) -> Iterator[Hypothesis]:
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


def _evaluates_other_buffers(rank: int) -> str:
    return f"buffers are not synchronised: rank {rank}'s are evaluated, not rank 0's"


def _fitted_factor(capture: Capture, expected: Capture) -> float | None:
    """The constant that takes the expected gradient nearest to the captured one."""
    actual, wanted = capture.tensors.get("gradient", {}), expected.tensors["gradient"]
    product = square = 0.0
    for name, tensor in wanted.items():
        if name in actual:
            product += float(np.vdot(actual[name].astype(np.float64), tensor.astype(np.float64)))
            square += norm(tensor) ** 2
    return product / square if square else None


def _clipping_values(capture: Capture, expected: Capture, recipe: Recipe) -> list[float]:
    """Norms to try: DeepSpeed's default, and for SGD the one that the first update shows."""
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
        actual = numerics.reduction_precision if _fits(gradients, dtype) else "a higher precision"
        yield equal(REDUCED_IN, actual, numerics.reduction_precision)


def _fits(arrays: Iterable[Array], dtype: torch.dtype) -> bool:
    """True if at least 99 % of the values are representable in the type."""
    total = exact = 0
    for array in arrays:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        exact += int((tensor.to(dtype).float() == tensor).sum())
        total += tensor.numel()
    return total > 0 and exact >= 0.99 * total


def _read_off(capture: Capture, first: Check, tolerances: Tolerances) -> Cause | None:
    """Causes that need no run of the reference."""
    expected = tolerances.reference
    if first.name == "initial weights":
        return _other_weights(capture, expected)
    read = {
        REDUCED_IN: (f"gradients are not reduced in {first.expected}", f"found {first.found}"),
        "learning rate": (
            "different learning rate",
            f"{first.found} where the recipe gives {first.expected}",
        ),
    }
    if first.name in read:
        return _cause(*read[first.name])
    if first.name == "random draws":
        return _cause(
            "different random draws (proposal sampling)",
            f"{first.where}: {first.found}, expected {first.expected}; weights and samples are "
            "the same",
        )
    if first.name == "sample ids":
        return _other_samples(capture, expected)
    if first.name == "sample weights":
        evidence = f"{first.where}: {first.found}, expected {first.expected}; samples are the same"
        return _cause("different weights of the same samples", evidence)
    compared = {"buffers": _other_ranks_buffers, SKIPPED: _skips_of_ranks}.get(first.name)
    return compared(capture, tolerances) if compared is not None else None


def _other_weights(capture: Capture, expected: Capture) -> Cause:
    actual, wanted = capture.tensors["parameters"].keys(), expected.tensors["parameters"].keys()
    if actual > wanted:
        return _cause(
            f"tied weights are not tied any more: {', '.join(sorted(actual - wanted))}",
            "the strategy has parameters that the model does not have",
        )
    shas = dict(enumerate(sha[:12] for sha in capture.initial_sha256))
    seeds = expected.initial_sha256[0][:12]
    return _cause("different initial weights", f"hash by rank {shas}, the seed's {seeds}")


def _clipped_in_parts(
    capture: Capture, first: Check, expected: Capture, recipe: Recipe
) -> Cause | None:
    """Find out from SGD's first update if parts of the model are clipped by their own norms.

    An update is the gradient times what clipping leaves of it, which is the same in each part.
    """
    part, largest = "parameters after the first update", recipe.gradient_clipping
    skipped = set(expected.skipped[0])
    rate = next((r for step, r in enumerate(expected.learning_rates) if step not in skipped), 0.0)
    if first.name != NAMES[part] or largest is None or recipe.optimizer.name != "sgd" or not rate:
        return None
    squares = {name: norm(tensor) ** 2 for name, tensor in expected.tensors["gradient"].items()}
    total_norm = math.sqrt(sum(squares.values()))
    wanted = min(1.0, largest / total_norm) if total_norm else 1.0
    left = {
        name: wanted
        + float(np.vdot(expected.tensors[part][name] - capture.tensors[part][name], gradient))
        / (rate * squares[name])
        for name, gradient in expected.tensors["gradient"].items()
        if name in capture.tensors[part]
        # Of small gradients the update is lost in the rounding of the parameter.
        and ROUNDING * norm(expected.tensors[part][name])
        < 0.002 * wanted * rate * math.sqrt(squares[name])
    }
    parts: list[list[str]] = []
    for name in sorted(left, key=left.__getitem__):
        if parts and math.isclose(left[name], left[parts[-1][0]], rel_tol=0.01):
            parts[-1].append(name)
        else:
            parts.append([name])
    norms = [math.sqrt(sum(squares[name] for name in names)) for names in parts]
    factors = [left[names[0]] for names in parts]
    by_part = (min(1.0, largest / part_norm) for part_norm in norms if part_norm)
    if len(parts) < 2 or not np.allclose(factors, [*by_part], rtol=0.02):
        return None
    return _cause(
        "gradients are clipped by the norms of parts of the model, not by that of all",
        f"by {', '.join(f'{value:.4g}' for value in norms)}, where all together have "
        f"{total_norm:.4g}; the ranks have to add up the squares of their norms",
        "gradient_clipping",
    )


def _skips_of_ranks(capture: Capture, _: Tolerances) -> Cause | None:
    """Find ranks that skip different steps."""
    if len(set(capture.skipped)) == 1:
        return None
    evidence = "; ".join(
        f"rank {r}: {step_numbers(steps)}" for r, steps in enumerate(capture.skipped)
    )
    return _cause("ranks do not skip the same steps", evidence)


def _other_ranks_buffers(capture: Capture, tolerances: Tolerances) -> Cause | None:
    """Find the rank whose buffers rank 0 evaluates in place of its own."""
    for rank, buffers in enumerate(tolerances.reference.buffers):
        off = [
            norm(capture.buffers[0].get(name, np.float32(0)) - buffer)
            / max(tolerances.allowed("buffers", rank, name), TINY)
            for name, buffer in buffers.items()
        ]
        if rank > 0 and off and max(off) <= 1:
            return _cause(
                _evaluates_other_buffers(rank),
                f"rank 0 reports rank {rank}'s buffers to {max(off):.3g} tolerances",
            )
    return None


def _other_samples(capture: Capture, expected: Capture) -> Cause:
    for step in range(len(expected.learning_rates)):
        actual = [i for rank in capture.sample_ids for i in rank[step]]
        wanted = [i for rank in expected.sample_ids for i in rank[step]]
        if actual == wanted:
            continue
        repeated = sorted(i for i, count in Counter(actual).items() if count > 1)
        if repeated and len(set(wanted)) == len(wanted):
            return _cause(
                "repeated samples",
                f"step {step + 1} takes {len(repeated)} samples more than once: {repeated[:8]}",
            )
        same = sorted(actual) == sorted(wanted)
        samples = "the same samples, shared out otherwise" if same else "other samples"
        return _cause("different batch shares", f"step {step + 1} has {samples}")
    return _cause("different batch shares", "ranks' shares are exchanged")


def _by_elimination(
    capture: Capture,
    first: Check,
    tolerances: Tolerances,
    *,
    run: Run,
) -> Cause:
    """The most specific cause that the checks show if no hypothesis reproduces the numbers."""
    expected = tolerances.reference
    gradient = capture.tensors.get("gradient", {})
    if first.name == "losses" and first.where is not None and first.where.endswith("step 1"):
        drawn = run(Hypothesis(seed_offset=1))
        spread = abs(drawn.losses[0][0] - expected.losses[0][0])
        off = abs(capture.losses[0][0] - expected.losses[0][0])
        if spread > tolerances.allowed("losses", 0, 0):
            return _cause(
                "different random draws (dropout, proposal sampling)",
                "weights and samples are the same; other draws alone move the reference's first "
                f"loss by {spread:.3g}; the strategy's differs by {off:.3g}",
            )
        return _cause(
            "the model computes something else of the same samples",
            f"their weights are the same, nothing is drawn; the first loss differs by {off:.3g}. "
            "Where ranks have parts of a sequence, look at positions and masks",
        )
    wrong = [
        name
        for name in expected.tensors["gradient"]
        if norm(gradient.get(name, np.float32(0)) - expected.tensors["gradient"][name])
        > tolerances.allowed("tensors", "gradient", name)
    ]
    if first.name == NAMES["gradient"] and len(wrong) > len(expected.tensors["gradient"]) / 2:
        return _cause(
            "gradients are wrong where losses hold",
            f"those of {len(wrong)} parameters, and not by a factor. Ranks that have parts of a "
            "sample need the sum of theirs",
        )
    if first.name == NAMES["gradient"] and wrong:
        others = len(expected.tensors["gradient"]) - len(wrong)
        return _cause(
            "the gradients of some parameters alone are wrong",
            f"of {', '.join(wrong[:3])}{', ...' if len(wrong) > 3 else ''}; {others} others hold. "
            "A layer that sees a part of its inputs on each rank needs the sum over those ranks",
        )
    return _cause(
        "no known explanation reproduces the numbers",
        "tried: scale, averaging, clipping, weight decay, precision, skipped steps, random draws, "
        "batch norm, buffers",
    )
