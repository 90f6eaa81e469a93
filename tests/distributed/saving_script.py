"""A loop that fails if a change that may save time was not made."""

from __future__ import annotations

import argparse
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

PIECE_BYTES = 2**26

parser = argparse.ArgumentParser()
parser.add_argument("--expect", required=True)
expected = parser.parse_args().expect
dist.init_process_group("gloo")
convolution = nn.Conv2d(2, 4, 3)
model = nn.Sequential(convolution, nn.Flatten(), nn.Linear(16, 1))
reductions = 0


def reduced(bucket: Any) -> torch.futures.Future[Tensor]:
    global reductions  # noqa: PLW0603  (DDP calls the hook)
    reductions += 1
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def resident_bytes() -> int:
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


trained: Any = model
if expected == "keep_unsharded":
    fully_shard(convolution)
    fully_shard(model)
else:
    trained = DistributedDataParallel(model)
    trained.register_comm_hook(None, lambda _, bucket: reduced(bucket))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
workers = int(expected == "prefetch")
loader = DataLoader(TensorDataset(torch.randn(16, 2, 4, 4)), 4, num_workers=workers)
resident = resident_bytes()
torch.ones(PIECE_BYTES // 4)
kept_bytes = resident_bytes() - resident
for (batch,) in cycle(loader):
    before = reductions
    optimizer.zero_grad(set_to_none=False)
    cleared = all(parameter.grad is None for parameter in model.parameters())
    for _ in range(2):
        outputs = trained(batch)
        whole = not isinstance(convolution.weight, DTensor)
        outputs.mean().backward()
    optimizer.step()
    made = {
        "workers": loader.num_workers == 2 and loader.persistent_workers,
        "prefetch": loader.prefetch_factor == 3,
        "bucket_mb": getattr(trained, "bucket_bytes_cap", 0) == 7 * 2**20,
        "threads": torch.get_num_threads() == 3,
        "fused": optimizer.defaults["fused"],
        "foreach": optimizer.defaults["foreach"],
        "set_to_none": cleared,
        "compile": model._compiled_call_impl is not None,
        "bucket_view": getattr(trained, "gradient_as_bucket_view", False),
        "keep_unsharded": whole,
        "no_sync": reductions - before == 1,
        "channels_last": convolution.weight.is_contiguous(memory_format=torch.channels_last),
        "malloc": kept_bytes > PIECE_BYTES // 2,
    }
    if not reductions or before:
        assert made[expected], f"{expected}: {made}"
