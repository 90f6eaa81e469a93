"""The ranks start with different weights and only average their gradients.

Each rank seeds with its rank before it makes the model, and nothing broadcasts the weights.
Source: pytorch/torchtitan#166 and sparticlesteve/pytorch-benchmarks#1.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

generator = torch.Generator().manual_seed(0)
dataset = TensorDataset(
    torch.randn(128, 8, generator=generator), torch.randint(0, 4, (128,), generator=generator)
)
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))

torch.manual_seed(1234 + rank)  # another seed on each rank, for the augmentation
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
if "--right" in sys.argv:
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size


for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    average_gradients(model)
    optimizer.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
