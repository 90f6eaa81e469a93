"""Tensors of a rank on their way into a checkpoint and back: its own shards, as plain tensors.

`torch.distributed.checkpoint` would need a file system that all nodes share, and takes a step with
an optimizer that has no state yet, which the workers would count.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

STEP_KEY = "step"
"""Adam's count of updates, which stays on the CPU wherever its parameter is."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, as a reference without a gradient."""
    from torch.distributed.tensor import DTensor

    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def named_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {f"buffer/{name}": buffer.detach() for name, buffer in module.named_buffers()}


def load_buffers(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give the module the buffers that `named_buffers` gave."""
    for name, buffer in module.named_buffers():
        buffer.detach().copy_(tensors[f"buffer/{name}"])


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """This rank's part of the optimizer's state, by key and parameter name."""
    return {
        f"optimizer/{key}/{name}": local(value)
        for name, parameter in named.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    named: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
) -> None:
    """Give the optimizer the state of `optimizer_tensors`; others are cleared."""
    for parameter in named.values():
        optimizer.state.pop(parameter, None)
    for full_name, value in tensors.items():
        kind, _, rest = full_name.partition("/")
        if kind == "optimizer":
            key, _, name = rest.partition("/")
            parameter = named[name]
            optimizer.state[parameter][key] = (
                value if key == STEP_KEY else _placed_as(parameter, value)
            )


def _placed_as(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """On the parameter's device, and sharded as it is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return value.to(parameter.device)
    if value.shape != parameter.to_local().shape:
        return value  # a count or a product that is the whole parameter's
    return DTensor.from_local(
        value.to(parameter.to_local().device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
