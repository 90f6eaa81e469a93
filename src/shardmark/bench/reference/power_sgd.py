"""PowerSGD by its definition, as a part of the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardmark.base.numerics import PowerSGD
from shardmark.ranks.strategies.powersgd import first_factor


@dataclass(kw_only=True, eq=False)
class ReferencePowerSGD:
    """PowerSGD with one subspace iteration per step, on the mean of all ranks' gradients.

    All sums over ranks are linear in their gradients and errors, so that the means suffice.  The
    basis of a subspace depends on the method, but the projection onto the subspace does not.
    Source: Vogels, Karimireddy and Jaggi, NeurIPS 2019, algorithms 1 and 2.
    """

    power_sgd: PowerSGD = field(kw_only=False)
    _steps: int = 0
    _errors: dict[str, Tensor] = field(default_factory=dict)
    """Accumulated error of the mean gradient, (rows, columns)."""
    _rights: dict[str, Tensor] = field(default_factory=dict)
    """Right factor, (columns, rank)."""

    def reduce(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace each compressed mean gradient by its decompressed value."""
        self._steps += 1
        if self._steps <= self.power_sgd.start_step:
            return
        for name, gradient in gradients.items():
            rows, columns = gradient.shape[0], gradient.numel() // gradient.shape[0]
            if not self.power_sgd.factor_rank(rows, columns):
                continue
            view = gradient.as_strided((rows, columns), (columns, 1))  # memory order
            matrix = view
            if name in self._errors:
                matrix = view + self._errors[name]
            else:
                first = first_factor(self.power_sgd, name, rows, columns)
                self._rights[name] = first.to(gradient.device)
            left = torch.linalg.qr(matrix @ torch.linalg.qr(self._rights[name]).Q).Q
            self._rights[name] = matrix.T @ left
            reduced = left @ self._rights[name].T
            self._errors[name] = matrix - reduced
            view.copy_(reduced)
