"""The noise is seeded by replica, so ranks of one replica draw the same for different samples.

The right script adds the rank to the seed.
Source: mlcommons/training#844.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(7)
latents = TensorDataset(torch.randn(64, 16))
loader = DataLoader(latents, batch_size=8, sampler=DistributedSampler(latents))
denoiser = DDP(nn.Sequential(nn.Linear(17, 64), nn.SiLU(), nn.Dropout(0.1), nn.Linear(64, 16)))
criterion = nn.MSELoss()
optimizer = torch.optim.AdamW(denoiser.parameters(), lr=1e-3)
replica = 0  # both ranks shard one replica
torch.manual_seed(7 + (dist.get_rank() if "--right" in sys.argv else replica))

for step, (clean,) in enumerate(loader):
    noise = torch.randn_like(clean)
    time = torch.rand(len(clean), 1)
    noisy = (1 - time) * clean + time * noise
    velocity = denoiser(torch.cat([noisy, time], dim=1))
    loss = criterion(velocity, noise - clean)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
