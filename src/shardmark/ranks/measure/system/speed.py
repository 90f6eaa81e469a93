"""Measures the speed of products and copies on a device, as data sheets state it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmark.base.results.network import RankSpeed

SIDE = 1536
"""Rows and columns of the square matrices that are multiplied."""
COPIED_BYTES = 2**27
LAYERS, OPERATIONS_OF_LAYER = 100, 6
"""A layer has a product and a ReLU forward; backward it has two products, a sum and the ReLU's."""
TRIES = 7
SHARED_SECONDS = 2.0
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure_speeds(device: torch.device, threads: int) -> RankSpeed | None:
    """Measure rank 0 alone, then all ranks at once; None on the other ranks.

    `shared` of the result is the fraction of its speed that a rank has while all compute.
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
    """Measure products, copies and small operations with so many CPU threads."""
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
    """Rate of consecutive fp32 products over `SHARED_SECONDS`; busy neighbours slow it down."""
    with _threads(threads):
        call = _product(device, torch.float32)
        call()
        began, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < SHARED_SECONDS:
            _run(device, call)
            count += 1
    return count / elapsed


def _product(device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
    matrix = torch.ones(SIDE, SIDE, device=device, dtype=dtype)
    return partial(torch.mm, matrix, matrix, out=torch.empty_like(matrix))


def _small_operations(device: torch.device) -> Callable[[], object]:
    """Forward and backward pass of layers so small that starting operations takes all the time."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(4, 4), nn.ReLU())]
    network = nn.Sequential(*layers).to(device)
    parameters, inputs = [*network.parameters()], torch.ones(1, 4, device=device)
    return lambda: torch.autograd.grad(network(inputs).sum(), parameters)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _least_seconds(device: torch.device, call: Callable[[], object]) -> float:
    seconds: list[float] = []
    while len(seconds) < TRIES and (len(seconds) < 2 or sum(seconds) < SHARED_SECONDS):
        began = time.perf_counter()
        _run(device, call)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _run(device: torch.device, call: Callable[[], object]) -> None:
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
