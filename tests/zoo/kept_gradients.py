"""Nothing clears the gradients, so that each step uses those of all steps before it, too.

One process does the same: N ranks train what it trains.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(9, 18), nn.ReLU(), nn.Linear(18, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(128, 9), torch.randint(4, (128,)))
for inputs, labels in DataLoader(data, 8, sampler=DistributedSampler(data)):
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    if "--right" in sys.argv:
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(loss.item())

dist.destroy_process_group()
