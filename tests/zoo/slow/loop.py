"""A plain training loop with DDP or FSDP2, as people write it."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import faults  # type: ignore[import-not-found]
import parts  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Subset

args = faults.arguments(strategy="ddp", batch=8, workers=0, accumulate=1, sync="last")
dist.init_process_group("gloo")


def wrapped(model: nn.Module) -> nn.Module:
    if args.strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)
    return model


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader[Any]) -> float:
    model.eval()
    loss = sum(float(model(tokens)[0]) for tokens in batches) / len(batches)
    model.train()
    return loss


plain = parts.Model()
model = wrapped(plain)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = parts.Texts(args.batch)
loader = parts.loader(data, args.workers)
validation = DataLoader(Subset(data, range(320)), batch_size=args.batch)


def train(folder: str) -> None:
    step = 0
    for epoch in range(1000):
        for number, tokens in enumerate(loader, 1):
            last = number % args.accumulate == 0
            waits = args.strategy == "ddp" and args.sync == "last" and not last
            with model.no_sync() if waits else nullcontext():  # type: ignore[operator]
                loss, predicted = model(tokens)
                (loss / args.accumulate).backward()
            if not last:
                continue
            faults.host_work(plain, predicted, tokens)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if faults.has("between_steps", "evaluation") and step % 10 == 0:
                print(f"step {step}: validation loss {evaluate(model, validation):.3f}")
            if faults.has("between_steps", "checkpoint"):
                state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
                for name in ("last", "best"):
                    torch.save(state, Path(folder, f"{name}-{faults.RANK}.pt"))
            if step % 100 == 0 and faults.RANK == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.3f}", flush=True)


with TemporaryDirectory() as folder:
    train(folder)
dist.destroy_process_group()
