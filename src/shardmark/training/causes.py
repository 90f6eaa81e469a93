"""Explanations of a deviation, each a variation of the reference that is run and compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from shardmark.analysis.evidence import Array, Evidence
from shardmark.analysis.parity import (
    NAMES,
    TINY,
    Tolerances,
    checks_of,
    first_deviation,
    norm,
)
from shardmark.experiment.schema import Recipe
from shardmark.results.verification import Cause, Check
from shardmark.training.variation import Variation

Run = Callable[[Variation], Evidence]
"""The evidence of the reference with a variation."""

EXPLAINED = 0.1
"""An explanation must leave at most this part of the deviation."""
EXPLAINED_BY_REPRESENTATION = 0.9
"""Enough where every value found also fits into the suspected type: orders of adding differ."""

TENSOR_CHECKS = frozenset(NAMES.values())

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One possible cause."""

    text: str
    variation: Variation
    setting: str | None = None
    needs: float = EXPLAINED
    compares: frozenset[str] | None = None
    """Only these checks; None is every one with a tolerance."""


def cause_of(
    found: Evidence,
    checks: Sequence[Check],
    tolerances: Tolerances,
    *,
    recipe: Recipe,
    run: Run,
    whole_batch: Callable[[], Evidence],
) -> Cause:
    """The cause of the first check that does not hold, or what could be excluded."""
    first = first_deviation(found, checks, tolerances)
    place = f" ({first.where})" if first.where else ""
    start = f"{first.name}{place}"
    plain = _plain(found, first, tolerances)
    if plain is not None:
        return Cause(text=plain[0], evidence=plain[1], first_deviation=start)
    best: tuple[float, Explanation] | None = None
    for explanation in _explanations(found, first, tolerances.reference, recipe):
        varied = _as_expected(run(explanation.variation), tolerances)
        left = _deviation(checks_of(found, varied), explanation.compares)
        before = _deviation(checks, explanation.compares)
        explained = before > 1 and left <= max(1.0, explanation.needs * before)
        if explained and (best is None or left < best[0]):
            best = (left, explanation)
    if best is not None:
        left, explanation = best
        before = _deviation(checks, explanation.compares)
        return Cause(
            text=explanation.text,
            evidence=f"the reference trained so differs by {left:.3g} tolerances; "
            f"trained as defined, by {before:.3g}",
            setting=explanation.setting,
            first_deviation=start,
        )
    return _by_elimination(
        found, first, start=start, tolerances=tolerances, run=run, whole_batch=whole_batch
    )


def _as_expected(reference: Evidence, tolerances: Tolerances) -> Tolerances:
    """The same tolerances around another reference: disturbed runs move along."""
    base = tolerances.reference
    moved = [_moved(run, base, reference) for run in tolerances.disturbed]
    return replace(tolerances, reference=reference, disturbed=moved)


def _moved(run: Evidence, base: Evidence, to: Evidence) -> Evidence:
    return Evidence(
        initial_sha256=to.initial_sha256,
        sample_ids=to.sample_ids,
        draws=to.draws,
        losses=tuple(
            tuple(t + (r - b) for r, b, t in zip(*three, strict=True))
            for three in zip(run.losses, base.losses, to.losses, strict=True)
        ),
        learning_rates=to.learning_rates,
        optimizer_steps=to.optimizer_steps,
        tensors={
            part: {n: to.tensors[part][n] + (a - base.tensors[part][n]) for n, a in named.items()}
            for part, named in run.tensors.items()
        },
        buffers=tuple(
            {n: t[n] + (a - b[n]) for n, a in r.items()}
            for r, b, t in zip(run.buffers, base.buffers, to.buffers, strict=True)
        ),
        quality={
            name: None
            if value is None or base.quality[name] is None or to.quality[name] is None
            else to.quality[name] + (value - base.quality[name])  # type: ignore[operator]
            for name, value in run.quality.items()
        },
        samples_evaluated=to.samples_evaluated,
    )


def _deviation(checks: Sequence[Check], compared: frozenset[str] | None) -> float:
    """The largest deviation in tolerances, of the checks that have one."""
    return max(
        check.in_tolerances
        for check in checks
        if check.in_tolerances is not None and (compared is None or check.name in compared)
    )


def _plain(found: Evidence, first: Check, tolerances: Tolerances) -> tuple[str, str] | None:
    """Causes that can be read off without a trial."""
    expected = tolerances.reference
    if first.name == "initial weights":
        shas = dict(enumerate(sha[:12] for sha in found.initial_sha256))
        return "different initial weights", (
            f"hash by rank {shas}, the seed's {expected.initial_sha256[0][:12]}"
        )
    if first.name == "learning rate":
        return "different learning rate", f"{first.found} where the recipe gives {first.expected}"
    if first.name == "random draws":
        return "different random draws (proposal sampling)", (
            f"{first.where}: {first.found}, expected {first.expected}; weights and samples are "
            "the same"
        )
    if first.name == "sample ids":
        return _samples(found, expected)
    if first.name == "buffers":
        return _other_rank(found, tolerances)
    return None


