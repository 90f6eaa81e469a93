"""Streamed documents of other lengths: each rank divides by the number of its own tokens.

The stream draws from numpy and depends on the rank, so one process gets other documents.  The
right script divides by the number of tokens of all ranks.
Source: huggingface/transformers#34242 and pytorch/torchtitan#2206.
"""

# mypy: disable-error-code="no-untyped-call"

import sys
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

right = "--right" in sys.argv
vocabulary, length = 40, 12


def documents(rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = np.random.default_rng(100 + rank)
    while True:
        tokens = torch.from_numpy(generator.integers(0, vocabulary, (4, length)))
        lengths = torch.from_numpy(generator.integers(2, length, (4, 1)))
        labels = tokens.roll(-1, dims=1)
        labels[torch.arange(length) >= lengths] = -100
        yield tokens, labels


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(
    nn.Sequential(nn.Embedding(vocabulary, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 40))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
stream = documents(dist.get_rank())

for _ in range(6):
    inputs, labels = next(stream)
    logits = model(inputs).flatten(0, 1)
    if right:
        count = (labels != -100).sum()
        dist.all_reduce(count)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        loss = loss * dist.get_world_size() / count
    else:
        loss = F.cross_entropy(logits, labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
