"""Batch norm over all ranks: torch's on GPUs, the same definition where torch refuses the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from shardmark.core.errors import StrategyUnavailable

KEY = "sync_batch_norm"
REMEDY = f"set recipe.{KEY} to false"


def synchronise_batch_norms(
    model: nn.Module, device: torch.device, *, compiled: bool = False
) -> nn.Module:
    """The model, whose batch norms take their statistics over all ranks of the process group.

    Raises `StrategyUnavailable` for a model without any, and for a norm with a pass of its own,
    which would be left out.  One rank alone has nothing to exchange.  Ours are not `compiled`.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if not norms:
        raise StrategyUnavailable(KEY, "the model has no batch norm", REMEDY)
    shipped = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    own = next((type(norm).__name__ for norm in norms if type(norm).forward not in shipped), None)
    if own is not None:
        raise StrategyUnavailable(KEY, f"{own} computes more than torch's batch norm", REMEDY)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return model
    if device.type != "cpu":
        convert: Callable[[nn.Module], nn.Module] = nn.SyncBatchNorm.convert_sync_batchnorm
        return convert(model)
    for norm in norms:
        forward: Any = partial(_over_all_ranks, norm, norm.forward)
        if compiled:  # the compiler would take the exchange apart
            forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]  # torch's
        norm.forward = forward  # type: ignore[method-assign]
    return model


def _over_all_ranks(
    norm: _BatchNorm, evaluated: Callable[[Tensor], Tensor], inputs: Tensor
) -> Tensor:
    """A batch norm's forward pass; `inputs` are (samples, channels, ...)."""
    if not norm.training:
        return evaluated(inputs)
    exact = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    normalised, mean, variance, count = _Normalised.apply(exact, norm.eps)
    if norm.running_mean is not None and norm.running_var is not None:
        assert norm.num_batches_tracked is not None, "all three are tracked, or none"
        norm.num_batches_tracked.add_(1)
        part = norm.momentum
        if part is None:  # a mean over all batches
            part = 1 / float(norm.num_batches_tracked)
        unbiased = variance * count / (count - 1)
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), part)
        norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), part)
    shape = (1, -1, *[1] * (inputs.dim() - 2))
    if norm.weight is not None:
        normalised = normalised * norm.weight.view(shape)
    if norm.bias is not None:
        normalised = normalised + norm.bias.view(shape)
    outputs: Tensor = normalised.to(inputs.dtype)
    return outputs


class _Normalised(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) over all ranks' samples, however many each has.

    One all-gather of 2 C + 1 numbers forward and one all-reduce of 2 C backward for C channels, as
    torch's `SyncBatchNorm`.  The statistics come along, without gradients.

    Source: Chan, Golub and LeVeque (1982), on adding up variances; Ioffe and Szegedy, ICML 2015,
    on the gradient.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels = inputs.shape[1]
        variance, mean = torch.var_mean(inputs, _all_but_channels(inputs), correction=0)
        own = torch.cat([mean, variance, mean.new_full((1,), inputs.numel() // channels)])
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own)
        ranks = torch.stack(gathered)  # (ranks, 2 channels + 1)
        means, variances, counts = ranks[:, :channels], ranks[:, channels:-1], ranks[:, -1:]
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        variance = (counts * (variances + (means - mean).square())).sum(0) / count
        normalised = functional.batch_norm(inputs, mean, variance, eps=eps)
        ctx.save_for_backward(normalised, (variance + eps).rsqrt(), count)
        ctx.mark_non_differentiable(mean, variance, count)
        return normalised, mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, None]:
        normalised, scale, count = ctx.saved_tensors
        around = _all_but_channels(gradient)
        sums = torch.cat([gradient.sum(around), (gradient * normalised).sum(around)])
        dist.all_reduce(sums)
        shape = (1, -1, *[1] * (gradient.dim() - 2))
        of_mean, of_scale = (part.view(shape) for part in (sums / count).chunk(2))
        return scale.view(shape) * (gradient - of_mean - normalised * of_scale), None


def _all_but_channels(tensor: Tensor) -> list[int]:
    return [0, *range(2, tensor.dim())]