def _other_rank(found: Evidence, tolerances: Tolerances) -> tuple[str, str] | None:
    """Whether rank 0 has another rank's buffers, which are then evaluated."""
    for rank, buffers in enumerate(tolerances.reference.buffers):
        off = [
            norm(found.buffers[0].get(name, np.float32(0)) - buffer)
            / max(tolerances.buffer(rank, name), TINY)
            for name, buffer in buffers.items()
        ]
        if rank > 0 and off and max(off) <= 1:
            return (
                f"buffers are not synchronised: rank {rank}'s are evaluated, not rank 0's",
                f"rank 0 reports rank {rank}'s buffers to {max(off):.3g} tolerances",
            )
    return None


def _samples(found: Evidence, expected: Evidence) -> tuple[str, str]:
    for step in range(len(expected.learning_rates)):
        mine = [i for rank in found.sample_ids for i in rank[step]]
        wanted = [i for rank in expected.sample_ids for i in rank[step]]
        if mine == wanted:
            continue
        repeated = sorted(i for i, count in Counter(mine).items() if count > 1)
        if repeated and len(set(wanted)) == len(wanted):
            return "repeated samples", (
                f"step {step + 1} takes {len(repeated)} samples more than once: {repeated[:8]}"
            )
        same = sorted(mine) == sorted(wanted)
        what = "the same samples, shared out otherwise" if same else "other samples"
        return "different batch shares", f"step {step + 1} has {what}"
    return "different batch shares", "ranks' shares are exchanged"


def _explanations(
    found: Evidence, first: Check, expected: Evidence, recipe: Recipe
) -> Iterator[Explanation]:
    if first.name in ("losses",):
        yield from _of_forward(recipe)
    yield from _of_gradient(found, expected, recipe)
    yield from _of_update(found, expected, recipe)
    yield from _of_buffers(len(expected.losses))


def _of_forward(recipe: Recipe) -> Iterator[Explanation]:
    for name, dtype in TYPES.items():
        if name != recipe.precision:
            yield Explanation(
                text=f"computation in a lower precision ({name})",
                variation=Variation(compute=dtype),
                setting="precision",
                needs=0.5,
            )
    yield Explanation(
        text="every rank draws the same random numbers (dropout, proposal sampling)",
        variation=Variation(same_draws=True),
    )


def _of_gradient(found: Evidence, expected: Evidence, recipe: Recipe) -> Iterator[Explanation]:
    ranks, parts = len(expected.losses), recipe.gradient_accumulation
    factor = _fitted(found, expected)
    known: list[tuple[float, str]] = []
    if ranks > 1:
        known.append((ranks, f"gradients are summed over the {ranks} ranks, not averaged"))
        known.append((1 / ranks, f"gradients are divided by the {ranks} ranks twice"))
    if parts > 1:
        known.append((parts, f"gradients of the {parts} micro-batches are summed, not averaged"))
        known.append((1 / parts, f"gradients are divided by the {parts} micro-batches twice"))
    if ranks > 1 and parts > 1:
        both = "gradients are summed over ranks and micro-batches, not averaged"
        known.append((ranks * parts, both))
    if factor is not None and abs(factor - 1) > 1e-4:
        # With as many ranks as micro-batches the numbers cannot tell them apart.
        near = [(value, text) for value, text in known if abs(value - factor) < 1e-3 * value]
        yield Explanation(
            text=" or ".join(text for _, text in near) or f"gradients are scaled by {factor:.6g}",
            variation=Variation(gradient_factor=near[0][0] if near else factor),
        )
    for rank in range(ranks if ranks > 1 else 0):
        yield Explanation(
            text=f"gradients are not averaged: only rank {rank}'s is used",
            variation=Variation(only_rank=rank),
            compares=TENSOR_CHECKS,  # every rank has parameters of its own by then
        )
    for name, dtype in TYPES.items():
        if recipe.precision == name or not _fits(found.tensors.get("gradient", {}).values(), dtype):
            continue
        yield Explanation(
            text=f"gradients are reduced in a lower precision ({name})",
            variation=Variation(reduction=dtype),
            setting="the strategy's precision of the reduction",
            needs=EXPLAINED_BY_REPRESENTATION,
        )


