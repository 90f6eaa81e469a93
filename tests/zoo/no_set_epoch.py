"""The loop never calls `set_epoch`, so the sampler repeats the same order in every epoch.

Source: pytorch/pytorch#31771 and kan-bayashi/ParallelWaveGAN#177.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)

dataset = TensorDataset(torch.randn(32, 14), torch.randn(32, 1))
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=8, shuffle=False, sampler=sampler)

model = DDP(nn.Sequential(nn.Linear(14, 28), nn.Tanh(), nn.Linear(28, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.MSELoss()

for epoch in range(4):
    if "--right" in sys.argv:
        sampler.set_epoch(epoch)
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: {total / len(loader):.4f}")

dist.destroy_process_group()
