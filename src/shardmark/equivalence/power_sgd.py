"""PowerSGD by its definition, for the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardmark.core.numerics import PowerSGD
from shardmark.strategies.powersgd import first_factor


@dataclass(kw_only=True, eq=False)
class PlayedPowerSGD:
    """One iteration of subspace iteration a step, on the mean of all ranks' gradients.

    All that ranks add up is linear in their gradients and errors, of which the means are therefore
    enough.  Bases of a space differ between methods, and the projection onto it does not.
    Source: Vogels, Karimireddy and Jaggi, NeurIPS 2019, algorithms 1 and 2.
    """

    power_sgd: PowerSGD = field(kw_only=False)
    _steps: int = 0
    _errors: dict[str, Tensor] = field(default_factory=dict)
    """What the mean gradient has lost so far, (rows, columns)."""
    _rights: dict[str, Tensor] = field(default_factory=dict)
    """(columns, thin)"""

    def reduce(self, gradients: Mapping[str, Tensor]) -> None:
        """Put what ranks decompress in the place of each mean gradient that is compressed."""
        self._steps += 1
        if self._steps <= self.power_sgd.start_step:
            return
        for name, gradient in gradients.items():
            rows, columns = gradient.shape[0], gradient.numel() // gradient.shape[0]
            if not self.power_sgd.factor_rank(rows, columns):
                continue
            of_bucket = gradient.as_strided((rows, columns), (columns, 1))  # in order of memory
            matrix = of_bucket
            if name in self._errors:
                matrix = of_bucket + self._errors[name]
            else:
                first = first_factor(self.power_sgd, name, rows, columns)
                self._rights[name] = first.to(gradient.device)
            left = torch.linalg.qr(matrix @ torch.linalg.qr(self._rights[name]).Q).Q
            self._rights[name] = matrix.T @ left
            reduced = left @ self._rights[name].T
            self._errors[name] = matrix - reduced
            of_bucket.copy_(reduced)
