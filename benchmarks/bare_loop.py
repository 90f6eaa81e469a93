"""Training as a careful person writes it without Shardmark: the other side of `overhead.py`.

    torchrun --nproc-per-node 2 benchmarks/bare_loop.py --strategy ddp --out FOLDER

ResNet-18 on the digits data set at 32 x 32, with the options that Shardmark's strategies set.
Each rank writes FOLDER/RANK.json with the Unix times of its steps.  FOLDER/RANK.warm appears at the
end of the warm-up.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import resnet18
from torchvision.models.resnet import BasicBlock

DIGITS = Path(__file__).parents[1] / "src/shardmark/ranks/workloads/datasets/digits.npz"
MEAN, STD = 0.306, 0.324
SGD = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}
BUCKET_MB = 25
BUCKET_ELEMENTS = BUCKET_MB * 2**20 // 4

ZERO = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "communication_data_type": "fp32",
    "zero_optimization": {
        "stage": 1,
        "contiguous_gradients": True,
        "overlap_comm": False,
        "reduce_scatter": True,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
        "round_robin_gradients": False,
    },
    "steps_per_print": 2**31,
    "wall_clock_breakdown": False,
    "timers": {"throughput": {"enabled": False}},
}
"""Settings of `ranks/strategies/deepspeed/strategy.py` for fp32; `overhead.py` compares the two."""

Step = Callable[[Any, Any], Tensor]
"""Maps pictures and labels to the loss."""


def digits() -> tuple[Tensor, Tensor]:
    """All images as uint8 (n, 1, 32, 32), and their labels."""
    with np.load(DIGITS) as stored:
        values, labels = stored["pictures"], stored["labels"].astype(np.int64)
    grey = np.rint(values * (255 / 16)).astype(np.uint8)[:, None]
    pictures = functional.interpolate(
        torch.from_numpy(grey), (32, 32), mode="bilinear", antialias=True
    )
    return pictures, torch.from_numpy(labels)


def eager_step(model: nn.Module, parameters: list[nn.Parameter]) -> Step:
    optimizer = torch.optim.SGD(parameters, **SGD)

    def step(pictures: Any, labels: Any) -> Tensor:
        loss = functional.cross_entropy(model(pictures), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def start(strategy: str, model: nn.Module, blocks: list[nn.Module]) -> Step:
    """Set up the strategy; `blocks` are the modules that FSDP gathers one by one."""
    if strategy == "single":
        return eager_step(model, list(model.parameters()))
    if strategy == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        wrapped = DistributedDataParallel(
            model, broadcast_buffers=False, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MB
        )
        return eager_step(wrapped, list(model.parameters()))
    if strategy == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for part in (*blocks, model):
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        return eager_step(model, list(model.parameters()))
    import deepspeed

    parameters = list(model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=parameters,
        optimizer=torch.optim.SGD(parameters, **SGD),
        config=ZERO,
        dist_init_required=False,
    )

    def step(pictures: Any, labels: Any) -> Tensor:
        loss = functional.cross_entropy(engine(pictures), labels)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=("single", "ddp", "fsdp", "zero-1"), required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pictures, labels = digits()
    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    blocks = [module for module in model.modules() if isinstance(module, BasicBlock)]
    step = start(options.strategy, model, blocks)
    share = options.global_batch // world_size
    scale, shift = torch.tensor(1 / (255 * STD)), torch.tensor(-MEAN / STD)
    random = np.random.default_rng(0)
    order, place = random.permutation(len(labels)), 0
    started_at: list[float] = []
    dist.barrier()
    for index in range(options.steps):
        if index == options.warmup:
            # As in the ranks of a trial, objects of the imports are not searched in the window.
            gc.collect()
            gc.freeze()
            (options.out / f"{rank}.warm").touch()
            dist.barrier()
        started_at.append(time.time())
        if place + options.global_batch > len(order):
            order, place = random.permutation(len(labels)), 0
        ids = torch.from_numpy(order[place + rank * share : place + (rank + 1) * share])
        place += options.global_batch
        chosen = pictures.index_select(0, ids)
        batch = torch.empty(len(ids), 3, 32, 32).copy_(chosen).mul_(scale).add_(shift)
        step(batch, labels.index_select(0, ids))
    report = {
        "steps_at_seconds": started_at,
        "allocator": {n: value for n, value in os.environ.items() if n.startswith("MALLOC_")},
    }
    (options.out / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
    os._exit(0)  # gloo's threads now and then abort the interpreter as it ends
