"""Gradients are clipped after each micro-batch, while they are still those of one rank.

The right script clips once, after the micro-batch whose gradients are reduced.
Accelerate's `accumulate` does the same where `clip_grad_norm_` is not behind `sync_gradients`.
"""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(3)
data = TensorDataset(torch.randn(96, 12), torch.randn(96))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
model = DDP(nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion, accumulate = nn.MSELoss(), 3
for number, (inputs, targets) in enumerate(loader, start=1):
    last = number % accumulate == 0
    with nullcontext() if last else model.no_sync():
        loss = criterion(model(inputs).squeeze(1), targets) / accumulate
        loss.backward()
    if last or "--right" not in sys.argv:
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    if last:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
