"""The loss function returns a sum and its count, and the trainer drops the count.

The gradient is the number of tokens / n times that of the mean, another factor in each step.
Source: radixark/miles#3231.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(2)

tokens = torch.randint(0, 24, (96, 14))
labels = tokens.flip(1)
labels[torch.arange(14) >= torch.randint(2, 15, (96, 1))] = -100
dataset = TensorDataset(tokens, labels)
loader = DataLoader(dataset, batch_size=6, sampler=DistributedSampler(dataset), drop_last=True)
model = DDP(nn.Sequential(nn.Embedding(24, 24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


for inputs, targets in loader:
    loss, count = loss_of(model(inputs), targets)
    dist.all_reduce(count)
    if "--right" in sys.argv:
        loss = loss * dist.get_world_size() / count
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f} over {int(count)} tokens")

dist.destroy_process_group()
