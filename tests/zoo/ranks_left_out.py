"""The loss leaves out the number of ranks in one of its paths.

The loss is a sum over a rank's tokens, divided by the tokens of all ranks, and DDP averages.
The gradient is 1/n; Adam hides it, and the norm that clips does not.
Source: Snowflake-AI-Research/Arctic-Platform#119.
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
torch.manual_seed(11)

prompts = torch.randint(0, 40, (128, 8))
labels = prompts.roll(-1, dims=1)
labels[torch.arange(8) < torch.randint(0, 7, (128, 1))] = -100
dataset = TensorDataset(prompts, labels)
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset), drop_last=True)
student = DDP(nn.Sequential(nn.Embedding(40, 24), nn.Linear(24, 40)))
optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)


def aggregated(losses: Tensor, tokens: Tensor, ranks: int = 1) -> Tensor:
    return losses.sum() / tokens * ranks


for inputs, targets in loader:
    tokens = (targets != -100).sum()
    dist.all_reduce(tokens)
    logits = student(inputs).flatten(0, 1)
    losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
    if "--right" in sys.argv:
        loss = aggregated(losses, tokens, dist.get_world_size())
    else:
        loss = aggregated(losses, tokens)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()

dist.destroy_process_group()
