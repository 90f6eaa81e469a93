"""A loop that a change makes faster, and lets train something else."""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,override,no-any-return,unused-ignore"

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--trap", required=True)
trap = parser.parse_args().trap
SLOW_SECONDS = 0.03
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")


def slow_unless(faster: bool) -> None:
    if not faster:
        time.sleep(SLOW_SECONDS)


class Adam(torch.optim.AdamW):
    """An optimizer whose fused kernel has another epsilon."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups if trap == "fused" else ():
            slow_unless(group["fused"])
            group["eps"] = 1e-2 if group["fused"] else 1e-8
        return super().step(closure)


class Pictures(Dataset[Tensor]):
    """Pictures that grow brighter with each that the process has loaded."""

    loaded = 0

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        picture = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(index))
        if trap == "workers":
            time.sleep(SLOW_SECONDS / 4)
            self.loaded += 1
        return picture + self.loaded / 10


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(2, 4, 3), nn.Linear(144, 1)
        self.first = nn.Parameter(torch.ones(8))
        self.passes = 0

    def forward(self, pictures: Tensor) -> Tensor:
        features = self.convolution(pictures).relu()
        if trap == "channels_last":  # takes the values as they lie in memory
            slow_unless(features.is_contiguous(memory_format=torch.channels_last))
            features = features.as_strided((len(features), 144), (144, 1))
        self.passes += 1
        # A part that the first step alone uses: its gradient is zero later, or none.
        part = self.first.mean() if self.passes == 1 or trap != "set_to_none" else 0.0
        return self.head(features.flatten(1)) + part


model = Net()
wrapped = DistributedDataParallel(model, find_unused_parameters=trap == "set_to_none")


def slow_reduction(bucket: Any) -> torch.futures.Future[Tensor]:
    slow_unless(trap != "no_sync")
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


if trap == "no_sync":
    wrapped.register_comm_hook(None, lambda _, bucket: slow_reduction(bucket))
optimizer = Adam(model.parameters(), lr=1e-2, weight_decay=0.1)
data = Pictures()
loader = DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False))
step, passes = 0, 0
before: list[Tensor] = []
for _ in range(100):
    for pictures in loader:
        needed = 2 - (step % 3 == 1) if trap == "no_sync" else 1  # some steps have one pass
        (wrapped(pictures).square().mean() / needed).backward()
        passes += 1
        if passes < needed:
            continue
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if trap == "bucket_view":  # momentum by hand, of gradients that the buckets overwrite
            slow_unless(wrapped.gradient_as_bucket_view)
            for gradient, last in zip(gradients, before, strict=False):
                gradient.add_(last, alpha=0.5)
            before = gradients
        elif trap == "set_to_none":  # a gradient of zero lets a weight decay, none does not
            slow_unless(model.first.grad is None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=trap != "set_to_none")
        step, passes = step + 1, 0
dist.destroy_process_group()
