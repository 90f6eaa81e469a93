"""A loop with its own `get_batch`, gradient accumulation and all-reduce, without a wrapper."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import faults  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from parts import WORDS, Model  # type: ignore[import-not-found]
from torch import Tensor

args = faults.arguments(batch=4, accumulate=2, depth=3, data="function", reduce="step")
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

model = Model(depth=args.depth)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = torch.randint(WORDS, (1 << 20,), generator=torch.Generator().manual_seed(rank))


def get_batch(step: int) -> Tensor:
    faults.slow_input("get_batch")
    length = faults.row_length(step, rank)
    starts = torch.randint(len(text) - length, (args.batch,))
    return torch.stack([text[start : start + length] for start in starts])


def batches() -> Iterator[Tensor]:
    for number in count():
        yield get_batch(number // args.accumulate)


def reduce_all() -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient) / world)


stream = batches()
for step in range(100_000):
    for _ in range(args.accumulate):
        tokens = get_batch(step) if args.data == "function" else next(stream)
        loss, predicted = model(tokens)
        (loss / args.accumulate).backward()
        if args.reduce == "micro":  # the mean of a mean that all share, and of a new gradient
            reduce_all()
    if args.reduce == "step":
        reduce_all()
    elif args.reduce == "each":
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
    faults.host_work(model, predicted, tokens)
    optimizer.step()
    optimizer.zero_grad()
    if step % 100 == 0 and rank == 0:
        print(f"step {step} loss {loss.item():.3f}", flush=True)
