"""A running mean in a buffer follows the rank's own batches, and DDP does not broadcast buffers.

The ranks normalise their inputs by different means.  The right script averages the mean of the
batch over the ranks before it updates the buffer.
Source: ZhikangNiu/encodec-pytorch#15.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class RunningCentre(nn.Module):
    """Subtracts an exponential moving average of the inputs' mean."""

    mean: Tensor

    def __init__(self, features: int, decay: float = 0.8) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("mean", torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            batch_mean = x.detach().mean(dim=0)
            if "--right" in sys.argv:
                dist.all_reduce(batch_mean)
                batch_mean /= dist.get_world_size()
            self.mean.mul_(self.decay).add_(batch_mean, alpha=1 - self.decay)
        return x - self.mean


dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(2 + torch.randn(96, 6), torch.randint(0, 3, (96,)))
loader = DataLoader(dataset, batch_size=6, sampler=DistributedSampler(dataset))

model = DDP(
    nn.Sequential(RunningCentre(6), nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3)),
    broadcast_buffers=False,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

for step, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
