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

from shardmark.core.environment_variables import ON_LOOPBACK
from shardmark.core.errors import ShardmarkError
from shardmark.measure.network.probe import RECORD_FILE
from shardmark.measure.system.speed import measure_speeds
from shardmark.results.network import (
    MeasuredOperation,
    NetworkRecord,
    Operation,
    Reach,
    TimedSize,
)

SIZES = tuple(4**power for power in range(5, 13))
"""Payloads, bytes: 1 KiB to 16 MiB."""
ALWAYS_BYTES = 64 * 1024
"""Sizes up to here are measured however slow they are: without them there is no fit."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 50
ALWAYS_CALLS, SHORT_CALLS = 10, 3
WARMUP_SHARE = 0.1
"""A size is left out where one call takes more than this of the time for all."""
SEED = 0

COLLECTIVES: dict[Operation, Callable[..., object]] = {
    "all_reduce": lambda whole, _, group: dist.all_reduce(whole, group=group),
    "all_gather": lambda whole, part, group: dist.all_gather_into_tensor(whole, part, group=group),
    "reduce_scatter": lambda whole, part, group: dist.reduce_scatter_tensor(
        part, whole, group=group
    ),
}
"""Of a whole tensor, a rank's part of it, and the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation with one size, ready to be called."""

    operation: Operation
    reach: Reach
    ranks: tuple[int, ...]
    payload_bytes: int
    call: Callable[[], object] | None
    """None on a rank that does not take part."""
    per_call: float = 1.0
    """Of one call's seconds: half a round trip is one message's."""
    seconds: list[float] = field(default_factory=list)
    """This rank's, one value a round."""

    @property
    def calls(self) -> int:
        """One after the other, so that the clock and the ranks' uneven start weigh little."""
        if self.payload_bytes <= ALWAYS_BYTES:
            return ALWAYS_CALLS
        return SHORT_CALLS if self.payload_bytes <= 4 * ALWAYS_BYTES else 1


