"""A training script that knows nothing of Shardmark, as a user writes it: DDP or FSDP2."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="ddp")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--fail-at", type=int)
parser.add_argument("--exit-code", type=int)
parser.add_argument("--note", type=Path)
options = parser.parse_args()

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    if options.strategy == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    step = 0
    try:
        while step < options.steps:
            for batch, targets in loader:
                if step == options.fail_at:
                    raise ValueError("the mistake of the script")
                loss = nn.functional.mse_loss(model(batch), targets)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                print(f"step {step} loss {loss.item()}")
                step += 1
                if step == options.steps:
                    break
    finally:
        if options.note is not None:
            rank = os.environ["RANK"]
            words = (rank, os.environ["WORLD_SIZE"], sys.argv[0], sys.path[0], str(step))
            Path(f"{options.note}-{rank}").write_text(" ".join(words))
    if options.exit_code is not None:
        print("about to leave", file=sys.stderr)
        sys.exit(options.exit_code)
    dist.destroy_process_group()
