"""Language modelling as nanoGPT's training script does it: the other side of `step_speed.py`.

The model and the tokens are those of `language-quickstart`; samples begin at random places.  Each
strategy is written with torch's own calls, as a careful person would write it without Shardmark.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from shardmark.workloads.language.gpt import GPT, parts_of

LEARNING_RATE = 4e-3
SCHEDULE_STEPS = 30
"""Steps over which the learning rate rises."""
CLIPPING = 1.0
SEQUENCE_LENGTH = 128
ADAMW = {"lr": LEARNING_RATE, "weight_decay": 0.1, "betas": (0.9, 0.95)}
BUCKETS = {"bucket_cap_mb": 25, "gradient_as_bucket_view": True, "broadcast_buffers": False}
PERIOD_STEPS = 20
MICRO_BATCHES = 4
MESH = (2, 2)

Clip = Callable[[], object]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(kw_only=True)
class Loop:
    """The parts of a training loop that a strategy changes."""

    passes: Callable[[Tensor, Tensor], Tensor | None]
    """Maps tokens and targets to the loss, or None on ranks without it; fills the gradients."""
    optimizer: torch.optim.Optimizer
    clip: Clip
    updated: Callable[[int], None] = lambda step: None  # noqa: ARG005
    """Called with the number of each step after its update."""
    share: tuple[int, int] = field(default_factory=lambda: (dist.get_rank(), dist.get_world_size()))
    """Index and number of the equal parts of a step's samples of which this rank sees one."""


def eager(model: nn.Module, *, clip: Clip | None = None, **more: Any) -> Loop:
    """A loop for a model that reduces its gradients itself, or needs no reduction."""

    def passes(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(model(tokens), targets)
        loss.backward()
        return loss.detach()

    given: dict[str, Any] = {"optimizer": torch.optim.AdamW(model.parameters(), **ADAMW), **more}
    norm = clip or (lambda: nn.utils.clip_grad_norm_(model.parameters(), CLIPPING))
    return Loop(passes=passes, clip=norm, **given)


def ddp(model: GPT) -> Loop:
    return eager(DistributedDataParallel(model, **BUCKETS))


def ddp_bf16(model: GPT) -> Loop:
    wrapped = DistributedDataParallel(model, **BUCKETS)
    # Under its own name DDP takes the hook for NCCL alone.
    wrapped.register_comm_hook(
        None, lambda _, bucket: default_hooks.bf16_compress_hook(None, bucket)
    )
    return eager(wrapped)


def ddp_powersgd(model: GPT) -> Loop:
    wrapped = DistributedDataParallel(model, **BUCKETS)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=2
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return eager(wrapped)


def zro(model: GPT) -> Loop:
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=True,
        **ADAMW,
    )
    return eager(DistributedDataParallel(model, **BUCKETS), optimizer=optimizer)


def local_sgd(model: GPT) -> Loop:
    """Parameters are averaged every `PERIOD_STEPS` steps."""
    parameters = list(model.parameters())

    @torch.no_grad()
    def updated(step: int) -> None:
        if (step + 1) % PERIOD_STEPS == 0:
            for parameter, mean in zip(parameters, means(parameters), strict=True):
                parameter.copy_(mean)

    return eager(model, updated=updated)


def means(parameters: list[nn.Parameter]) -> list[Tensor]:
    flat = torch.cat([parameter.flatten() for parameter in parameters])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([parameter.numel() for parameter in parameters])
    return [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]


def divide(model: GPT, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> None:
    between = Shard(1) if sequence_parallel else Replicate()
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "blocks.*.attention.queries_keys_values": ColwiseParallel(input_layouts=between),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=between),
        "blocks.*.widen": ColwiseParallel(input_layouts=between),
        "blocks.*.shrink": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence_parallel:
        norms = ("blocks.*.attention_norm", "blocks.*.norm", "norm")
        plan |= dict.fromkeys(norms, SequenceParallel())
    parallelize_module(model, mesh, plan)
    model.head.weight = model.embedding.weight  # which it has torn apart


