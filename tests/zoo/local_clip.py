"""Each rank clips its own gradient before the gradients are averaged.

A rank with a large gradient is scaled down by another factor than its neighbours, so the mean
points elsewhere.  The right script averages first and clips the mean.
Source: mindspore-lab/mindcv#603 and determined-ai/determined#602.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

right = "--right" in sys.argv
max_norm = 0.1

dist.init_process_group("gloo")
torch.manual_seed(11)  # the same weights on all ranks
dataset = TensorDataset(torch.randn(96, 10), 3 * torch.randn(96, 2))
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))
model = nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def all_reduce_mean() -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())


for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    if right:
        all_reduce_mean()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        all_reduce_mean()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
