"""Batch norm over all ranks: torch's `SyncBatchNorm` on GPUs, the same definition on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from shardmark.base.errors import StrategyUnavailable

KEY = "sync_batch_norm"
REMEDY = f"set recipe.{KEY} to false"


def synchronise_batch_norms(
    model: nn.Module, device: torch.device, *, compiled: bool = False
) -> nn.Module:
    """Make the model's batch norms compute statistics over all ranks of the process group.

    Raises `StrategyUnavailable` for a model without batch norm, and for a norm with its own forward
    pass, which would be lost.  A single rank keeps its norms.  With `compiled`, the norms of the
    CPU are excluded from compilation.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if not norms:
        raise StrategyUnavailable(KEY, "the model has no batch norm", REMEDY)
    shipped = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    user_norm = next(
        (type(norm).__name__ for norm in norms if type(norm).forward not in shipped), None
    )
    if user_norm is not None:
        raise StrategyUnavailable(KEY, f"{user_norm} computes more than torch's batch norm", REMEDY)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return model
    if device.type != "cpu":
        convert: Callable[[nn.Module], nn.Module] = nn.SyncBatchNorm.convert_sync_batchnorm
        return convert(model)
    for norm in norms:
        forward: Any = partial(_over_all_ranks, norm, norm.forward)
        if compiled:  # the compiler would break the graph at the exchange
            forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]  # torch's
        norm.forward = forward  # type: ignore[method-assign]
    return model


def _over_all_ranks(
    norm: _BatchNorm, evaluated: Callable[[Tensor], Tensor], inputs: Tensor
) -> Tensor:
    """Return a batch norm's outputs for `inputs` of shape (samples, channels, ...)."""
    if not norm.training:
        return evaluated(inputs)
    exact = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    normalised, mean, variance, count = _Normalised.apply(exact, norm.eps)
    if norm.running_mean is not None and norm.running_var is not None:
        assert norm.num_batches_tracked is not None, "all three are tracked, or none"
        norm.num_batches_tracked.add_(1)
        momentum = norm.momentum
        if momentum is None:  # a mean over all batches
            momentum = 1 / float(norm.num_batches_tracked)
        unbiased = variance * count / (count - 1)
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)
        norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), momentum)
    shape = (1, -1, *[1] * (inputs.dim() - 2))
    if norm.weight is not None:
        normalised = normalised * norm.weight.view(shape)
    if norm.bias is not None:
        normalised = normalised + norm.bias.view(shape)
    outputs: Tensor = normalised.to(inputs.dtype)
    return outputs


class _Normalised(torch.autograd.Function):
    """Computes (x - mean) / sqrt(variance + eps) over the samples of all ranks.

    Ranks may have different numbers of samples.  For C channels, the forward pass all-gathers
    2 C + 1 numbers and the backward pass all-reduces 2 C, as torch's `SyncBatchNorm` does.  The
    statistics are returned without gradients.

    Source: Chan, Golub and LeVeque (1982), on sums of variances; Ioffe and Szegedy, ICML 2015,
    on the gradient.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels = inputs.shape[1]
        variance, mean = torch.var_mean(inputs, _all_but_channels(inputs), correction=0)
        statistics = torch.cat([mean, variance, mean.new_full((1,), inputs.numel() // channels)])
        gathered = [torch.empty_like(statistics) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, statistics)
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
        axes = _all_but_channels(gradient)
        sums = torch.cat([gradient.sum(axes), (gradient * normalised).sum(axes)])
        dist.all_reduce(sums)
        shape = (1, -1, *[1] * (gradient.dim() - 2))
        of_mean, of_scale = (part.view(shape) for part in (sums / count).chunk(2))
        return scale.view(shape) * (gradient - of_mean - normalised * of_scale), None


def _all_but_channels(tensor: Tensor) -> list[int]:
    return [0, *range(2, tensor.dim())]