def measure_links(
    device: torch.device,
    *,
    seconds: float,
    node: int | None = None,
    threads: int | None = None,
) -> NetworkRecord | None:
    """About so many seconds of timings; the record without fits on rank 0, None on the others.

    The default process group must exist.  Sizes and operations are interleaved, in another order
    in each round, so that a disturbance falls on no single one.  `node` is this rank's, where hosts
    may share a name.  With `threads`, what ranks compute with so many of a CPU is measured, too.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    told: list[tuple[str, int | None]] = [("", None)] * ranks
    dist.all_gather_object(told, (platform.node(), node))
    meeting = torch.zeros(1, dtype=torch.float64, device=device)
    deadline = time.perf_counter() + seconds
    kept = _affordable(_cases([str(place) for place in told], device), meeting, seconds)
    order = random.Random(SEED)
    for number in range(MOST_ROUNDS):
        for case in order.sample(kept, len(kept)):
            _time(case, meeting)
        late = float(time.perf_counter() > deadline)
        if number + 1 >= LEAST_ROUNDS and _slowest(late, meeting):
            break
    gathered: list[list[list[float]]] = [[] for _ in range(ranks)]
    dist.all_gather_object(gathered, [case.seconds for case in kept])
    speed = None if threads is None else measure_speeds(device, threads)
    if rank != 0:
        return None
    slowest = [
        tuple(max(values) for values in zip(*(own for own in each if own), strict=True))
        for each in zip(*gathered, strict=True)
    ]
    device_type: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    variable = "NCCL_SOCKET_IFNAME" if device_type == "cuda" else "GLOO_SOCKET_IFNAME"
    return NetworkRecord(
        measured_at_seconds=time.time(),
        backend=dist.get_backend(),
        device_type=device_type,
        hosts=tuple(host for host, _ in told),
        interface=os.environ.get(variable, "").removeprefix("=") or None,
        torch=torch.__version__,
        operations=_operations(kept, slowest),
        speed=speed,
    )


def _operations(
    cases: Sequence[Case], seconds: Sequence[tuple[float, ...]]
) -> tuple[MeasuredOperation, ...]:
    """The timings by operation, in order of size."""
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


def _affordable(cases: Iterator[Case], meeting: Tensor, seconds: float) -> list[Case]:
    """The cases that there is time for, each called once.  The same ones on every rank."""
    kept: list[Case] = []
    slow: set[tuple[Operation, tuple[int, ...]]] = set()
    for case in cases:
        what = (case.operation, case.ranks)
        if what in slow:
            continue  # a shorter one took too long already
        _time(case, meeting)
        own = case.seconds.pop() / case.per_call if case.call is not None else 0.0
        slowest = _slowest(own, meeting)
        if case.payload_bytes <= ALWAYS_BYTES or slowest <= seconds * WARMUP_SHARE:
            kept.append(case)
        else:
            slow.add(what)
    return kept


def _time(case: Case, meeting: Tensor) -> None:
    _slowest(0.0, meeting)  # all are here
    if case.call is None:
        return
    started = time.perf_counter()
    for _ in range(case.calls):
        case.call()
    if meeting.device.type == "cuda":
        torch.cuda.synchronize(meeting.device)
    elapsed_seconds = time.perf_counter() - started
    case.seconds.append(elapsed_seconds / case.calls * case.per_call)


def _slowest(value: float, meeting: Tensor) -> float:
    meeting.fill_(value)
    dist.all_reduce(meeting, op=dist.ReduceOp.MAX)
    return float(meeting.item())


def _cases(hosts: Sequence[str], device: torch.device) -> Iterator[Case]:
    """Shortest first.  Rank 0 exchanges messages with the nearest and with the farthest host.

    All ranks meet, and those of each host, all hosts at once.  `hosts` are equal for ranks on one
    machine.
    """
    everybody = tuple(range(len(hosts)))
    near = next((rank for rank in everybody[1:] if hosts[rank] == hosts[0]), None)
    far = next((rank for rank in everybody[1:] if hosts[rank] != hosts[0]), None)
    groups: list[tuple[Reach, tuple[int, ...], object]] = [
        ("same_host" if far is None else "between_hosts", everybody, None)
    ]
    of_hosts = [[r for r in everybody if hosts[r] == host] for host in dict.fromkeys(hosts)]
    if far is not None and near is not None and len({len(ranks) for ranks in of_hosts}) == 1:
        own, _ = dist.new_subgroups_by_enumeration(of_hosts)
        groups.append(("same_host", tuple(of_hosts[0]), own))
    for size in SIZES:
        elements = -(-size // 4 // len(hosts)) * len(hosts)
        whole = torch.ones(elements, device=device)
        if near is not None:
            yield _messages("same_host", near, whole)
        if far is not None:
            yield _messages("between_hosts", far, whole)
        for reach, ranks, group in groups:
            part = torch.ones(elements // len(ranks), device=device)
            for operation, collective in COLLECTIVES.items():
                yield Case(
                    operation=operation,
                    reach=reach,
                    ranks=ranks,
                    payload_bytes=4 * elements,
                    call=partial(collective, whole, part, group),
                )


def _messages(reach: Reach, peer: int, whole: Tensor) -> Case:
    """There and back between rank 0 and the peer."""
    rank = dist.get_rank()

    def there_and_back() -> None:
        if rank == 0:
            dist.send(whole, peer)
            dist.recv(whole, peer)
        else:
            dist.recv(whole, 0)
            dist.send(whole, 0)

    return Case(
        operation="point_to_point",
        reach=reach,
        ranks=(0, peer),
        payload_bytes=whole.numel() * whole.element_size(),
        call=there_and_back if rank in (0, peer) else None,
        per_call=0.5,
    )


def check_sum(device: torch.device) -> None:
    """Raise `ShardmarkError` where the ranks' sum is wrong: a broken link may well be fast."""
    ranks = dist.get_world_size()
    total = torch.full((SIZES[-1] // 4,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(total)
    wrong = int((total != ranks * (ranks + 1) / 2).sum())
    if wrong:
        raise ShardmarkError(f"an all-reduce gave {wrong} wrong sums of {total.numel()}")


@contextmanager
def process_group(device_type: str, meeting: Path | None = None) -> Iterator[torch.device]:
    """The group that torchrun's environment describes: this rank's device.

    The ranks meet at that file, or without one as torchrun tells them to.

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
