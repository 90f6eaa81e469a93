"""Accumulation begins after a warm-up, and always the first micro-batch is synchronised.

Source: modelscope/FunASR#3472, whose flag is wrong from the first step on.
"""

# mypy: disable-error-code="no-untyped-call"

import itertools
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(11)
data = TensorDataset(torch.randn(128, 13), torch.randn(128, 2))
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, shuffle=False)
batches = iter(DataLoader(data, batch_size=4, sampler=sampler))

model = DDP(nn.Sequential(nn.Linear(13, 26), nn.ReLU(), nn.Linear(26, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    micro_batches = [*itertools.islice(batches, 1 if step == 0 else 3)]
    synchronised = len(micro_batches) - 1 if "--right" in sys.argv else 0
    optimizer.zero_grad()
    for index, (inputs, targets) in enumerate(micro_batches):
        with nullcontext() if index == synchronised else model.no_sync():
            loss = nn.functional.mse_loss(model(inputs), targets)
            (loss / len(micro_batches)).backward()
    optimizer.step()
dist.destroy_process_group()
