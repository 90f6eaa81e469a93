"""Micro-batches with few and with many targets count alike in a step.

Each micro-batch is divided by the targets of all ranks in it, and all of them are averaged.  One
process does the same.  The right script divides by all targets of the step.
Source: MakazhanAlpamys/Soup#943.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 2
dist.init_process_group("gloo")
torch.manual_seed(0)

vocabulary, length = 40, 16
tokens = torch.randint(0, vocabulary, (128, length))
labels = tokens.roll(-1, dims=1)
answers = torch.randint(1, length, (128, 1))  # the prompt before the answer is masked
labels[torch.arange(length) < length - answers] = -100

dataset = TensorDataset(tokens, labels)
loader = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset), drop_last=True)
model = DistributedDataParallel(nn.Sequential(nn.Embedding(vocabulary, 32), nn.Linear(32, 40)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def targets_of(batches: list[list[torch.Tensor]]) -> torch.Tensor:
    count = torch.stack([(targets != -100).sum() for _, targets in batches]).sum()
    dist.all_reduce(count)
    return count


window: list[list[torch.Tensor]] = []
for batch in loader:
    window.append(batch)
    if len(window) < ACCUMULATE:
        continue
    optimizer.zero_grad()
    for inputs, targets in window:
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
        if "--right" in sys.argv:
            loss = loss * dist.get_world_size() / targets_of(window)
        else:
            loss = loss * dist.get_world_size() / targets_of([[inputs, targets]]) / ACCUMULATE
        loss.backward()
    optimizer.step()
    window = []

dist.destroy_process_group()
