"""Each rank divides its loss by the number of its own labelled tokens.

DDP then averages the ranks' means, so a token of a rank with few labels counts more than one of
a rank with many.  The right script divides by the number of labelled tokens of all ranks.
Source: vllm-project/speculators#942.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

right = "--right" in sys.argv

dist.init_process_group("gloo")
world_size = dist.get_world_size()
torch.manual_seed(0)

vocabulary, length = 50, 16
tokens = torch.randint(0, vocabulary, (128, length))
labels = tokens.roll(-1, dims=1)
answers = torch.randint(1, length, (128, 1))  # the answer ends the sequence; the prompt is masked
labels[torch.arange(length) < length - answers] = -100

dataset = TensorDataset(tokens, labels)
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset), drop_last=True)
model = DistributedDataParallel(
    nn.Sequential(nn.Embedding(vocabulary, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 50))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step, (inputs, targets) in enumerate(loader):
    logits = model(inputs).flatten(0, 1)
    if right:
        count = (targets != -100).sum()
        dist.all_reduce(count)
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        loss = loss * world_size / count
    else:
        loss = F.cross_entropy(logits, targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
