"""Language modelling as nanoGPT's training script does it: the other side of `language_speed.py`.

    torchrun --nproc-per-node 2 benchmarks/bare_language.py --strategy ddp --out FOLDER

The model and the tokens are those of `language-quickstart`; samples begin at random places.  Each
strategy is written with torch's own calls, as a careful person would without Shardmark.  Writes
what `bare_loop.py` writes, but for samples and seconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from shardmark.workloads.language.gpt import GPT, Block, parts_of
from shardmark.workloads.language.options import LanguageOptions
from shardmark.workloads.language.tokens import token_data

LEARNING_RATE = 4e-3
SCHEDULE_STEPS = 30
"""Of the rising learning rate."""
CLIPPING = 1.0
SEQUENCE_LENGTH = 128
ADAMW = {"lr": LEARNING_RATE, "weight_decay": 0.1, "betas": (0.9, 0.95)}
BUCKETS = {"bucket_cap_mb": 25, "gradient_as_bucket_view": True, "broadcast_buffers": False}
PERIOD_STEPS = 20
OUTER_SGD = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
MICRO_BATCHES = 4
MESH = (2, 2)

Clip = Callable[[], object]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(kw_only=True)
class Loop:
    """What a strategy changes of the loop."""

    passes: Callable[[Tensor, Tensor], Tensor | None]
    """Tokens and targets -> the loss, where this rank knows it; gradients are there then."""
    optimizer: torch.optim.Optimizer
    clip: Clip
    updated: Callable[[int], None] = lambda step: None  # noqa: ARG005
    """Told each step after its update."""
    share: tuple[int, int] = field(default_factory=lambda: (dist.get_rank(), dist.get_world_size()))
    """Which of how many equal parts of a step's samples this rank sees."""


def eager(model: nn.Module, *, clip: Clip | None = None, **more: Any) -> Loop:
    """A model whose gradients reduce themselves, or need not."""

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


def fsdp1(model: GPT) -> Loop:
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    return eager(sharded, clip=lambda: sharded.clip_grad_norm_(CLIPPING))


def local_sgd(model: GPT) -> Loop:
    """Parameters are averaged once in so many steps."""
    parameters = list(model.parameters())

    @torch.no_grad()
    def updated(step: int) -> None:
        if (step + 1) % PERIOD_STEPS == 0:
            for parameter, mean in zip(parameters, means(parameters), strict=True):
                parameter.copy_(mean)

    return eager(model, updated=updated)


def diloco(model: GPT) -> Loop:
    """An outer optimizer takes the mean of what a round has changed."""
    parameters = list(model.parameters())
    outer = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    outer_optimizer = torch.optim.SGD(outer, **OUTER_SGD)

    @torch.no_grad()
    def updated(step: int) -> None:
        if (step + 1) % PERIOD_STEPS:
            return
        for parameter, mean in zip(outer, means(parameters), strict=True):
            parameter.grad = parameter - mean
        outer_optimizer.step()
        outer_optimizer.zero_grad()
        for parameter, value in zip(parameters, outer, strict=True):
            parameter.copy_(value)

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


def pp_zero_bubble(model: GPT) -> Loop:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return pipeline(model, mesh, cuts=(1, 2, 3), schedule=ScheduleInterleavedZeroBubble)


def ddp_pp(model: GPT) -> Loop:
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("data", "pipeline"))
    group = mesh["data"].get_group()

    def replicate(stage: nn.Module) -> nn.Module:
        return DistributedDataParallel(stage, process_group=group, **BUCKETS)

    share = (mesh["data"].get_local_rank(), MESH[0])
    return pipeline(model, mesh["pipeline"], wrap=replicate, share=share)


def fsdp_pp(model: GPT) -> Loop:
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("shard", "pipeline"))

    def shard(stage: nn.Module) -> nn.Module:
        for part in (*stage.children(), stage):
            fully_shard(part, mesh=mesh["shard"], reshard_after_forward=False)
        return stage

    share = (mesh["shard"].get_local_rank(), MESH[0])
    return pipeline(model, mesh["pipeline"], wrap=shard, share=share)


