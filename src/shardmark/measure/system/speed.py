"""How fast a device multiplies and copies: what data sheets say of a card, measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

SIDE = 1536
"""Of square matrices."""
COPIED_BYTES = 2**27
TRIES = 7
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The best of some tries, as neither waits for anything else."""

    flops_per_second: Mapping[str, float]
    """By precision."""
    memory_bytes_per_second: float
    """Read and written."""


def measure_speed(device: torch.device, threads: int) -> Speed:
    """With so many threads of a CPU, as a rank has."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        flops = {}
        for name, dtype in TYPES.items():
            matrix = torch.ones(SIDE, SIDE, device=device, dtype=dtype)
            out = torch.empty_like(matrix)
            seconds = _least_seconds(device, partial(torch.mm, matrix, matrix, out=out))
            flops[name] = 2 * SIDE**3 / seconds
        source = torch.ones(COPIED_BYTES, device=device, dtype=torch.uint8)
        target = torch.empty_like(source)
        copied = _least_seconds(device, partial(target.copy_, source))
    finally:
        torch.set_num_threads(before)
    return Speed(flops_per_second=flops, memory_bytes_per_second=2 * COPIED_BYTES / copied)


def _least_seconds(device: torch.device, call: Callable[[], object]) -> float:
    found = []
    for _ in range(TRIES):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found)
