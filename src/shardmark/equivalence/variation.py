"""Ways in which a training can differ from the reference's mathematics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Buffers = Literal["own", "broadcast", "frozen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """One deviation, or none.  `verify` runs the reference with it to see whether it explains."""

    gradient_factor: float = 1.0
    """Multiplies the averaged gradient before anything else uses it."""
    clipping: float | None = None
    """Largest 2-norm of the gradient; None is the recipe's."""
    decays: Callable[[str, tuple[int, ...]], bool] | None = None
    """Whether weight decay applies to a parameter of that name and shape; None is to all."""
    only_rank: int | None = None
    """Only this rank's gradient is used: nothing is averaged."""
    reduction: torch.dtype | None = None
    """Ranks' gradients are cast to this type before they are added."""
    masters: torch.dtype | None = None
    """Parameters are rounded to this type after every update."""
    compute: torch.dtype | None = None
    """Forward and backward run under autocast to this type."""
    skipped: frozenset[int] = frozenset()
    """Steps whose update is left out."""
    seed_offset: int = 0
    """Draws (dropout, proposals) come from other seeds."""
    same_draws: bool = False
    """Every rank draws what rank 0 draws."""
    buffers: Buffers = "own"
    """Each rank keeps its own, all get rank 0's before each pass, or none changes."""
    evaluated_rank: int = 0
    """Whose buffers are evaluated."""
    noise: Noise | None = None
    """Rounding-sized random errors: no deviation, but the measure of what one is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Relative errors of that standard size, drawn anew for each element (Parker 1997)."""

    seed: int
    parameters: float
    gradients: float


NOTHING = Variation()
