"""Measurements of a unit in one traced step.  Imports torch for its types alone."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from shardmark.predict.trace.chains import ZERO, Total, Work

if TYPE_CHECKING:
    from torch import nn

Moments = NDArray[np.float64]

Pass = Literal["forward", "repeated", "backward", "gradient"]


@dataclass(slots=True)
class UnitTrace:
    """Measurements of one unit in one traced step."""

    name: str
    block: bool
    first_node: int
    """Number of the first autograd node that was made in the unit."""
    begun_bytes: Total
    """Live bytes before its forward pass."""
    saved_bytes: Total = ZERO
    parameters: list[nn.Parameter] = field(default_factory=list)
    replicated_fraction: float = 0.0
    gradient_bytes: int = 0
    entered_bytes: Total = ZERO
    """Live bytes before its backward pass."""
    reduced_bytes: Total = ZERO
    """Live bytes after the last of its gradients was complete."""
    operations: dict[Pass, list[Work]] = field(default_factory=lambda: defaultdict(list))
    moments: dict[Pass, list[tuple[Total, int]]] = field(default_factory=lambda: defaultdict(list))
    """Live bytes without complete gradients, and bytes of the unit's, after each operation; empty
    after the step."""
    moment_arrays: dict[Pass, Moments] = field(default_factory=dict)
    """The same after the step, a row for each operation: total and replicated live bytes, bytes of
    gradients."""

    def collect_moments(self) -> None:
        """Turn the moments into arrays: a step has many thousand."""
        for in_pass, of_pass in self.moments.items():
            if of_pass:
                rows = [(*live, gradients) for live, gradients in of_pass]
                self.moment_arrays[in_pass] = np.array(rows, dtype=np.float64)
        self.moments.clear()
