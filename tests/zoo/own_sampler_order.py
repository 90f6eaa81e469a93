"""A sampler of the script ignores the epoch, so that all epochs have the same order.

Its batches are divided among the ranks by another sampler around it, as libraries do.
Source: huggingface/accelerate#2157.
"""

# mypy: disable-error-code="no-untyped-call"

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset


class SeededSampler(Sampler[int]):
    """Shuffles by a seed."""

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.seed, self.epoch = length, seed, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        seed = self.seed + self.epoch if "--right" in sys.argv else self.seed
        generator = torch.Generator().manual_seed(seed)
        yield from torch.randperm(self.length, generator=generator).tolist()
        self.epoch += 1


class BatchesOfRank(BatchSampler):
    """Gives each rank every n-th batch."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = [*super().__iter__()]
        return iter(batches[dist.get_rank() :: dist.get_world_size()])


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(40, 12), torch.randint(0, 4, (40,)))
sampler = BatchesOfRank(SeededSampler(len(data), 42), batch_size=10, drop_last=True)
loader = DataLoader(data, batch_sampler=sampler)

model = DDP(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for _ in range(4):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
