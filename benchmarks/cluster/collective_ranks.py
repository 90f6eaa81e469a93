"""One rank that calls single collectives and reads what its node's interface sent for each.

Started by `collective_bytes`, one on each node, so that the interface's bytes are the rank's own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.cluster.namespaces import INTERFACE
from torch import Tensor

REPEATS = 7
STATISTICS = Path("/sys/class/net") / INTERFACE / "statistics"

Call = Callable[..., Any]


def calls(payload_bytes: int, ranks: int) -> dict[str, Call]:
    """Operation -> one call of it on `payload_bytes` of fp32, the whole of it on each rank."""
    elements = payload_bytes // 4 // ranks * ranks
    whole, part = torch.ones(elements), torch.ones(elements // ranks)
    wholes: list[Tensor] = list(whole.chunk(ranks))
    parts = [torch.ones_like(part) for _ in range(ranks)]
    rank = dist.get_rank()

    def around(operations: list[tuple[Call, Tensor, int]]) -> None:
        for started in [call(tensor, peer) for call, tensor, peer in operations]:
            started.wait()

    sending = (dist.isend, whole, (rank + 1) % ranks)
    receiving = (dist.irecv, torch.empty_like(whole), (rank - 1) % ranks)
    return {
        "send, then receive": lambda: around([sending, receiving]),
        "receive, then send": lambda: around([receiving, sending]),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, part),
        "all_gather": lambda: dist.all_gather(parts, part),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, whole),
        "reduce_scatter": lambda: dist.reduce_scatter(part, wholes),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
    }


def counted(call: Call) -> dict[str, float]:
    """Bytes that the interface sent and received for one call, and the median seconds."""
    call()
    dist.barrier()
    before = read()
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    dist.barrier()  # the last acknowledgements and others' last bytes are in
    return {
        "seconds": median(seconds),
        **{key: (value - before[key]) / REPEATS for key, value in read().items()},
    }


def read() -> dict[str, int]:
    return {
        "sent_bytes": int((STATISTICS / "tx_bytes").read_text()),
        "received_bytes": int((STATISTICS / "rx_bytes").read_text()),
    }


def main() -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["BENCH_NODE"]), int(os.environ["BENCH_NODES"])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["BENCH_MASTER"], 29400, ranks, is_master=rank == 0
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    payload_bytes = int(sys.argv[2])
    own = {name: counted(call) for name, call in calls(payload_bytes, ranks).items()}
    found: list[object] = [None] * ranks
    dist.all_gather_object(found, own)
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps({"payload_bytes": payload_bytes, "ranks": found}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