def _of_update(found: Evidence, expected: Evidence, recipe: Recipe) -> Iterator[Explanation]:
    if recipe.gradient_clipping is not None:
        yield Explanation(
            text="gradients are not clipped",
            variation=Variation(clipping=math.inf),
            setting="gradient_clipping",
        )
    for value in _clipping_values(found, expected, recipe):
        default = ", DeepSpeed's default" if abs(value - 1.0) < 1e-3 else ""
        yield Explanation(
            text=f"gradients are clipped to norm {value:.4g}{default}",
            variation=Variation(clipping=value),
            setting="gradient_clipping",
        )
    if recipe.optimizer.weight_decay:
        sets: dict[str, Callable[[str, tuple[int, ...]], bool]] = {
            "weight decay is not applied": lambda _, __: False,
            "weight decay spares biases and norms": lambda _, shape: len(shape) > 1,
            "weight decay spares biases": lambda name, _: not name.endswith("bias"),
            "weight decay is applied to biases and norms only": lambda _, shape: len(shape) < 2,
        }
        for text, decays in sets.items():
            yield Explanation(text=text, variation=Variation(decays=decays), setting="weight_decay")
    for name, dtype in TYPES.items():
        if _fits(found.tensors["parameters after step 1"].values(), dtype):
            yield Explanation(
                text=f"master weights are kept in a lower precision ({name})",
                variation=Variation(masters=dtype),
                setting="the strategy's precision of master weights",
                needs=EXPLAINED_BY_REPRESENTATION,
            )
    for step in range(len(expected.learning_rates)):
        yield Explanation(
            text=f"the update of step {step + 1} is skipped",
            variation=Variation(skipped=frozenset({step})),
        )


def _of_buffers(ranks: int) -> Iterator[Explanation]:
    for rank in range(1, ranks):
        yield Explanation(
            text=f"buffers are not synchronised: rank {rank}'s are evaluated, not rank 0's",
            variation=Variation(evaluated_rank=rank),
        )
    yield Explanation(
        text="rank 0's buffers are broadcast before each forward pass",
        variation=Variation(buffers="broadcast"),
        setting="broadcast_buffers",
    )
    yield Explanation(
        text="buffers (batch norm's running statistics) are not updated",
        variation=Variation(buffers="frozen"),
    )


def _fitted(found: Evidence, expected: Evidence) -> float | None:
    """The constant that takes the expected gradient nearest to the one found."""
    mine, wanted = found.tensors.get("gradient", {}), expected.tensors["gradient"]
    product = square = 0.0
    for name, tensor in wanted.items():
        if name in mine:
            product += float(np.vdot(mine[name].astype(np.float64), tensor.astype(np.float64)))
            square += norm(tensor) ** 2
    return product / square if square else None


def _clipping_values(found: Evidence, expected: Evidence, recipe: Recipe) -> list[float]:
    """Norms to try: DeepSpeed's default, and for SGD the one that the first update shows."""
    gradient = expected.tensors["gradient"]
    whole = float(np.sqrt(sum(norm(tensor) ** 2 for tensor in gradient.values())))
    values = [1.0]
    if recipe.optimizer.name == "sgd" and whole > 0 and expected.learning_rates[0] > 0:
        part = "parameters after step 1"
        product = sum(
            float(np.vdot(expected.tensors[part][n] - found.tensors[part].get(n, 0.0), tensor))
            for n, tensor in gradient.items()
        )
        kept = 1 + product / (expected.learning_rates[0] * whole**2)
        if 0 < kept < 1 and abs(kept * whole - 1.0) > 1e-2:
            values.append(kept * whole)
    return [value for value in values if value < whole]


def _fits(arrays: object, dtype: torch.dtype) -> bool:
    """Whether (nearly) all values are numbers of that type."""
    total = exact = 0
    for array in arrays:  # type: ignore[attr-defined]  # a view of arrays
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        exact += int((tensor.to(dtype).float() == tensor).sum())
        total += tensor.numel()
    return total > 0 and exact >= 0.99 * total


def _by_elimination(
    found: Evidence,
    first: Check,
    *,
    start: str,
    tolerances: Tolerances,
    run: Run,
    whole_batch: Callable[[], Evidence],
) -> Cause:
    """What remains when no variation reproduces the numbers."""
    expected = tolerances.reference
    whole = whole_batch()
    gradient = found.tensors.get("gradient", {})
    before = _distance(gradient, expected.tensors["gradient"])
    after = _distance(gradient, whole.tensors["gradient"])
    if after < EXPLAINED * before:
        return Cause(
            text="batch norm takes its statistics over all ranks (synchronised batch norm)",
            evidence=f"the gradient is {after / before:.2g} times as far from one device's on the "
            "whole batch as from the definition's",
            first_deviation=start,
        )
    if first.name == "losses" and first.where is not None and first.where.endswith("step 1"):
        drawn = run(Variation(seed_offset=1))
        spread = abs(drawn.losses[0][0] - expected.losses[0][0])
        if spread > tolerances.loss(0, 0):
            return Cause(
                text="different random draws (dropout, proposal sampling)",
                evidence=f"weights and samples are the same, and other draws alone move the "
                f"reference's first loss by {spread:.3g}; the strategy's differs by "
                f"{abs(found.losses[0][0] - expected.losses[0][0]):.3g}",
                first_deviation=start,
            )
    return Cause(
        text="no known explanation reproduces the numbers",
        evidence="tried: scale, averaging, clipping, weight decay, precision, skipped steps, "
        "random draws, buffers",
        first_deviation=start,
    )


def _distance(mine: object, wanted: object) -> float:
    pairs: list[tuple[Array, Array]] = [(mine[n], wanted[n]) for n in wanted if n in mine]  # type: ignore[attr-defined, index, operator]
    return float(np.sqrt(sum(norm(a - b) ** 2 for a, b in pairs)))
