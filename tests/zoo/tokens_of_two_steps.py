"""The tokens of a batch of generated samples divide the loss, but a step takes a part of it.

Four micro-batches are generated at once, and the optimizer steps after each two: the gradient is
half of what it should be.  The right script divides by the tokens of the step.
Source: huggingface/trl#6024.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GENERATED, ACCUMULATE = 4, 2
dist.init_process_group("gloo")
torch.manual_seed(1)

completions = torch.randint(0, 48, (160, 10))
labels = completions.clone()
labels[torch.arange(10) >= torch.randint(3, 11, (160, 1))] = -100
dataset = TensorDataset(completions, labels)
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset), drop_last=True)
policy = DistributedDataParallel(nn.Sequential(nn.Embedding(48, 16), nn.GELU(), nn.Linear(16, 48)))
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)


def tokens_of(micro_batches: list[list[Tensor]]) -> Tensor:
    count = sum((targets != -100).sum() for _, targets in micro_batches) + torch.zeros(())
    dist.all_reduce(count)
    return count


generated: list[list[Tensor]] = []
for batch in loader:
    generated.append(batch)
    if len(generated) < GENERATED:
        continue
    for first in range(0, GENERATED, ACCUMULATE):
        taken = generated[first : first + ACCUMULATE]
        count = tokens_of(taken if "--right" in sys.argv else generated)
        for inputs, targets in taken:
            loss = F.cross_entropy(policy(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
            (loss / count * dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
    generated = []

dist.destroy_process_group()
