"""A running mean normalises the inputs before the model, without gradients, on each rank's own.

The module has no parameters, so that DDP cannot wrap it and broadcasts none of its buffers.  The
right script averages the mean of the batch over the ranks.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class RunningMean(nn.Module):
    """Subtracts the mean of the inputs so far, and limits what is left."""

    mean: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=0)
        if "--right" in sys.argv:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        self.mean.lerp_(mean, 0.3)
        return x - self.mean


dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(2 + torch.randn(96, 6), torch.randint(0, 3, (96,)))
loader = DataLoader(dataset, batch_size=6, sampler=DistributedSampler(dataset))

normalise = RunningMean(6)
model = DDP(nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

for step, (x, y) in enumerate(loader):
    with torch.no_grad():
        inputs = normalise(x).clamp(-3, 3)
    loss = nn.functional.cross_entropy(model(inputs), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
