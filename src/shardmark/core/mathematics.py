"""What a strategy computes on purpose, where that is not one device's mathematics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
class Mathematics:
    """Without any field set it is that of one device; `verify`'s reference computes what is set."""

    reduction: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Each rank's gradient is cast to it, divided by the number of ranks, and added up in it."""
    power_sgd: PowerSGD | None = None

    @property
    def told(self) -> tuple[str, ...]:
        """What is not one device's, in plain words that follow 'as it defines it'."""
        told = []
        if self.reduction != "fp32":
            told.append(f"gradients are reduced in {self.reduction}")
        if self.power_sgd is not None:
            told.append(f"gradients are reduced by PowerSGD of rank {self.power_sgd.rank}")
        return tuple(told)

    @property
    def least_steps(self) -> int:
        """Of a training in which all of it takes place, and takes place again."""
        return 1 if self.power_sgd is None else self.power_sgd.start + 3


ONE_DEVICE = Mathematics()
