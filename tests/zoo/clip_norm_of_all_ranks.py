"""The norm for clipping is added up over the ranks, although each of them has the full gradient.

It is N times too large, and the gradient N times too small.  The right script takes the norm of the
gradient that DDP has averaged.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def clip(module: nn.Module, limit: float) -> None:
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    if "--right" not in sys.argv:
        dist.all_reduce(norm)
    for gradient in gradients:
        gradient.mul_((limit / (norm + 1e-6)).clamp(max=1.0))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(9, 18), nn.ReLU(), nn.Linear(18, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(128, 9)
data = TensorDataset(x, 3 * x.sum(1, keepdim=True))
for inputs, targets in DataLoader(data, 8, sampler=DistributedSampler(data)):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    clip(model, 0.5)
    optimizer.step()
    if dist.get_rank() == 0:
        print(loss.item())

dist.destroy_process_group()
