"""Checks every GPU with a matrix product and with copies, in a process that may hang or crash.

The process that starts the checks imports no torch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from shardmark.base.errors import ShardmarkError
from shardmark.base.files.scratch import scratch_folder
from shardmark.base.peaks import peak_flops_per_second
from shardmark.ranks.measure.system.child import run_module
from shardmark.ranks.measure.system.gpus import BF16_CAPABILITY
from shardmark.ranks.measure.system.machine_checks import Check, State

if TYPE_CHECKING:
    import torch

LIMIT_SECONDS = 90.0
EXACT_SIDE, FAST_SIDE = 512, 8192
"""Sides of the square matrices that check the values, and that measure the speed."""
LARGEST_ERROR = 1e-3
"""Largest relative error of a product; TF32 may be on."""
ROUNDS = 10
COPY_BYTES = 128 * 2**20
COPIES = 5


def gpu_checks() -> list[Check]:
    """Check a matrix product on each GPU and copies between all of them and the host."""
    with scratch_folder() as folder:
        file = folder / "checks.json"
        try:
            run_module(__name__, str(file), title="kernels and copies", limit_seconds=LIMIT_SECONDS)
        except ShardmarkError as error:
            remedy = "see whether `nvidia-smi` answers, and the driver's log"
            return [_failed("GPU kernels", str(error), remedy)]
        return TypeAdapter(list[Check]).validate_json(file.read_bytes())


def cuda_libraries() -> tuple[tuple[str, str], ...]:
    """Return names and versions of CUDA, cuDNN and NCCL, as torch has loaded them."""
    import torch

    cudnn, nccl = torch.backends.cudnn, torch.cuda.nccl
    versions = {
        "CUDA": torch.version.cuda,
        "cuDNN": cudnn.version(),  # type: ignore[no-untyped-call]
        "NCCL": ".".join(map(str, nccl.version())),  # type: ignore[no-untyped-call]
    }
    return tuple((name, str(version)) for name, version in versions.items() if version)


def _checks() -> Iterator[Check]:
    import torch

    versions = ", ".join(f"{name} {version}" for name, version in cuda_libraries())
    yield _ok("CUDA libraries", versions)
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    yield from map(_product_check, devices)
    host = torch.device("cpu")
    yield _copy_check("host to GPU", [(host, device) for device in devices])
    yield _copy_check("GPU to host", [(device, host) for device in devices])
    if len(devices) > 1:
        yield _copy_check("GPU to GPU", [*permutations(devices, 2)])


def _product_check(device: torch.device) -> Check:
    """Compare a matrix product with the CPU's, and time a large one in half precision."""
    import torch

    name = f"GPU {device.index}"
    has_bf16 = torch.cuda.get_device_capability(device) >= BF16_CAPABILITY
    precision, dtype = ("bf16", torch.bfloat16) if has_bf16 else ("fp16", torch.float16)
    remedy = "compare its compute capability with torch's kernels, and test the GPU"
    try:
        left, right = torch.rand((2, EXACT_SIDE, EXACT_SIDE))
        ratio = (left.to(device) @ right.to(device)).cpu() / (left @ right)
        error = float((ratio - 1).abs().max())
        if not error <= LARGEST_ERROR:  # also true for NaN
            return _failed(name, f"a matrix product has a relative error of {error:.2g}", remedy)
        square = torch.rand((FAST_SIDE, FAST_SIDE), device=device).to(dtype)
        product = square @ square  # warms up
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(ROUNDS):
            torch.matmul(square, square, out=product)
        torch.cuda.synchronize(device)
        flops_per_second = ROUNDS * 2 * FAST_SIDE**3 / (time.perf_counter() - started)
    except RuntimeError as failure:
        return _failed(name, _first_line(failure), remedy)
    model = torch.cuda.get_device_name(device)
    peak, source = peak_flops_per_second(model, precision)
    share = source if peak is None else f"{100 * flops_per_second / peak:.0f} % of the peak"
    speed = f"{1e-12 * flops_per_second:.0f} TFLOP/s in {precision}, {share}"
    return _ok(name, f"{model}: a matrix product is correct; {speed}")


def _copy_check(name: str, pairs: Sequence[tuple[torch.device, torch.device]]) -> Check:
    """Copy from the first to the second device of each pair, and compare what arrives."""
    speeds: list[tuple[float, str]] = []
    errors: list[str] = []
    for source, target in pairs:
        path = " to ".join("host" if d.type == "cpu" else str(d.index) for d in (source, target))
        try:
            bytes_per_second = _copy(source, target)
        except RuntimeError as failure:
            errors.append(f"{path}: {_first_line(failure)}")
        else:
            if bytes_per_second is None:
                errors.append(f"{path}: the copy differs from its source")
            else:
                speeds.append((bytes_per_second, path))
    if errors:
        remedy = "test without peer access: NCCL_P2P_DISABLE=1, or switch off IOMMU and ACS"
        return _failed(name, "; ".join(errors), remedy)
    ends = dict.fromkeys((min(speeds), max(speeds)))
    return _ok(name, " to ".join(f"{1e-9 * speed:.1f} GB/s ({path})" for speed, path in ends))


def _copy(source: torch.device, target: torch.device) -> float | None:
    """Return bytes per second; None where the copy differs.  Peer access can be broken."""
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


def _ok(name: str, text: str) -> Check:
    return Check(name=name, state=State.OK, found=text)


def _failed(name: str, text: str, remedy: str) -> Check:
    return Check(name=name, state=State.FAILED, found=text, remedy=remedy)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


if __name__ == "__main__":
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("torch finds no usable CUDA device")
    Path(sys.argv[1]).write_text(json.dumps([asdict(check) for check in _checks()]))
