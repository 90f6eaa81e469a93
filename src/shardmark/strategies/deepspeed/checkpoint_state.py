"""What a checkpoint keeps of DeepSpeed's engine: the flat partitions that this rank holds.

Plain tensors, so that every strategy's checkpoint is written the same way; DeepSpeed's own would
need a file system that all nodes share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardmark.strategies.base import CheckpointState
from shardmark.strategies.checkpoint_state import (
    copied_into,
    optimizer_tensors,
    restore_optimizer,
    scaler_counts,
    set_scaler,
)


def kept_of(engine: Any, base: torch.optim.Optimizer, counts: Mapping[str, int]) -> CheckpointState:
    """As references.  Stage 0 is the same on all ranks; from stage 1 on partitions are a rank's."""
    state = optimizer_tensors(base, _updated(engine))
    shared = {f"parameter/{n}": t.detach() for n, t in _whole(engine).items()}
    own = {f"partition/{n}": t.detach() for n, t in _partitions(engine).items()}
    own |= {f"buffer/{n}": b.detach() for n, b in engine.module.named_buffers()}
    replicated = engine.zero_optimization_stage() == 0
    return CheckpointState(
        own=own if replicated else own | state,
        shared=shared | state if replicated else shared,
        counts={**counts, "scaler": scaler_counts(_scaler(engine))},
    )


def restore(engine: Any, base: torch.optim.Optimizer, kept: CheckpointState) -> None:
    """Go on from there.  Collective in stage 3, which keeps small parameters whole everywhere."""
    tensors = {**kept.own, **kept.shared}
    for kind, targets in (
        ("parameter", _whole(engine)),
        ("partition", _partitions(engine)),
        ("buffer", dict(engine.module.named_buffers())),
    ):
        for name, target in targets.items():
            copied_into(target, tensors[f"{kind}/{name}"])
    restore_optimizer(base, _updated(engine), tensors)
    set_scaler(_scaler(engine), kept.counts["scaler"])
    # Stage 3 computes with copies of its partitions (views of them, where there is no copy).
    for index, computed in enumerate(getattr(engine.optimizer, "fp16_partitioned_groups_flat", ())):
        copied_into(computed, _partitions(engine)[str(index)])
    small = getattr(engine.optimizer, "persistent_parameters", ())
    if small:
        small[0].partition(small, has_been_updated=False)
        small[0].all_gather(small)


def _updated(engine: Any) -> dict[str, nn.Parameter]:
    """What the base optimizer updates: the parameters, or this rank's flat partitions of them."""
    if engine.zero_optimization_stage() == 0:
        return {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
    return _partitions(engine)


def _partitions(engine: Any) -> dict[str, nn.Parameter]:
    """The fp32 partitions, which stages 1 to 3 call by two names."""
    names = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
    found = [list(getattr(engine.optimizer, name, ())) for name in names]
    return _numbered(found[0] or found[1])


def _whole(engine: Any) -> dict[str, Tensor]:
    """Parameters that are whole on every rank: all of them below stage 3."""
    if engine.zero_optimization_stage() == 0:
        return {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
    if engine.zero_optimization_stage() == 3:
        return {}
    return dict(_numbered(engine.optimizer.bit16_groups_flat))


def _numbered(tensors: Iterable[Any]) -> dict[str, Any]:
    return {str(index): tensor for index, tensor in enumerate(tensors)}


def _scaler(engine: Any) -> torch.amp.GradScaler | None:
    found = getattr(engine, "torch_autocast_z0_gradscaler", None) or getattr(
        engine.optimizer, "torch_autocast_gradscaler", None
    )
    return found if isinstance(found, torch.amp.GradScaler) else None
