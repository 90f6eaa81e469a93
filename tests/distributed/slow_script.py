"""A loop that counts what it does, and fails if an intervention did not take it away."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset

LATE_SECONDS = 0.2
"""Sleep of rank 1 in each step: rank 0 does not wait for it without peers."""

parser = argparse.ArgumentParser()
for name in ("loads", "updates", "evaluates"):
    parser.add_argument(f"--{name}-at-most", type=int, default=10**6)
for name in (
    *("functions", "validates", "saves", "prints", "shows", "pin", "alone", "fsdp"),
    *("epochs", "stay"),
):
    parser.add_argument(f"--{name}", action="store_true")
options = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
counts = {"loads": 0, "updates": 0, "evaluates": 0}


def count(name: str) -> None:
    counts[name] += 1
    most = getattr(options, f"{name}_at_most")
    assert counts[name] <= most, f"{counts[name]} {name}, at most {most}"


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        if index % 4 == 0:
            count("loads")
        return torch.full((8,), float(index))


class Evaluated(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            count("evaluates")
        return super().forward(inputs)


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if any(p.grad is not None for group in self.param_groups for p in group["params"]):
            count("updates")
        return super().step(closure)


def get_batch() -> Tensor:
    count("loads")
    return torch.randn(4, 8)


def batches() -> Iterator[Tensor]:
    while True:
        if options.functions:
            yield get_batch()
        elif options.epochs:
            yield from short_epochs
        else:
            yield from DataLoader(Numbers(), 4)


short_epochs = DataLoader(
    Subset(Numbers(), range(8)), 4, num_workers=1, persistent_workers=options.stay
)
if options.pin:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
model: nn.Module = nn.Sequential(nn.Linear(8, 8), Evaluated(8, 1))
trained: Any = fully_shard(model) if options.fsdp else DistributedDataParallel(model)
optimizer = Counting(model.parameters(), lr=1e-3)
for step, batch in enumerate(batches()):
    started = time.perf_counter()
    if rank and options.alone:
        time.sleep(LATE_SECONDS)
    if options.epochs and step > 2 and not options.stay:
        assert not multiprocessing.active_children(), "workers load what nobody reads"
    optimizer.zero_grad()
    trained(batch).mean().backward()
    if not rank and options.alone and step > 2:
        assert time.perf_counter() - started < LATE_SECONDS, "rank 0 waits for rank 1"
    optimizer.step()
    if options.evaluates_at_most < 10**6:
        model.eval()
        with torch.no_grad():
            model(torch.ones(4, 8))
        model.train()
    if options.validates:
        next(iter(DataLoader(Numbers(), 2)))
    if options.saves:
        checkpoint = Path(f"checkpoint-{rank}-{step}.pt")
        torch.save(model.state_dict(), checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").rename(checkpoint)  # complete
        assert (checkpoint.stat().st_size > 0) == (step < 1)
        sent: list[Any] = [None, None]
        dist.all_gather_object(sent, torch.ones(2))  # torch pickles a tensor by its own `save`
        assert all(map(torch.is_tensor, sent))
    if options.shows:
        texts = [repr(torch.randn(64, 64)) for _ in range(40)]
    if options.prints:
        assert print("x" * 2) is None
    if options.alone:
        said: list[Any] = [None, None]
        dist.all_gather_object(said, {rank: step})
        assert {number for one in said for number in one} == {0, 1}
        sizes = torch.empty(2, dtype=torch.long)
        dist.all_to_all_single(sizes, torch.tensor([1, 2]))
        assert 2 <= int(sizes.sum()) <= 4
