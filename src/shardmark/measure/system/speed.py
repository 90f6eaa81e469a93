"""How fast a device multiplies and copies: what data sheets say of a card, measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmark.results.network import RankSpeed

SIDE = 1536
"""Of square matrices."""
COPIED_BYTES = 2**27
LAYERS, OPERATIONS_OF_LAYER = 100, 6
"""Two forward, a product and what follows it; of their gradients two products, a sum and that."""
TRIES = 7
SHARED_SECONDS = 2.0
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure_speeds(device: torch.device, threads: int) -> RankSpeed | None:
    """Of rank 0 alone, and what ranks keep of it while all compute; None on the other ranks.

    The default process group must exist.
    """
    first = dist.get_rank() == 0
    alone = measure_speed(device, threads) if first else None
    rate = products_per_second(device, threads) if first else 0.0
    dist.barrier()
    rates = [0.0] * dist.get_world_size()
    dist.all_gather_object(rates, products_per_second(device, threads))
    if alone is None:
        return None
    return alone.model_copy(update={"shared": min(1.0, fmean(rates) / rate)})


def measure_speed(device: torch.device, threads: int) -> RankSpeed:
    """With so many threads of a CPU, as a rank has."""
    with _threads(threads):
        flops = {}
        for name, dtype in TYPES.items():
            seconds = _least_seconds(device, _product(device, dtype))
            flops[name] = 2 * SIDE**3 / seconds
        source = torch.ones(COPIED_BYTES, device=device, dtype=torch.uint8)
        target = torch.empty_like(source)
        copied = _least_seconds(device, partial(target.copy_, source))
        started = _least_seconds(device, _small_operations(device))
    return RankSpeed(
        flops_per_second=flops,
        memory_bytes_per_second=2 * COPIED_BYTES / copied,
        operation_seconds=started / (LAYERS * OPERATIONS_OF_LAYER),
    )


def products_per_second(device: torch.device, threads: int) -> float:
    """In fp32, one after the other, for a while: whoever shares the cores slows them down."""
    with _threads(threads):
        call = _product(device, torch.float32)
        call()
        began, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < SHARED_SECONDS:
            _waited(device, call)
            count += 1
    return count / elapsed


def _product(device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
    matrix = torch.ones(SIDE, SIDE, device=device, dtype=dtype)
    return partial(torch.mm, matrix, matrix, out=torch.empty_like(matrix))


def _small_operations(device: torch.device) -> Callable[[], object]:
    """Forward and backward through layers too small to compute anything."""
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(4, 4), nn.ReLU())]
    network = nn.Sequential(*layers).to(device)
    parameters, given = [*network.parameters()], torch.ones(1, 4, device=device)
    return lambda: torch.autograd.grad(network(given).sum(), parameters)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _least_seconds(device: torch.device, call: Callable[[], object]) -> float:
    found: list[float] = []
    while len(found) < TRIES and (len(found) < 2 or sum(found) < SHARED_SECONDS):
        began = time.perf_counter()
        _waited(device, call)
        found.append(time.perf_counter() - began)
    return min(found)


def _waited(device: torch.device, call: Callable[[], object]) -> None:
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