def tp(model: GPT, *, sequence_parallel: bool = False) -> Loop:
    divide(
        model,
        init_device_mesh("cpu", (dist.get_world_size(),)),
        sequence_parallel=sequence_parallel,
    )
    return eager(model, clip=lambda: clip_over_meshes(model.parameters()), share=(0, 1))


def tp_sequence(model: GPT) -> Loop:
    return tp(model, sequence_parallel=True)


def fsdp_tp(model: GPT) -> Loop:
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("shard", "tensor"))
    divide(model, mesh["tensor"])
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["shard"], reshard_after_forward=True)  # the root, too
    share = (mesh["shard"].get_local_rank(), MESH[0])
    return eager(model, clip=lambda: clip_over_meshes(model.parameters()), share=share)


def clip_over_meshes(parameters: Iterable[nn.Parameter]) -> None:
    """`clip_grad_norm_` takes no gradients of several meshes together."""
    alike = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        alike[gradient.device_mesh if isinstance(gradient, DTensor) else None].append(parameter)
    norms = [plain(nn.utils.get_total_norm([p.grad for p in each])) for each in alike.values()]
    for each in alike.values():
        nn.utils.clip_grads_with_norm_(each, CLIPPING, torch.stack(norms).norm())


def plain(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def pp(model: GPT) -> Loop:
    return pipeline(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def ddp_pp(model: GPT) -> Loop:
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("data", "pipeline"))
    group = mesh["data"].get_group()

    def replicate(stage: nn.Module) -> nn.Module:
        return DistributedDataParallel(stage, process_group=group, **BUCKETS)

    share = (mesh["data"].get_local_rank(), MESH[0])
    return pipeline(model, mesh["pipeline"], wrap=replicate, share=share)


def pipeline(
    model: GPT,
    mesh: DeviceMesh,
    *,
    cuts: tuple[int, ...] = (2,),
    schedule: Any = Schedule1F1B,
    wrap: Callable[[nn.Module], nn.Module] = lambda stage: stage,
    share: tuple[int, int] = (0, 1),
) -> Loop:
    """A pipeline whose stages lie between the cuts, dealt out to 2 ranks in turn."""
    group, rank, parts = mesh.get_group(), mesh.get_local_rank(), parts_of(model)
    bounds = (0, *cuts, len(parts))
    count = len(bounds) - 1
    own = range(rank, count, mesh.size())
    modules = [wrap(nn.Sequential(*parts[bounds[i] : bounds[i + 1]])) for i in own]
    stages = [
        PipelineStage(module, index, count, torch.device("cpu"), group=group)
        for index, module in zip(own, modules, strict=True)
    ]
    turns = schedule(
        stages if count > mesh.size() else stages[0],
        n_microbatches=MICRO_BATCHES,
        loss_fn=cross_entropy,
    )
    parameters = [parameter for module in modules for parameter in module.parameters()]
    tied = model.embedding.weight if rank == 0 else model.head.weight

    def passes(tokens: Tensor, targets: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        if rank == 0:
            turns.step(tokens, return_outputs=False)
        else:
            turns.step(target=targets, losses=losses, return_outputs=False)
        # What both ends of the pipeline have of the tied weight.
        dist.all_reduce(local(tied.grad), group=group)
        return torch.stack(losses).mean().detach() if losses else None

    def clip() -> None:
        counted = [p.grad for p in parameters if rank == 0 or p is not tied]
        squared = plain(nn.utils.get_total_norm(counted)).square()
        dist.all_reduce(squared, group=group)
        nn.utils.clip_grads_with_norm_(parameters, CLIPPING, squared.sqrt())

    return Loop(
        passes=passes,
        optimizer=torch.optim.AdamW(parameters, **ADAMW),
        clip=clip,
        share=share,
    )


def ulysses(model: GPT) -> Loop:
    """Every rank holds a part of each sequence; in attention, full sequences of some heads."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def exchanged(tensor: Tensor, divided: int, joined: int) -> Tensor:
        sent = torch.stack(tensor.chunk(size, divided))
        return torch.cat(all_to_all_single(torch.empty_like(sent), sent).unbind(), joined)

    def heads(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return exchanged(output, -1, 1)

    def positions(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (exchanged(inputs[0], 1, -1),)

    for block in model.blocks:
        block.attention.queries_keys_values.register_forward_hook(heads)
        block.attention.out.register_forward_pre_hook(positions)
    replicas = DistributedDataParallel(model, **BUCKETS)

    def passes(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(replicas(tokens.chunk(size, 1)[rank]), targets.chunk(size, 1)[rank])
        loss.backward()
        return loss.detach()

    return Loop(
        passes=passes,
        optimizer=torch.optim.AdamW(model.parameters(), **ADAMW),
        clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), CLIPPING),
        share=(0, 1),
    )


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, kw_only=True)
class Bare:
    """A strategy written by hand, and the strategy of Shardmark that it is compared with."""

    start: Callable[[GPT], Loop]
    strategy: str | dict[str, Any]
    """An entry of `matrix.strategy`."""
    ranks: int = 2
    turn_steps: int = 50
    """Steps that last about 3 seconds on 2 cores."""
    least_ratio: float = 0.98


STRATEGIES = {
    "single": Bare(
        start=lambda model: eager(model, share=(0, 1)), strategy="single", ranks=1, least_ratio=0.99
    ),
    "ddp": Bare(start=ddp, strategy="ddp", least_ratio=0.99),
    "ddp-bf16": Bare(start=ddp_bf16, strategy={"name": "ddp", "compress": "bf16"}),
    "ddp-powersgd": Bare(start=ddp_powersgd, strategy={"name": "ddp", "compress": "powersgd"}),
    "zro": Bare(start=zro, strategy="zro"),
    "local-sgd": Bare(start=local_sgd, strategy="local-sgd"),
    "tp": Bare(start=tp, strategy="tp", turn_steps=30),
    "tp-sequence": Bare(
        start=tp_sequence, strategy={"name": "tp", "sequence_parallel": True}, turn_steps=20
    ),
    "fsdp-tp": Bare(start=fsdp_tp, strategy="fsdp-tp", ranks=4, turn_steps=15),
    "pp": Bare(start=pp, strategy="pp", turn_steps=40),
    "ddp-pp": Bare(start=ddp_pp, strategy="ddp-pp", ranks=4, turn_steps=25),
    "ulysses": Bare(start=ulysses, strategy="ulysses", turn_steps=35),
}


def learning_rate(step: int, steps: int) -> float:
    if step < SCHEDULE_STEPS:
        return LEARNING_RATE * (step + 1) / SCHEDULE_STEPS
    done = (step - SCHEDULE_STEPS) / max(1, steps - SCHEDULE_STEPS)
    return LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * done))


def drawn_batches(
    tokens: np.ndarray[Any, Any], global_batch: int, of: tuple[int, int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields tokens and targets of this rank's part; samples begin at random places."""
    random, (index, shares) = np.random.default_rng(0), of
    share = global_batch // shares
    while True:
        drawn = random.integers(len(tokens) - SEQUENCE_LENGTH, size=global_batch)
        places = drawn[index * share : (index + 1) * share]
        windows = [tokens[at : at + SEQUENCE_LENGTH + 1].astype(np.int64) for at in places]
        batch = torch.from_numpy(np.stack(windows))
        yield batch[:, :-1], batch[:, 1:]


def take_step(
    loop: Loop, step: int, steps: int, batches: Iterator[tuple[Tensor, Tensor]]
) -> Tensor | None:
    """Take step `step` of a training of `steps`; return the loss, or None on ranks without it."""
    for group in loop.optimizer.param_groups:
        group["lr"] = learning_rate(step, steps)
    loss = loop.passes(*next(batches))
    loop.clip()
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=True)
    loop.updated(step)
    return loss
