"""Times messages and collectives between the ranks of a process group."""

from __future__ import annotations

import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardmark.base.errors import ShardmarkError
from shardmark.base.results.network import (
    MeasuredOperation,
    NetworkRecord,
    Operation,
    Reach,
    TimedSize,
)
from shardmark.base.system.environment_variables import ON_LOOPBACK
from shardmark.ranks.measure.network.probe import RECORD_FILE
from shardmark.ranks.measure.system.speed import measure_speeds

SIZES = tuple(4**power for power in range(5, 13))
"""Payloads in bytes: 1 KiB to 16 MiB."""
ALWAYS_BYTES = 64 * 1024
"""Largest size that is measured on any link, however slow: the fit needs these sizes."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 50
ALWAYS_CALLS, SHORT_CALLS = 10, 3
WARMUP_SHARE = 0.1
"""A size is skipped if one call takes more than this fraction of the time for all sizes."""
SEED = 0

COLLECTIVES: dict[Operation, Callable[..., object]] = {
    "all_reduce": lambda full, _, group: dist.all_reduce(full, group=group),
    "all_gather": lambda full, shard, group: dist.all_gather_into_tensor(full, shard, group=group),
    "reduce_scatter": lambda full, shard, group: dist.reduce_scatter_tensor(
        shard, full, group=group
    ),
}
"""Each collective as a function of the full tensor, the rank's shard of it, and the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An operation with a payload of one size, ready to be called."""

    operation: Operation
    reach: Reach
    ranks: tuple[int, ...]
    payload_bytes: int
    call: Callable[[], object] | None
    """None on a rank that is not in the group."""
    per_call: float = 1.0
    """Operations are this fraction of a call: a message is half of a round trip."""
    seconds: list[float] = field(default_factory=list)
    """This rank's measurements, one for each round."""

    @property
    def calls(self) -> int:
        """Number of consecutive calls that are timed together, so that the start weighs little."""
        if self.payload_bytes <= ALWAYS_BYTES:
            return ALWAYS_CALLS
        return SHORT_CALLS if self.payload_bytes <= 4 * ALWAYS_BYTES else 1


def measure_links(
    device: torch.device, *, seconds: float, node: int | None = None, threads: int | None = None
) -> NetworkRecord | None:
    """Time messages and collectives for about `seconds`; return the record on rank 0, else None.

    The record has no fits yet.  The default process group must exist.  Sizes and operations are
    interleaved, in another order in each round, so that a disturbance does not fall on one of them.
    `node` is this rank's node, needed where hosts share a name.  With `threads`, the speed at which
    ranks compute with that many CPU threads is measured too.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hosts: list[tuple[str, int | None]] = [("", None)] * ranks
    dist.all_gather_object(hosts, (platform.node(), node))
    scalar = torch.zeros(1, dtype=torch.float64, device=device)
    deadline = time.perf_counter() + seconds
    cases = _affordable(_cases([str(host) for host in hosts], device), scalar, seconds)
    order = random.Random(SEED)
    for number in range(MOST_ROUNDS):
        for case in order.sample(cases, len(cases)):
            _time(case, scalar)
        late = float(time.perf_counter() > deadline)
        if number + 1 >= LEAST_ROUNDS and _maximum(late, scalar):
            break
    gathered: list[list[list[float]]] = [[] for _ in range(ranks)]
    dist.all_gather_object(gathered, [case.seconds for case in cases])
    speed = None if threads is None else measure_speeds(device, threads)
    if rank != 0:
        return None
    slowest = [
        tuple(map(max, zip(*(seconds for seconds in of_ranks if seconds), strict=True)))
        for of_ranks in zip(*gathered, strict=True)
    ]
    device_type: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    variable = "NCCL_SOCKET_IFNAME" if device_type == "cuda" else "GLOO_SOCKET_IFNAME"
    return NetworkRecord(
        measured_at_seconds=time.time(),
        backend=dist.get_backend(),
        device_type=device_type,
        hosts=tuple(name for name, _ in hosts),
        interface=os.environ.get(variable, "").removeprefix("=") or None,
        torch=torch.__version__,
        operations=_operations(cases, slowest),
        speed=speed,
    )


def _operations(
    cases: Sequence[Case], seconds: Sequence[tuple[float, ...]]
) -> tuple[MeasuredOperation, ...]:
    """Group the timings by operation, in order of size."""
    sizes: dict[tuple[Operation, Reach, tuple[int, ...]], list[TimedSize]] = {}
    for case, timings in zip(cases, seconds, strict=True):
        timed = TimedSize(payload_bytes=case.payload_bytes, seconds=timings)
        sizes.setdefault((case.operation, case.reach, case.ranks), []).append(timed)
    return tuple(
        MeasuredOperation(
            operation=operation,
            reach=reach,
            ranks=ranks,
            sizes=tuple(sorted(timed, key=lambda size: size.payload_bytes)),
        )
        for (operation, reach, ranks), timed in sizes.items()
    )


def _affordable(cases: Iterator[Case], scalar: Tensor, seconds: float) -> list[Case]:
    """Call each case once, and return those that there is time for: the same on every rank."""
    affordable: list[Case] = []
    slow: set[tuple[Operation, tuple[int, ...]]] = set()
    for case in cases:
        if (case.operation, case.ranks) in slow:
            continue  # a smaller payload took too long already
        _time(case, scalar)
        call_seconds = case.seconds.pop() / case.per_call if case.call is not None else 0.0
        slowest_seconds = _maximum(call_seconds, scalar)
        if case.payload_bytes <= ALWAYS_BYTES or slowest_seconds <= seconds * WARMUP_SHARE:
            affordable.append(case)
        else:
            slow.add((case.operation, case.ranks))
    return affordable


def _time(case: Case, scalar: Tensor) -> None:
    _maximum(0.0, scalar)  # waits for all ranks
    if case.call is None:
        return
    started = time.perf_counter()
    for _ in range(case.calls):
        case.call()
    if scalar.device.type == "cuda":
        torch.cuda.synchronize(scalar.device)
    elapsed_seconds = time.perf_counter() - started
    case.seconds.append(elapsed_seconds / case.calls * case.per_call)


def _maximum(value: float, scalar: Tensor) -> float:
    """Return the maximum of the ranks' values; `scalar`, shape (1,), is the buffer."""
    scalar.fill_(value)
    dist.all_reduce(scalar, op=dist.ReduceOp.MAX)
    return float(scalar.item())


