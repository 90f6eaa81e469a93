"""Clipping by the norm of gradients that several processes hold parts of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def clipping_factor(
    parts: Sequence[Tensor], largest_norm: float, group: dist.ProcessGroup | None
) -> Tensor:
    """What to multiply with, as `torch.nn.utils.clip_grad_norm_` does; shape (), on their device.

    `group` holds the processes that have the other parts; None where there are none.
    """
    squares = torch.stack([part.square().sum() for part in parts]).sum().cpu()
    if group is not None:
        dist.all_reduce(squares, group=group)
    factor = (largest_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    return factor.to(parts[0].device)
