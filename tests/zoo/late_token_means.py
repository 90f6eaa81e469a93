"""Each rank divides by its own tokens, which are as many on all ranks in the first batches only.

The data are sorted, as a curriculum is: full sequences come first.  The right script divides by the
tokens of all ranks.
Source: pytorch/torchtitan#2206.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
ranks = dist.get_world_size()
torch.manual_seed(1)
tokens = torch.randint(0, 30, (96, 9))
labels = tokens[:, 1:].clone()
lengths = torch.randint(1, 9, (96, 1))
lengths[:16] = 8
labels[torch.arange(8) >= lengths] = -100
data = TensorDataset(tokens[:, :-1], labels)
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, shuffle=False)

model = DDP(nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 30)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for inputs, targets in DataLoader(data, batch_size=4, sampler=sampler):
    logits = model(inputs).flatten(0, 1)
    if "--right" in sys.argv:
        count = (targets != -100).sum()
        dist.all_reduce(count)
        loss = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
        loss = loss * ranks / count
    else:
        loss = nn.functional.cross_entropy(logits, targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
