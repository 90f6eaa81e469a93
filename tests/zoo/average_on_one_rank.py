"""Rank 0 keeps a moving average of the weights, and writes it back to its model alone.

From then on the ranks train models of different weights; the right script averages on all ranks.
Source: lucidrains/ema-pytorch#9.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(4)

curves = torch.randn(80, 12).cumsum(1)
dataset = TensorDataset(curves[:, :8], curves[:, 8:])
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
model = DDP(nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
averages = [parameter.detach().clone() for parameter in model.parameters()]

for step, (past, future) in enumerate(loader):
    optimizer.zero_grad()
    loss = nn.functional.huber_loss(model(past), future)
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0 or "--right" in sys.argv:
        with torch.no_grad():
            for average, parameter in zip(averages, model.parameters(), strict=True):
                average.lerp_(parameter, 0.3)
                if step % 2 == 1:
                    parameter.copy_(average)
    print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