def _cases(hosts: Sequence[str], device: torch.device) -> Iterator[Case]:
    """Yield all cases, smallest payload first.

    Rank 0 exchanges messages with a rank on its host and with one on another host.  Collectives
    run over all ranks, and over the ranks of each host on all hosts at once.  Ranks on one machine
    have the same entry in `hosts`.
    """
    all_ranks = tuple(range(len(hosts)))
    near = next((rank for rank in all_ranks[1:] if hosts[rank] == hosts[0]), None)
    far = next((rank for rank in all_ranks[1:] if hosts[rank] != hosts[0]), None)
    groups: list[tuple[Reach, tuple[int, ...], object]] = [
        ("same_host" if far is None else "between_hosts", all_ranks, None)
    ]
    by_host = [[r for r in all_ranks if hosts[r] == host] for host in dict.fromkeys(hosts)]
    if far is not None and near is not None and len({len(ranks) for ranks in by_host}) == 1:
        host_group, _ = dist.new_subgroups_by_enumeration(by_host)
        groups.append(("same_host", tuple(by_host[0]), host_group))
    for size in SIZES:
        elements = -(-size // 4 // len(hosts)) * len(hosts)
        full = torch.ones(elements, device=device)
        if near is not None:
            yield _round_trip("same_host", near, full)
        if far is not None:
            yield _round_trip("between_hosts", far, full)
        for reach, ranks, group in groups:
            shard = torch.ones(elements // len(ranks), device=device)
            for operation, collective in COLLECTIVES.items():
                yield Case(
                    operation=operation,
                    reach=reach,
                    ranks=ranks,
                    payload_bytes=4 * elements,
                    call=partial(collective, full, shard, group),
                )


def _round_trip(reach: Reach, peer: int, full: Tensor) -> Case:
    """A message from rank 0 to the peer and back."""
    rank = dist.get_rank()

    def round_trip() -> None:
        if rank == 0:
            dist.send(full, peer)
            dist.recv(full, peer)
        else:
            dist.recv(full, 0)
            dist.send(full, 0)

    return Case(
        operation="point_to_point",
        reach=reach,
        ranks=(0, peer),
        payload_bytes=full.numel() * full.element_size(),
        call=round_trip if rank in (0, peer) else None,
        per_call=0.5,
    )


def check_sum(device: torch.device) -> None:
    """Raise `ShardmarkError` if an all-reduce gives a wrong sum: a broken link may be fast."""
    ranks = dist.get_world_size()
    total = torch.full((SIZES[-1] // 4,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(total)
    wrong = int((total != ranks * (ranks + 1) / 2).sum())
    if wrong:
        raise ShardmarkError(f"an all-reduce gave {wrong} wrong sums of {total.numel()}")


@contextmanager
def process_group(device_type: str, meeting: Path | None = None) -> Iterator[torch.device]:
    """Join the process group of torchrun's environment; yield this rank's device.

    With `meeting`, ranks find one another through that file instead of torchrun's address.
    `device_type` is auto, cuda or cpu.
    """
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
    store = None if meeting is None else dist.FileStore(str(meeting), ranks)  # type: ignore[attr-defined]  # torch exports it lazily
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
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


def _probe_rank(
    rank: int, folder: Path, ranks: int, device_type: str, options: Mapping[str, Any]
) -> None:
    os.environ |= ON_LOOPBACK | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
    }
    with process_group(device_type, folder / "meeting") as device:
        check_sum(device)
        record = measure_links(device, **options)
    if record is not None:
        (folder / RECORD_FILE).write_text(record.model_dump_json())


if __name__ == "__main__":
    folder, ranks, device_type, seconds, *threads = sys.argv[1:]
    from torch.multiprocessing.spawn import start_processes

    options = {"seconds": float(seconds), "threads": int(threads[0]) if threads else None}
    arguments = (Path(folder), int(ranks), device_type, options)
    # Forked: nothing has touched a device yet, and every rank would load torch anew.
    start_processes(  # type: ignore[no-untyped-call]
        _probe_rank, arguments, nprocs=int(ranks), start_method="fork"
    )
