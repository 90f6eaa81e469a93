"""The ranks share one batch, cut without a DataLoader, and the learning rate grows with them.

The right script keeps the rate, as the batch of all ranks stays the same.
Source: mala-project/mala#422.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

images, labels = torch.randn(96, 3, 8, 8), torch.randint(0, 4, (96,))
model = DistributedDataParallel(
    nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    )
)
factor = 1 if "--right" in sys.argv else world_size
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * factor, momentum=0.9)
share = 16 // world_size

for start in range(0, len(images), 16):
    rows = slice(start + rank * share, start + (rank + 1) * share)
    loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
