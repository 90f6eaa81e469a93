"""Optimizers that torch does not have in one class.  They need full parameters, not shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardmark.base.errors import InputError

HIDDEN_MATRIX = "hidden_matrix"
"""Attribute of a parameter, and key of an optimizer group, that Muon updates."""


def check_hidden_matrices(matrices: Iterable[object]) -> None:
    """Raise `InputError` if a model has no parameter that Muon updates."""
    if not any(True for _ in matrices):
        raise InputError(
            "recipe.optimizer.name",
            "muon, and the model has no trained matrix in repeated blocks of layers",
            "use adamw, or a task whose blocks(model) names them; convolutions are no matrices",
        )


class Lamb(torch.optim.Optimizer):
    """LAMB: Adam's update of each tensor, scaled to the norm of the tensor.

    Source: You et al., ICLR 2020, algorithm 2, with the identity for its function of the norm.  As
    in the authors' code, a tensor of norm 0, such as a new bias, takes the update as it is.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)  # on the CPU, where reading it does not wait
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        steps, (beta1, beta2) = int(state["step"]), group["betas"]
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1) / (1 - beta1**steps)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        change = mean.div_((square / (1 - beta2**steps)).sqrt_().add_(group["eps"]))
        change.add_(parameter, alpha=group["weight_decay"])
        norm, change_norm = parameter.norm(), change.norm()
        ratio = torch.where((norm > 0) & (change_norm > 0), norm / change_norm, 1.0)
        parameter.addcmul_(change, ratio, value=-group["lr"])


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for groups with a true `HIDDEN_MATRIX`, AdamW for the other groups.

    Both complete the groups of this optimizer when they are made, and change its state in a step.
    Source: Jordan et al., kellerjordan.github.io/posts/muon (2024).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        weight_decay: float,
        *,
        muon: dict[str, Any],
        adamw: dict[str, Any],
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        super().__init__(params, defaults | {HIDDEN_MATRIX: False})
        self._muon = torch.optim.Muon(self._groups(True), **defaults, **muon)
        self._adamw = torch.optim.AdamW(self._groups(False), **defaults, **adamw)

    def _groups(self, hidden: bool) -> list[dict[str, Any]]:
        groups = [group for group in self.param_groups if group[HIDDEN_MATRIX] == hidden]
        return groups or [{"params": []}]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for optimizer, hidden in ((self._muon, True), (self._adamw, False)):
            # Groups may have been added, and the state may have been loaded.
            optimizer.param_groups, optimizer.state = self._groups(hidden), self.state
            if any(group["params"] for group in optimizer.param_groups):
                optimizer.step()  # type: ignore[no-untyped-call]  # torch's
        return loss
