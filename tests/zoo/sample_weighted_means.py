"""Token means of micro-batches are weighted by their samples, and not by their tokens.

The update then depends on the size of the micro-batches, in one process too.  The right script
divides the sum of each micro-batch by the tokens of the batch on all ranks.
Source: verl-project/verl#5625 and #7200.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MICRO_BATCH = 3
dist.init_process_group("gloo")
ranks = dist.get_world_size()
torch.manual_seed(3)

prompts = torch.randint(0, 30, (96, 12))
responses = prompts.roll(-1, dims=1)
responses[torch.arange(12) >= torch.randint(2, 13, (96, 1))] = -100
dataset = TensorDataset(prompts, responses)
loader = DataLoader(dataset, batch_size=6, sampler=DistributedSampler(dataset))

actor = DDP(nn.Sequential(nn.Embedding(30, 24), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 30)))
optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-3)

for batch in loader:
    tokens = (batch[1] != -100).sum()
    dist.all_reduce(tokens)
    optimizer.zero_grad()
    micro_batches = zip(*(part.split(MICRO_BATCH) for part in batch), strict=True)
    for inputs, targets in micro_batches:
        logits = actor(inputs).flatten(0, 1)
        if "--right" in sys.argv:
            loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") * ranks / tokens
        else:
            loss = F.cross_entropy(logits, targets.flatten()) * len(inputs) / len(batch[0])
        loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}")

dist.destroy_process_group()
