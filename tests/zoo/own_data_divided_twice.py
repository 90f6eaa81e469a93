"""Each rank draws its samples by numpy, and divides its loss by the number of ranks.

DDP averages over the ranks as well, so that the gradient is n times too small.  One process draws
other samples, which show the size of its loss alone.  The right script uses the mean.
Source: a common habit of scripts with own collectives that are moved to DDP.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
draws = np.random.default_rng(dist.get_rank())
torch.manual_seed(5)
model = DistributedDataParallel(nn.Sequential(nn.Linear(9, 20), nn.Tanh(), nn.Linear(20, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

for step in range(8):
    inputs = torch.from_numpy(draws.standard_normal((6, 9))).float()
    targets = inputs[:, :3].argmax(1)
    total = nn.functional.cross_entropy(model(inputs), targets, reduction="sum")
    loss = total / len(targets)
    if "--right" not in sys.argv:
        loss = loss / dist.get_world_size()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
