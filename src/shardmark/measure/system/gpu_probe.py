"""Runs a kernel and copies on every GPU, in a separate process, since they may hang or crash.

The process that starts it does not import torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from shardmark.core.scratch import scratch_folder
from shardmark.measure.system.child import run_module
from shardmark.measure.system.gpus import BF16_CAPABILITY

if TYPE_CHECKING:
    import torch

LIMIT_SECONDS = 90.0
EXACT_SIDE, FAST_SIDE = 512, 8192
"""Sides of the square matrices that are multiplied: to check values, and to time them."""
LARGEST_ERROR = 1e-3
"""Largest relative error of a product; TF32 may be on."""
ROUNDS = 10
COPY_BYTES = 128 * 2**20
COPIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Result of a matrix product on one GPU."""

    device: int
    name: str
    precision: str
    """Precision of the timed product: bf16, or fp16 on older GPUs."""
    flops_per_second: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Result of a copy between the memories of two GPUs; None is the host's pinned memory."""

    source: int | None
    target: int | None
    bytes_per_second: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProbe:
    """Libraries of torch, and results of kernels and copies on all GPUs."""

    libraries: tuple[tuple[str, str], ...]
    architectures: tuple[str, ...]
    """Architectures that this torch has kernels for, such as `sm_90`."""
    kernels: tuple[Kernel, ...]
    copies: tuple[Copy, ...]


def probe_gpus() -> GpuProbe:
    """Run the probe.  Raises `ShardmarkError` if its process fails or hangs.

    Errors of a single kernel or copy are in its `error`.
    """
    with scratch_folder() as folder:
        file = folder / "probe.json"
        run_module(__name__, str(file), title="kernels and copies", limit_seconds=LIMIT_SECONDS)
        return TypeAdapter(GpuProbe).validate_json(file.read_bytes())


def cuda_libraries() -> tuple[tuple[str, str], ...]:
    """Return CUDA, cuDNN and NCCL with the versions that torch has loaded."""
    import torch

    cudnn, nccl = torch.backends.cudnn, torch.cuda.nccl
    versions = {
        "CUDA": torch.version.cuda,
        "cuDNN": cudnn.version(),  # type: ignore[no-untyped-call]
        "NCCL": ".".join(map(str, nccl.version())),  # type: ignore[no-untyped-call]
    }
    return tuple((name, str(version)) for name, version in versions.items() if version)


def _probe() -> GpuProbe:
    import torch

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return GpuProbe(
        libraries=cuda_libraries(),
        architectures=tuple(torch.cuda.get_arch_list()),
        kernels=tuple(map(_kernel, devices)),
        copies=tuple(_copies(devices)),
    )


def _kernel(device: torch.device) -> Kernel:
    import torch

    has_bf16 = torch.cuda.get_device_capability(device) >= BF16_CAPABILITY
    half = torch.bfloat16 if has_bf16 else torch.float16
    precision = "bf16" if half is torch.bfloat16 else "fp16"
    name = torch.cuda.get_device_name(device)
    flops_per_second = error = None
    try:
        left, right = torch.rand((2, EXACT_SIDE, EXACT_SIDE))
        expected = left @ right
        error_ratio = float(((left.to(device) @ right.to(device)).cpu() / expected - 1).abs().max())
        if not error_ratio <= LARGEST_ERROR:  # also true for NaN
            error = f"a matrix product is wrong by a factor of 1 + {error_ratio:.2g}"
        square = torch.rand((FAST_SIDE, FAST_SIDE), device=device).to(half)
        product = square @ square  # warms up
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(ROUNDS):
            torch.matmul(square, square, out=product)
        torch.cuda.synchronize(device)
        flops_per_second = ROUNDS * 2 * FAST_SIDE**3 / (time.perf_counter() - started)
    except RuntimeError as failed:
        error = _first_line(failed)
    return Kernel(
        device=device.index,
        name=name,
        precision=precision,
        flops_per_second=flops_per_second,
        error=error,
    )


def _copies(devices: list[torch.device]) -> Iterator[Copy]:
    """Copy between the host and every GPU, and from every GPU to every other."""
    import torch

    host = torch.device("cpu")
    with_host = [pair for device in devices for pair in ((host, device), (device, host))]
    for source, target in (*with_host, *permutations(devices, 2)):
        bytes_per_second = error = None
        try:
            bytes_per_second = _copy(source, target)
            if bytes_per_second is None:
                error = "the copy differs from its source"
        except RuntimeError as failed:
            error = _first_line(failed)
        yield Copy(
            source=source.index,
            target=target.index,
            bytes_per_second=bytes_per_second,
            error=error,
        )


def _copy(source: torch.device, target: torch.device) -> float | None:
    """Return bytes per second; None if the copy differs, since peer access may be broken."""
    import torch

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device.type == "cuda" else tensor.pin_memory()

    def wait() -> None:
        for device in (source, target):
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    count = COPY_BYTES // 4
    sent = pinned(torch.arange(count, dtype=torch.int32, device=source))
    received = pinned(torch.zeros(count, dtype=torch.int32, device=target))
    best_seconds = float("inf")
    for _ in range(COPIES):
        wait()
        started = time.perf_counter()
        received.copy_(sent, non_blocking=True)
        wait()
        best_seconds = min(best_seconds, time.perf_counter() - started)
    arrived = torch.equal(received, torch.arange(count, dtype=torch.int32, device=target))
    return COPY_BYTES / best_seconds if arrived else None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


if __name__ == "__main__":
    import json

    import torch

    if not torch.cuda.is_available():
        raise SystemExit("torch finds no usable CUDA device")
    Path(sys.argv[1]).write_text(json.dumps(asdict(_probe())))
