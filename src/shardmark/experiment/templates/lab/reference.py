"""Trains what an exercise trains, but slowly: `torchrun --nproc-per-node 2 reference.py 3`.

The number is that of the exercise.  PyTorch's DDP reduces the gradients, here without overlap.
"""

import sys

import lab
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional

exercise = sys.argv[1]


def reduce_by_rank_0(gradients):
    """Let one rank add, and send the sums to the others, as a parameter server does."""
    dist.reduce(gradients, 0)
    dist.broadcast(gradients, 0)


lab.start()
model = lab.with_ddp(
    lab.build_model(),
    bucket_bytes=1 if exercise in "12" else lab.BUCKET_BYTES,  # a message for each tensor
    reduce=reduce_by_rank_0 if exercise == "1" else dist.all_reduce,
)
if exercise == "4":  # which sends each parameter by itself
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def step(inputs, targets):
    optimizer.zero_grad()
    functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def step_of_micro_batches(micro_batches):
    """Reduce the gradients of each micro-batch by itself."""
    optimizer.zero_grad()
    count = sum((targets != -100).sum() for _, targets in micro_batches)
    dist.all_reduce(count)
    for inputs, targets in micro_batches:
        loss = functional.cross_entropy(model(inputs), targets, reduction="sum")
        (loss * dist.get_world_size() / count).backward()  # DDP divides by the number of ranks
    optimizer.step()


if exercise == "5":
    lab.train(step_of_micro_batches, micro_batches=4)
else:
    lab.train(step)
