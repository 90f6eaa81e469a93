"""Measurements of the units of a model in one traced step."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shardmark.predict.trace.chains import ZERO, Total, Work

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


class TracedUnits:
    """Units of a step in the order of the forward pass, and the one that is computed now."""

    def __init__(self, begun_bytes: Total) -> None:
        self.units: list[UnitTrace] = []
        self.in_backward = False
        self.at = 0
        """Position of the present unit."""
        self._owners: dict[int, UnitTrace] = {}
        """Unit of each parameter, by the parameter's id."""
        self._begin("start", begun_bytes, block=False)

    @property
    def present(self) -> UnitTrace:
        return self.units[self.at]

    def enter(self, name: str, live: Total, *, block: bool) -> None:
        """End the present unit of the forward pass, and begin another one."""
        self.end(live)
        self._begin(name, live, block=block)

    def end(self, live: Total) -> None:
        self.present.saved_bytes = live.minus(self.present.begun_bytes)

    def _begin(self, name: str, live: Total, *, block: bool) -> None:
        node: int = torch._C._autograd._get_sequence_nr()
        self.at = len(self.units)
        self.units.append(UnitTrace(name, block, first_node=node, begun_bytes=live))

    def go_to_node(self) -> tuple[int, bool]:
        """Make the unit of the autograd node that computes now the present one.

        Returns the node's number, and whether the node computes something again.  The number is
        -1 in the forward pass, and while gradients accumulate.
        """
        if not self.in_backward:
            return -1, False
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        if not 0 <= number < 2**63:  # the node accumulates a parameter's gradient
            return -1, torch.is_grad_enabled()
        after = bisect_right(self.units, number, key=lambda unit: unit.first_node)
        self.at = max(0, after - 1)
        return number, torch.is_grad_enabled()  # activation checkpointing

    def assign(self, parameters: Iterable[nn.Parameter]) -> None:
        """Assign parameters to the present unit, if no earlier unit has used them."""
        for parameter in parameters:
            if id(parameter) not in self._owners:
                self._owners[id(parameter)] = self.present
                self.present.parameters.append(parameter)

    def assign_rest(self, parameters: Iterable[nn.Parameter]) -> None:
        """Assign the parameters that no module has used to the first unit."""
        self.units[0].parameters += [p for p in parameters if id(p) not in self._owners]

    def owner(self, parameter: torch.Tensor) -> UnitTrace:
        return self._owners.get(id(parameter), self.units[0])
