"""Adds adapters to a model: small trained matrices beside frozen weights.  Imports torch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from shardmark.base.errors import InputError
from shardmark.base.traffic import ELEMENT_BYTES
from shardmark.ranks.workloads.model_building import seeded
from shardmark.ranks.workloads.options import Adapter

LINEAR = ("Linear", "Conv1D", "FalconLinear")
"""Classes of linear layers; the others are those of GPT-2 and Falcon in transformers."""
FUSED_OUTPUTS = ("falcon_h1", "nemotron_h")
"""Model types whose `out_proj` is part of Mamba's kernel, so that peft refuses matrices there."""
NF4_BYTES = (4 + 0.127) / 8
"""Bytes of a weight in 4 bits with double quantization (Dettmers et al., arXiv 2305.14314,
section 3)."""


def add_adapter(
    model: nn.Module, adapter: Adapter, blocks: Sequence[nn.Module] | None, *, seed: int
) -> None:
    """Freeze the model and add the adapter's matrices, in place.  Blocks stay the same modules.

    Raises `InputError` for targets that the model lacks, or that take no matrices.
    """
    from peft import LoraConfig, inject_adapter_in_model

    parts = [model] if blocks is None else blocks
    names = _linear_layers(model, parts) if adapter.targets is None else [*adapter.targets]
    if not names:
        problem = "null, and the model's blocks have no linear layer"
        raise InputError("workload.adapter.targets", problem, "name some layers")
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]  # a factor alone
        lora_dropout=adapter.dropout,
        target_modules=names,
        init_lora_weights=not next(model.parameters()).is_meta,
    )
    with seeded(seed), warnings.catch_warnings():
        for expected in ("fan_in_fan_out", "_pattern keys did not match"):  # peft sets what fits
            warnings.filterwarnings("ignore", message=f".*{expected}")
        try:
            inject_adapter_in_model(config, model)
        except ValueError as error:
            raise InputError("workload.adapter.targets", str(error), "name linear layers") from None
    if adapter.base != "fp32":
        dtype = torch.float16 if adapter.base == "fp16" else torch.bfloat16
        for parameter in model.parameters():
            if not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    if adapter.base == "nf4":
        for layer in _bases(parts):
            setattr(layer.weight, ELEMENT_BYTES, NF4_BYTES)
            layer.forward = _Dequantised(layer)  # type: ignore[assignment]
        for module in {module for part in parts for module in part.modules()}:
            if stacks := _stacks(module):
                for weight in stacks.values():
                    setattr(weight, ELEMENT_BYTES, NF4_BYTES)
                module.register_forward_pre_hook(_widen)
                module.register_forward_hook(_free, always_call=True)
    model.train()


def _linear_layers(model: nn.Module, blocks: Sequence[nn.Module]) -> list[str]:
    inside = {module for block in blocks for module in block.modules()}
    is_fused = getattr(getattr(model, "config", None), "model_type", None) in FUSED_OUTPUTS
    named = [one for one in model.named_modules() if not (is_fused and one[0].endswith("out_proj"))]
    return [name for name, m in named if m in inside and type(m).__name__ in LINEAR]


def _bases(blocks: Sequence[nn.Module]) -> list[nn.Linear]:
    """Frozen linear layers in the blocks; no routers, which return more than a product."""
    modules = {module: None for block in blocks for module in block.modules()}
    linear = [m for m in modules if isinstance(m, nn.Linear) and not m.weight.requires_grad]
    return [layer for layer in linear if not type(layer).__name__.endswith("Router")]


def _stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    """Frozen weights of all experts of a layer, shape (experts, rows, columns), by name."""
    if not type(module).__name__.endswith("Experts"):
        return {}
    named = module.named_parameters(recurse=False)
    return {name: p for name, p in named if p.dim() == 3 and not p.requires_grad}


def _widened(weight: Tensor) -> Tensor:
    """Copy a weight in the type of products: autocast's, or its own without autocast."""
    device = weight.device.type
    autocasts = torch.is_autocast_enabled(device)
    return weight.to(torch.get_autocast_dtype(device) if autocasts else weight.dtype, copy=True)


def _widen(experts: nn.Module, _: object) -> None:
    """Hide the stored weights by widened ones while the module computes, as a parametrization."""
    vars(experts).update({name: _widened(weight) for name, weight in _stacks(experts).items()})


def _free(experts: nn.Module, *_: object) -> None:
    for name in _stacks(experts):
        del vars(experts)[name]


class _Dequantised:
    """A linear layer whose weight is widened from 4 bits in each pass, and never saved."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer

    def __call__(self, inputs: Tensor) -> Tensor:
        output: Tensor = _WidenedProduct.apply(inputs, self._layer.weight)
        return output if self._layer.bias is None else output + self._layer.bias


class _WidenedProduct(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(weight)
        wide = _widened(weight)
        context.dtype = wide.dtype
        return functional.linear(inputs.to(wide.dtype), wide)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = context.saved_tensors
        return gradient @ weight.to(context.dtype, copy=True), None
