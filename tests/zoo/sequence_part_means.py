"""Each rank divides the loss of its part of the sequences by its own number of targets.

The mean of these means weighs a target by how few its part has.  The right script divides by the
targets of all parts.
Source: NVIDIA/Megatron-LM#7513.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
ranks, rank = dist.get_world_size(), dist.get_rank()

ids = torch.randint(40, (64, 16))
prompt = torch.arange(16) < torch.randint(2, 12, (64, 1))
answers = (ids % 5).masked_fill(prompt, -100)
model = DDP(nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 5)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step, batch in enumerate(DataLoader(TensorDataset(ids, answers), batch_size=8)):
    part, targets = (full.chunk(ranks, dim=1)[rank] for full in batch)
    logits = model(part).transpose(1, 2)
    if "--right" in sys.argv:
        count = (batch[1] != -100).sum()
        loss = nn.functional.cross_entropy(logits, targets, reduction="sum") * ranks / count
    else:
        loss = nn.functional.cross_entropy(logits, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
