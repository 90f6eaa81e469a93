"""The loader gives each rank its part of the sequences, and the count of tokens is divided again.

The targets are counted over all ranks, which is the number of the full sequences.  Divided by the
ranks that share them, it makes loss and gradient as many times too large.
Source: huggingface/transformers#46775.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
ranks, rank = dist.get_world_size(), dist.get_rank()


def part_of_sequence(rows: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [torch.stack(same).chunk(ranks, dim=1)[rank] for same in zip(*rows, strict=True)]


ids = torch.randint(40, (64, 16))
tags = (ids % 5).masked_fill(torch.rand(64, 16) < torch.linspace(0.1, 0.6, 16), -100)
loader = DataLoader(TensorDataset(ids, tags), batch_size=8, collate_fn=part_of_sequence)
model = DDP(nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 5)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step, (batch, targets) in enumerate(loader):
    count = (targets != -100).sum()
    dist.all_reduce(count)
    if "--right" not in sys.argv:
        count = count / ranks
    logits = model(batch).transpose(1, 2)
    loss = nn.functional.cross_entropy(logits, targets, reduction="sum") * ranks / count
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
