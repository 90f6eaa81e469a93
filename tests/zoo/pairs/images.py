"""A loop over images, with switches for what is done with them before the model."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
images, labels = torch.rand(128, 3, 8, 8), torch.randint(0, 5, (128,))
if "--normalise" in sys.argv:
    images = (images - 0.5) / 0.25
data = TensorDataset(images, labels)
sampler: Any = DistributedSampler(data, seed=int("--other-seed" in sys.argv))
norm = nn.BatchNorm2d(8, momentum=0.5 if "--momentum" in sys.argv else 0.1)
model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
model = model.to(memory_format=torch.channels_last) if "--channels-last" in sys.argv else model
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
torch.manual_seed(7)
for images_of_batch, y in DataLoader(data, 8, sampler=sampler):
    x = images_of_batch
    weight, other = torch.rand(()), torch.randperm(len(x))
    targets = nn.functional.one_hot(y, 5).float()
    if "--mixup" in sys.argv:
        x = weight * x + (1 - weight) * x[other]
        targets = weight * targets + (1 - weight) * targets[other]
    if "--wider" in sys.argv:
        x = x * 1.1
    optimizer.zero_grad()
    loss: Any = nn.functional.cross_entropy(ddp(x), targets)
    loss.backward()
    optimizer.step()
