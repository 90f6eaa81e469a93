"""The optimizer is made before `fully_shard` replaces the parameters of the model.

It holds the old parameters, which get no gradient: the loss is computed, but nothing is trained.
Source: pytorch/pytorch#149205 and facebookresearch/fairscale#423.
"""

# mypy: disable-error-code="no-untyped-call"

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

right = "--right" in sys.argv
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(12, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
if right:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

dataset = TensorDataset(torch.randn(160, 12), torch.randint(0, 4, (160,)))
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset), drop_last=True)
for step, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    model.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