def pipeline(
    model: GPT,
    mesh: DeviceMesh,
    *,
    cuts: tuple[int, ...] = (2,),
    schedule: Any = Schedule1F1B,
    wrap: Callable[[nn.Module], nn.Module] = lambda stage: stage,
    share: tuple[int, int] = (0, 1),
) -> Loop:
    """Stages of the parts between the cuts, which go round over 2 ranks."""
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
    """Every rank has a part of each sequence, and for attention whole ones of some heads."""
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
    """A strategy written by hand, and what it is held against."""

    start: Callable[[GPT], Loop]
    strategy: str | dict[str, Any]
    """As `matrix.strategy` has it."""
    ranks: int = 2
    turn_steps: int = 50
    """That last about 3 seconds on 2 cores."""
    least_ratio: float = 0.98


STRATEGIES = {
    "single": Bare(
        start=lambda model: eager(model, share=(0, 1)), strategy="single", ranks=1, least_ratio=0.99
    ),
    "ddp": Bare(start=ddp, strategy="ddp", least_ratio=0.99),
    "ddp-bf16": Bare(start=ddp_bf16, strategy={"name": "ddp", "compress": "bf16"}),
    "ddp-powersgd": Bare(start=ddp_powersgd, strategy={"name": "ddp", "compress": "powersgd"}),
    "zro": Bare(start=zro, strategy="zro"),
    "fsdp1": Bare(start=fsdp1, strategy="fsdp1"),
    "local-sgd": Bare(start=local_sgd, strategy="local-sgd"),
    "diloco": Bare(start=diloco, strategy="diloco"),
    "tp": Bare(start=tp, strategy="tp", turn_steps=30),
    "tp-sequence": Bare(
        start=tp_sequence, strategy={"name": "tp", "sequence_parallel": True}, turn_steps=20
    ),
    "fsdp-tp": Bare(start=fsdp_tp, strategy="fsdp-tp", ranks=4, turn_steps=15),
    "pp": Bare(start=pp, strategy="pp", turn_steps=40),
    "pp-zero-bubble": Bare(
        start=pp_zero_bubble, strategy={"name": "pp", "schedule": "zero-bubble"}, turn_steps=35
    ),
    "ddp-pp": Bare(start=ddp_pp, strategy="ddp-pp", ranks=4, turn_steps=25),
    "fsdp-pp": Bare(start=fsdp_pp, strategy="fsdp-pp", ranks=4, turn_steps=20),
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
    """Tokens and targets of this rank's part, which begin at random places."""
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
    """One of a training of so many."""
    for group in loop.optimizer.param_groups:
        group["lr"] = learning_rate(step, steps)
    loss = loop.passes(*next(batches))
    loop.clip()
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=True)
    loop.updated(step)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=STRATEGIES, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = token_data(LanguageOptions())
    tokens = data.training.tokens
    torch.manual_seed(0)
    model = GPT(
        vocabulary=data.vocabulary,
        sequence_length=SEQUENCE_LENGTH,
        layers=2,
        width=128,
        heads=4,
    )
    loop = STRATEGIES[options.strategy].start(model)
    batches = drawn_batches(tokens, options.global_batch, loop.share)
    started_at: list[float] = []
    losses: list[Tensor | None] = []
    for step in range(options.steps):
        if step == options.warmup:
            # As in `bare_loop.py`: what the imports left is not searched inside the window.
            gc.collect()
            gc.freeze()
            (options.out / f"{rank}.warm").touch()
            dist.barrier()
        started_at.append(time.time())
        losses.append(take_step(loop, step, options.steps, batches))
    report = {
        "rank": rank,
        "steps_at_seconds": started_at,
        "threads": torch.get_num_threads(),
        "last_loss": None if losses[-1] is None else float(losses[-1]),
    }
    (options.out / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
