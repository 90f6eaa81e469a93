"""Starts gloo groups on this machine without a trial around them, for what a trial cannot count."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from shardmark.core.environment_variables import DEVICE_TYPE_VARIABLE
from shardmark.strategies.base import RankContext


def run_ranks(work: Callable[..., Any], *arguments: Any, ranks: int, seconds: float) -> list[Any]:
    """What `work(process, *arguments)` returns on each rank, in rank order.

    The ranks are spawned, use one thread each, and meet at a file; after `seconds` they are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = start_processes(
            _enter, (work, arguments, ranks, folder), nprocs=ranks, join=False, start_method="spawn"
        )
        deadline = time.monotonic() + seconds
        try:
            while not context.join(timeout=1):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"ranks were not done after {seconds:g} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        # What our own ranks pickled a moment ago.
        return [
            pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(ranks)
        ]


def _enter(
    rank: int, work: Callable[..., Any], arguments: tuple[Any, ...], ranks: int, folder: str
) -> None:
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GLOO_SOCKET_IFNAME": "lo",
            "KINETO_LOG_LEVEL": "99",
            DEVICE_TYPE_VARIABLE: "cpu",
        }
    )
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    process = RankContext(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=ranks,
        device=torch.device("cpu"),
    )
    found = work(process, *arguments)
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
