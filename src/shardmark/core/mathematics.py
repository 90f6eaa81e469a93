"""What a strategy computes on purpose, where that is not one device's mathematics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Sixteen = Literal["bf16", "fp16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Casts:
    """Passes compute with 16-bit copies of the parameters, updates change fp32 ones.

    Buffers stay fp32, and what the model returns becomes fp32.
    """

    precision: Sixteen
    units: Literal["blocks", "layers", "root"]
    """Modules whose inputs are cast: the whole model's always."""
    gradients: Sixteen | Literal["fp32"]
    """What a rank adds its micro-batches in.  The mean over ranks is taken in fp32, rounded to this
    and updated with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD:
    """Matrices of gradients are reduced as products of two thin ones, and what is lost is added to
    the next step's (Vogels, Karimireddy and Jaggi, NeurIPS 2019, algorithms 1 and 2)."""

    rank: int
    start: int
    """Steps before it, whose gradients are reduced whole."""
    seed: int
    """Of the first thin matrices."""
    least_saving: int
    """A matrix is reduced whole unless it has more than this many times its factors' elements."""

    def thin(self, rows: int, columns: int) -> int:
        """Columns of the factors of such a matrix; 0 where it is reduced whole."""
        rank = min(self.rank, rows, columns)
        saves = rank * (rows + columns) * self.least_saving < rows * columns
        return rank if saves else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterOptimizer:
    """SGD on the mean of what the ranks' rounds took from the parameters."""

    learning_rate: float
    momentum: float
    nesterov: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSteps:
    """Each rank updates parameters of its own, and all meet once in a round of so many steps."""

    period_steps: int
    fragments: int = 1
    """Groups of parameters that meet in turn."""
    outer: OuterOptimizer | None = None
    """None: the mean of the ranks' parameters replaces them."""

    def due(self, fragment: int, step: int) -> bool:
        """Whether the fragment is synchronised after so many steps."""
        offset = fragment * self.period_steps // self.fragments
        return step > 0 and (step - offset) % self.period_steps == 0

    def fragments_of(self, sizes: Mapping[str, int]) -> list[list[str]]:
        """Names of parameters by fragment: in the model's order, of about as many elements."""
        parts: list[list[str]] = [[] for _ in range(self.fragments)]
        total, before = max(1, sum(sizes.values())), 0
        for name, elements in sizes.items():
            middle = before + elements / 2
            parts[min(self.fragments - 1, int(middle * self.fragments / total))].append(name)
            before += elements
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Mathematics:
    """Without any field set it is that of one device; `verify`'s reference computes what is set."""

    casts: Casts | None = None
    reduction: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Each rank's gradient is cast to it, divided by the number of ranks, and added up in it."""
    messages: Literal["fp32", "bf16"] = "fp32"
    """What a rank's gradients are rounded to before their mean is taken in fp32, and the parameters
    after each update before passes compute with them; updates change fp32 ones."""
    power_sgd: PowerSGD | None = None
    local_steps: LocalSteps | None = None

    @property
    def told(self) -> tuple[str, ...]:
        """What is not one device's, in plain words that follow 'by its own definition'."""
        told = []
        if self.casts is not None:
            told.append(f"parameters are cast to {self.casts.precision} (native), not autocast")
            if self.casts.gradients != "fp32":
                told.append(f"gradients are kept in {self.casts.gradients}")
        if self.reduction != "fp32":
            told.append(f"gradients are reduced in {self.reduction}")
        if self.messages != "fp32":
            told.append(f"gradients and parameters travel in {self.messages}")
        if self.power_sgd is not None:
            told.append(f"gradients are reduced by PowerSGD of rank {self.power_sgd.rank}")
        if self.local_steps is not None:
            what = (
                "parameters are averaged"
                if self.local_steps.outer is None
                else "an outer optimizer updates the parameters"
            )
            told.append(f"{what} every {self.local_steps.period_steps} steps")
        return tuple(told)

    @property
    def least_steps(self) -> int:
        """Of a training in which all of it takes place, and takes place again."""
        power_sgd, local_steps = self.power_sgd, self.local_steps
        compressed = 1 if power_sgd is None else power_sgd.start + 3
        # Two rounds, and the first step of the next one.
        return max(compressed, 1 if local_steps is None else 2 * local_steps.period_steps + 1)


ONE_DEVICE = Mathematics()
