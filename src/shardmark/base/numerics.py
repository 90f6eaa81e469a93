"""Numerical differences from single-device training that a strategy makes on purpose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

HalfPrecision = Literal["bf16", "fp16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Casts:
    """Forward and backward passes use 16-bit copies of the fp32 parameters that updates change.

    Buffers stay in fp32.  The model's outputs are cast to fp32.
    """

    precision: HalfPrecision
    units: Literal["blocks", "layers", "root"]
    """Modules whose inputs are cast, in addition to the root module's."""
    gradients: HalfPrecision | Literal["fp32"]
    """Precision in which a rank accumulates gradients over micro-batches.  Their mean over the
    ranks is computed in fp32 and rounded to this precision before the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD:
    """Gradient matrices are reduced as products of two low-rank factors, with error feedback.

    Source: Vogels, Karimireddy and Jaggi, NeurIPS 2019, algorithms 1 and 2.
    """

    rank: int
    start_step: int
    """Number of steps before compression begins: their gradients are reduced uncompressed."""
    seed: int
    """Seed of the initial factors."""
    min_compression_rate: int
    """A matrix is compressed only if it has over this many times the elements of its factors."""

    def factor_rank(self, rows: int, columns: int) -> int:
        """Rank of the factors of a matrix of this shape; 0 if it is reduced uncompressed."""
        rank = min(self.rank, rows, columns)
        compresses = rank * (rows + columns) * self.min_compression_rate < rows * columns
        return rank if compresses else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterOptimizer:
    """SGD on the ranks' mean change of the parameters in a round of local steps."""

    learning_rate: float
    momentum: float
    nesterov: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSteps:
    """Ranks update their own parameters and synchronise them once in `period_steps` steps."""

    period_steps: int
    fragments: int = 1
    """Number of groups of parameters that are synchronised in turn."""
    outer: OuterOptimizer | None = None
    """None: the mean of the ranks' parameters replaces them."""

    def is_due(self, fragment: int, step: int) -> bool:
        """Return whether the fragment is synchronised after this many steps."""
        offset = fragment * self.period_steps // self.fragments
        return step > 0 and (step - offset) % self.period_steps == 0

    def assign_fragments(self, sizes: Mapping[str, int]) -> list[list[str]]:
        """Return each fragment's parameter names, in the model's order and of similar sizes.

        `sizes` maps the name of each parameter to its number of elements.
        """
        fragments: list[list[str]] = [[] for _ in range(self.fragments)]
        total, before = max(1, sum(sizes.values())), 0
        for name, elements in sizes.items():
            middle = before + elements / 2
            fragments[min(self.fragments - 1, int(middle * self.fragments / total))].append(name)
            before += elements
        return fragments


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """A strategy's intended numerics, which the reference of `verify` reproduces.

    The defaults are those of training on a single device.
    """

    casts: Casts | None = None
    reduction_precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision to which each rank's gradient is cast, and in which gradients are averaged.  With
    fp32 they keep the type of the weights."""
    message_precision: Literal["fp32", "bf16"] = "fp32"
    """Precision to which a rank's gradients are rounded before their mean is computed in fp32, and
    the parameters after each update before a pass uses them.  Updates change fp32 parameters."""
    power_sgd: PowerSGD | None = None
    local_steps: LocalSteps | None = None

    @property
    def descriptions(self) -> tuple[str, ...]:
        """Differences from a single device, as clauses that follow 'by its own definition'."""
        clauses = []
        if self.casts is not None:
            clauses.append(f"parameters are cast to {self.casts.precision} (native), not autocast")
            if self.casts.gradients != "fp32":
                clauses.append(f"gradients are kept in {self.casts.gradients}")
        if self.reduction_precision != "fp32":
            clauses.append(f"gradients are reduced in {self.reduction_precision}")
        if self.message_precision != "fp32":
            clauses.append(f"gradients and parameters travel in {self.message_precision}")
        if self.power_sgd is not None:
            clauses.append(f"gradients are reduced by PowerSGD of rank {self.power_sgd.rank}")
        if self.local_steps is not None:
            synchronisation = (
                "parameters are averaged"
                if self.local_steps.outer is None
                else "an outer optimizer updates the parameters"
            )
            clauses.append(f"{synchronisation} every {self.local_steps.period_steps} steps")
        return tuple(clauses)

    @property
    def minimum_steps(self) -> int:
        """Number of steps in which every part of the numerics takes effect at least twice."""
        power_sgd, local_steps = self.power_sgd, self.local_steps
        compressed = 1 if power_sgd is None else power_sgd.start_step + 3
        # Two rounds, and the first step of the next one.
        return max(compressed, 1 if local_steps is None else 2 * local_steps.period_steps + 1)


ONE_DEVICE = Numerics()
