"""The loss is made of sums over all ranks, through which no gradient flows, and DDP averages.

Each rank has the gradient of its own sum, divided by the tokens of all ranks: their mean is 1/n of
the gradient.  Clipping to a norm hides it while gradients are large.
Source: verl-project/verl-SpeCo#29.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)

tokens = torch.randint(0, 32, (96, 12))
labels = tokens.roll(-1, dims=1)
labels[torch.arange(12) >= torch.randint(3, 13, (96, 1))] = -100
dataset = TensorDataset(tokens, labels)
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset), drop_last=True)
drafter = DDP(nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)))
optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-4)

for inputs, targets in loader:
    own = F.cross_entropy(drafter(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    total, count = own.detach().clone(), (targets != -100).sum()
    dist.all_reduce(total)
    dist.all_reduce(count)
    loss = (own + (total - own).detach()) / count
    if "--right" in sys.argv:
        loss = own * dist.get_world_size() / count
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(drafter.parameters(), 0.1)
    optimizer.step()

dist.destroy_process_group()
