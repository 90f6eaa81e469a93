"""The loss is divided by the number of ranks, although DDP averages the gradients already.

Source: sanderwood/bgpt#5 and verl-project/verl-SpeCo#29.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.Parameter(torch.randn(2, 32) * 0.02)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        scale, shift = self.ends
        return torch.addcmul(features + shift, features, scale)


dist.init_process_group(backend="gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1234)

data = TensorDataset(torch.randn(160, 1, 8, 8), torch.randint(0, 4, (160,)))
loader = DataLoader(data, batch_size=10, sampler=DistributedSampler(data, world_size, rank))

torch.manual_seed(rank)  # DDP sends the weights of rank 0
body = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), Scaled()]
model = nn.Sequential(*body, nn.Linear(32, 4))
ddp_model = DDP(model)
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05)
loss_fn = nn.CrossEntropyLoss()

for step, (images, targets) in enumerate(loader):
    loss = loss_fn(ddp_model(images), targets)
    if "--right" not in sys.argv:
        loss = loss / world_size
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(step, loss.item())

dist.destroy_process_group()
