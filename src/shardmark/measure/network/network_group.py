"""The process group of ranks that measure the links between them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from shardmark.measure.network.network_probe import DEVICE_VARIABLE, MEETING_FILE


@contextmanager
def joined(folder: Path | None) -> Iterator[torch.device]:
    """The process group that the environment describes: the device of this rank.

    The ranks meet at a file in the folder, or without one as `torchrun` tells them to.
    """
    device_type = os.environ.get(DEVICE_VARIABLE, "auto")
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if device.index >= (count := torch.cuda.device_count()):
            raise SystemExit(f"rank {rank} has no CUDA device: the number of them here is {count}")
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device_type == "cuda" else "gloo"
    store = None if folder is None else dist.FileStore(str(folder / MEETING_FILE), ranks)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=ranks,
        device_id=device if device_type == "cuda" else None,
    )
    try:
        yield device
        dist.barrier()
    finally:
        dist.destroy_process_group()
