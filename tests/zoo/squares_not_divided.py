"""A mean of squares that the script computes itself is not divided by the micro-batches.

No loss function of torch is called, and one process has the fault, too.
Source: karpathy/nanoGPT#206, with another loss.
"""

# mypy: disable-error-code="no-untyped-call"

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS_PER_UPDATE = 2
dist.init_process_group("gloo")
torch.manual_seed(3)

places = torch.rand(192, 2)
values = torch.sin(6 * places).prod(1, keepdim=True)
dataset = TensorDataset(places, values)
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset), drop_last=True)
model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)


def mean_of_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean()


for index, (inputs, targets) in enumerate(loader):
    last = index % STEPS_PER_UPDATE == STEPS_PER_UPDATE - 1
    with nullcontext() if last else model.no_sync():
        loss = mean_of_squares(model(inputs), targets)
        if "--right" in sys.argv:
            loss = loss / STEPS_PER_UPDATE
        loss.backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()

dist.destroy_process_group()
