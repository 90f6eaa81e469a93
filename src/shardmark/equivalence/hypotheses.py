"""Possible explanations of a deviation, each a variation of the reference to be run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from shardmark.core.recipe import Recipe
from shardmark.equivalence.evidence import Evidence
from shardmark.equivalence.parity import NAMES, norm
from shardmark.equivalence.variation import Variation
from shardmark.results.verification import Check

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


def explanations(
    found: Evidence, first: Check, expected: Evidence, recipe: Recipe
) -> Iterator[Explanation]:
    """Those that the first check that does not hold leaves possible."""
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
