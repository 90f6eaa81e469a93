"""Batch normalisation uses the mean and variance of the rank's share of the batch.

One process with the full batch normalises by other numbers.  The right script adds up the
statistics of all ranks, as SyncBatchNorm does on GPUs.
Source: pytorch/pytorch#2584 and ptrblck/pytorch_misc#5.
"""

# mypy: disable-error-code="no-untyped-call"

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad)
        return grad


class CrossRankBatchNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.running_mean is None or self.running_var is None:
            return super().forward(x)
        count = len(x) * dist.get_world_size()
        mean = SumOverRanks.apply(x.sum(0)) / count
        var = SumOverRanks.apply((x - mean).square().sum(0)) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(var * count / (count - 1), 0.1)
        y: Tensor = (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias
        return y


dist.init_process_group("gloo")
torch.manual_seed(0)
norm = CrossRankBatchNorm if "--right" in sys.argv else nn.BatchNorm1d
x = torch.randn(96, 10) * torch.rand(96, 1) * 4
dataset = TensorDataset(x, torch.randint(0, 4, (96,)))
loader = DataLoader(dataset, batch_size=6, sampler=DistributedSampler(dataset))
model = DDP(nn.Sequential(nn.Linear(10, 32), norm(32), nn.ReLU(), nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for step, (inputs, labels) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
