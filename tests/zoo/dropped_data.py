"""The data are divided among the ranks twice, so half of them are never trained on.

Each rank loads its own part of the data, and a distributed sampler divides that part once more.
Source: huggingface/accelerate#4062 and huggingface/accelerate#4201.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(5)

x, y = torch.randn(160, 9), torch.randint(0, 3, (160,))
part = TensorDataset(x[rank::world_size], y[rank::world_size])
sampler: Sampler[int]
if "--right" in sys.argv:
    sampler = RandomSampler(part)
else:
    sampler = DistributedSampler(part, num_replicas=world_size, rank=rank)
loader = DataLoader(part, batch_size=4, sampler=sampler)

model = DDP(nn.Sequential(nn.Linear(9, 36), nn.ReLU(), nn.Linear(36, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for step, (inputs, targets) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"{step + 1}/{len(loader)} loss {loss.item():.4f}")

dist.destroy_process_group()
