"""Bytes that single collectives send over a link, and their time, beside the least possible."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.cluster.bench import ROOT, bench
from benchmarks.cluster.namespaces import INTERFACE
from benchmarks.harness import Table

from shardmark.base.errors import ShardmarkError

MEASURING_SECONDS = 600.0
MB = 1e6
REPEATS = 7
STATISTICS = Path("/sys/class/net") / INTERFACE / "statistics"
LEAST_SHARE: dict[str, Callable[[int], float]] = {
    "send, then receive": lambda _: 1.0,
    "receive, then send": lambda _: 1.0,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather_into_tensor": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all_single": lambda n: (n - 1) / n,
}
"""Least fraction of the payload that each of n ranks has to send: that of a ring."""


def measure(*, nodes: int, payload_bytes: int, bits_per_second: float | None) -> Table:
    """Measure each operation among one rank a node, over links of that speed."""
    with (
        tempfile.TemporaryDirectory() as folder,
        bench(nodes=nodes, bits_per_second=bits_per_second) as built,
    ):
        out = Path(folder) / "ranks.json"
        words = [sys.executable, "-m", "benchmarks.cluster.collectives"]
        codes = built.run_everywhere(
            lambda _: [*words, str(out), str(payload_bytes)],
            seconds=MEASURING_SECONDS,
            environment={"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
            logs=Path(folder),
        )
        if any(codes) or not out.exists():
            log = (Path(folder) / "node0.log").read_text()
            raise ShardmarkError(f"the ranks ended with {codes}: {log[-2000:]}")
        ranks = json.loads(out.read_text())
    rows = []
    for operation, least_share in LEAST_SHARE.items():
        sent = fmean(rank[operation]["sent_bytes"] for rank in ranks)
        seconds = fmean(rank[operation]["seconds"] for rank in ranks)
        least = least_share(nodes) * payload_bytes
        row = (operation, f"{sent / MB:.2f}", f"{least / MB:.2f}", f"{sent / least:.2f}")
        least_seconds = None if bits_per_second is None else 8 * least / bits_per_second
        bounds = (
            ("-", "-")
            if least_seconds is None
            else (f"{least_seconds * 1000:.1f}", f"{seconds / least_seconds:.2f}")
        )
        rows.append((*row, f"{seconds * 1000:.1f}", *bounds))
    columns = ("operation", "MB sent", "least", "factor", "ms", "least", "factor")
    return Table(columns=columns, rows=tuple(rows))


def calls(payload_bytes: int, ranks: int) -> dict[str, Callable[[], Any]]:
    """Maps an operation to one call of it on a payload of fp32 on each rank."""
    import torch
    import torch.distributed as dist

    elements = payload_bytes // 4 // ranks * ranks
    full, shard = torch.ones(elements), torch.ones(elements // ranks)
    shards = [torch.ones_like(shard) for _ in range(ranks)]
    rank = dist.get_rank()

    def exchange(*operations: tuple[Callable[..., Any], torch.Tensor, int]) -> None:
        for request in [call(tensor, peer) for call, tensor, peer in operations]:
            request.wait()

    send = (dist.isend, full, (rank + 1) % ranks)
    receive = (dist.irecv, torch.empty_like(full), (rank - 1) % ranks)
    return {
        "send, then receive": lambda: exchange(send, receive),
        "receive, then send": lambda: exchange(receive, send),
        "all_reduce": lambda: dist.all_reduce(full),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(full, shard),
        "all_gather": lambda: dist.all_gather(shards, shard),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(shard, full),
        "reduce_scatter": lambda: dist.reduce_scatter(shard, list(full.chunk(ranks))),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(full), full),
    }


def counted(call: Callable[[], Any]) -> dict[str, float]:
    """Bytes that the node's interface sends for one call, and the median seconds."""
    import torch.distributed as dist

    call()
    dist.barrier()
    before = int((STATISTICS / "tx_bytes").read_text())
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    dist.barrier()  # waits for the last acknowledgements and the last bytes of other ranks
    sent = int((STATISTICS / "tx_bytes").read_text()) - before
    return {"seconds": median(seconds), "sent_bytes": sent / REPEATS}


def run_rank(out: Path, payload_bytes: int) -> None:
    """Measure as one rank of a node of the bench; rank 0 writes the values of all ranks."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, ranks = int(os.environ["BENCH_NODE"]), int(os.environ["BENCH_NODES"])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["BENCH_MASTER"], 29400, ranks, is_master=rank == 0
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    measured = {name: counted(call) for name, call in calls(payload_bytes, ranks).items()}
    all_ranks: list[object] = [None] * ranks
    dist.all_gather_object(all_ranks, measured)
    if rank == 0:
        out.write_text(json.dumps(all_ranks))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), int(sys.argv[2]))
