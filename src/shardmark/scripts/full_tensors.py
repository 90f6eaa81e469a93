"""Full values of parameters and gradients, however a library shards them.  Collective."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardmark.scripts.interventions.base import NAMES

MOST_ELEMENTS = 2**21
"""Recorded elements of all parameters together: larger models are sampled."""
STRIDES = (1, *(5, 11, 23, 47, 97, 197, 397, 797, 1597, 3203, 6421, 12853, 25717, 51437))
"""Distances of sampled elements: primes, so that they meet all columns of a matrix."""

REPLICA = "DistributedDataParallel"
NAMES_OF_WRAPPERS = {*NAMES["parts_that_wrappers_add"]}
"""Parts of parameters' names that wrappers add."""


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in NAMES_OF_WRAPPERS)


def is_distributed_tensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def sampling_of(elements: int) -> int:
    """Distance of recorded elements with which a model's tensors have about `MOST_ELEMENTS`."""
    return next((n for n in STRIDES if n >= elements / MOST_ELEMENTS), STRIDES[-1])


def sampled(tensor: Tensor, every: int) -> Tensor:
    """Return every Nth element, flat; the tensor itself if that is each element."""
    return tensor if every == 1 else tensor.flatten()[::every]


def full_copy(tensor: Tensor, every: int = 1) -> Tensor:
    """A dense copy on the CPU of the unsharded tensor; 16-bit floats become fp32."""
    dense: Tensor = tensor.detach()
    if is_distributed_tensor(dense):
        dense = dense.full_tensor()  # type: ignore[attr-defined]
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    dense = sampled(dense, every)
    if dense.is_floating_point() and dense.element_size() < 4:
        dense = dense.float()
    return dense.to("cpu", copy=True)


def gradients_of(parameters: Sequence[Tensor], *, deepspeed: bool) -> Iterator[Any]:
    """Gradients at an optimizer step, by parameter, as the library holds them; DeepSpeed's full."""
    read = _deepspeed_function("safe_get_full_grad") if deepspeed else None
    return (read(p) if read is not None and _is_partitioned(p) else p.grad for p in parameters)


def full_copies(gradients: Sequence[Any], every: int = 1) -> list[Tensor | None]:
    return [None if gradient is None else full_copy(gradient, every) for gradient in gradients]


def local_norms(parameters: Sequence[Tensor]) -> list[float]:
    """Norm of what this process holds of each gradient: its shard, or the gradient itself."""
    gradients: list[Any] = [parameter.grad for parameter in parameters]
    parts = (g.to_local() if is_distributed_tensor(g) else g for g in gradients)
    return [0.0 if gradient is None else float(gradient.float().norm()) for gradient in parts]


def full_parameters(
    parameters: Sequence[Tensor], *, deepspeed: bool, every: int = 1
) -> list[Tensor]:
    """Values of the parameters; DeepSpeed's are those of its fp32 copy."""
    read = _deepspeed_function("safe_get_full_fp32_param") if deepspeed else None
    values = (read(p) if read is not None and _is_partitioned(p) else p for p in parameters)
    return [
        full_copy(p if value is None else value, every)
        for p, value in zip(parameters, values, strict=True)
    ]


def set_parameters(
    parameters: Sequence[Tensor], values: Sequence[Tensor], *, deepspeed: bool
) -> None:
    """Give the parameters other values.  Collective."""
    now = full_parameters(parameters, deepspeed=deepspeed)
    for parameter, old, value in zip(parameters, now, values, strict=True):
        count = min(old.numel(), value.numel())  # flat parameters are padded for their ranks
        if torch.equal(old.flatten()[:count], value.flatten()[:count].to(old.dtype)):
            continue
        old.flatten()[:count] = value.flatten()[:count]
        if deepspeed:
            _deepspeed_function("safe_set_full_fp32_param")(parameter, old)
        local, new = parameter.detach(), old
        if is_distributed_tensor(parameter):
            from torch.distributed.tensor import distribute_tensor

            mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
            local = local.to_local()  # type: ignore[attr-defined]
            new = distribute_tensor(old.to(mesh.device_type), mesh, placements, src_data_rank=None)
            new = new.to_local()
        with torch.no_grad():
            local.copy_(new.view_as(local))


def _is_partitioned(parameter: Tensor) -> bool:
    """True for a parameter of DeepSpeed's optimizers that hold flat slices."""
    return hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")


def _deepspeed_function(name: str) -> Any:
    return getattr(importlib.import_module("deepspeed.utils"), name)


def is_a(module: nn.Module | type, name: str) -> bool:
    """True if a class of that name is among the module's classes: imports no library."""
    kind = module if isinstance(module, type) else type(module)
    return any(base.__name__ == name for base in kind.__mro__)


def flat_slices(modules: Iterable[nn.Module]) -> dict[int, list[int]]:
    """Ranks that hold the slices of each parameter that FSDP1 divides, by its id."""
    slices: dict[int, list[int]] = {}
    for module in modules:
        handle = (
            getattr(module, "_handle", None) if is_a(module, "FullyShardedDataParallel") else None
        )
        if handle is not None and handle.uses_sharded_strategy:
            flat = handle.flat_param
            group: Any = module.process_group
            ranks = torch.distributed.get_process_group_ranks(group)
            slices |= dict.fromkeys(map(id, (flat, *(flat._params or ()))), ranks)
    return slices


def reducing_ranks(module: Any) -> int | None:
    """Number of ranks that a wrapper reduces gradients over; None for other modules."""
    group: Any = getattr(module, "process_group", None)
    if is_a(module, "FullyShardedDataParallel"):
        hybrid = "HYBRID" in module.sharding_strategy.name
        return int(group.size() * (module._inter_node_pg.size() if hybrid else 1))
    if is_a(module, "FSDPModule"):
        meshes = [p.device_mesh for p in module.parameters() if is_distributed_tensor(p)]
        return min((int(mesh.size()) for mesh in meshes), default=None)
    return int(group.size()) if group is not None and is_a(module, REPLICA) else None


def frameworks_of(root: nn.Module) -> list[str]:
    """Libraries that wrap the model or a part of it."""
    wrappers = {
        REPLICA: "DDP",
        "FSDPModule": "FSDP2",
        "FullyShardedDataParallel": "FSDP1",
        "DeepSpeedEngine": "DeepSpeed",
    }
    return [
        text
        for name, text in wrappers.items()
        if any(is_a(module, name) for module in root.modules())
    ]
