"""Checks of `shardmark doctor`: software, devices and limits.  Imports no torch."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import psutil

from shardmark.ranks.measure.kernel_files import cgroup_limits
from shardmark.ranks.measure.system.environment import (
    ROCM_BUILD,
    package_version,
    shared_memory_bytes,
)
from shardmark.ranks.measure.system.gpus import (
    KERNELS_REMEDY,
    visible_cuda_devices,
    without_kernels,
)

if TYPE_CHECKING:
    from shardmark.base.machine import Machine
    from shardmark.ranks.measure.system.gpus import CudaDevices

MINIMUM_PYTHON = "3.11"
MINIMUM_VERSIONS = {"torch": "2.11"}
ESSENTIAL = ("operating system", "python", "torch")
"""Checks that must pass before anything can be measured."""
OPTIONAL = {
    "deepspeed": ("zero-0 to zero-3", "deepspeed"),
    "torchvision": ("image models", "vision"),
    "pillow": ("image files", "vision"),
    "faster-coco-eval": ("detection", "detection"),
    "transformers": ("models hf:NAME", "language"),
    "tokenizers": ("a tokenizer other than bytes", "language"),
    "timm": ("models timm:NAME", "timm"),
    "vl-convert-python": ("figures of report", "figures"),
    "pandas": ("export --to csv, to_pandas", "tables"),
    "pyarrow": ("text in Parquet and Arrow files", "parquet"),
    "ray": ("--engine ray", "ray"),
    "mlflow-skinny": ("export --to mlflow", "mlflow"),
    "tensorboard": ("export --to tensorboard", "tensorboard"),
    "trackio": ("export --to trackio", "trackio"),
    "wandb": ("export --to wandb", "wandb"),
    "triton": ("compiled kernels on CUDA devices", None),
}
"""Use of each optional package, and the extra of Shardmark that installs it."""
OLDEST_OPTIONAL = {"torchvision": "0.26", "deepspeed": "0.19"}
AMD_REFUSED = "this torch is built for AMD's GPUs, which Shardmark cannot use yet"
MINIMUM_SHARED_MEMORY_BYTES = 2**30
MINIMUM_OPEN_FILES = 4096


class State(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Missing but optional, or smaller than recommended."""
    MISSING = "missing"
    FAILED = "failed"
    """Tried, and did not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Result of one check, with a `remedy` unless it is `ok`."""

    name: str
    state: State
    found: str
    remedy: str | None = None


def _check(name: str, value: str, *, remedy: str | None, worst: State = State.MISSING) -> Check:
    """Make a check that is ok without a remedy, and `worst` with one."""
    state = State.OK if remedy is None else worst
    return Check(name=name, state=state, found=value, remedy=remedy)


def problems(checks: Iterable[Check]) -> list[str]:
    """Names of the checks that failed, and of missing parts that every measurement needs."""
    return [
        check.name
        for check in checks
        if check.state is State.FAILED or (check.state is State.MISSING and check.name in ESSENTIAL)
    ]


def software_checks() -> list[Check]:
    """Check the installed versions of Python and libraries, without importing them."""
    checks = [_version_check("python", platform.python_version(), MINIMUM_PYTHON)]
    for name, least in MINIMUM_VERSIONS.items():
        checks.append(_version_check(name, package_version(name), least))
    for name, (use, extra) in OPTIONAL.items():
        version = package_version(name)
        if version is not None and name in OLDEST_OPTIONAL:
            checks.append(_version_check(name, version, OLDEST_OPTIONAL[name]))
            continue
        value = version or f"not installed; only for {use}"
        command = f"pip install {name}" if extra is None else f"pip install 'shardmark[{extra}]'"
        remedy = None if version else command
        checks.append(_check(name, value, remedy=remedy, worst=State.NOTE))
    return checks


def _version_check(name: str, version: str | None, minimum: str) -> Check:
    if version is not None and _numbers(version) >= _numbers(minimum):
        return _check(name, version, remedy=None)
    value = "not installed" if version is None else f"{version}, older than {minimum}"
    python = name == "python"
    remedy = f"install Python {minimum} or newer" if python else f'pip install "{name}>={minimum}"'
    return _check(name, value, remedy=remedy)


def _numbers(version: str) -> tuple[int, ...]:
    """Numbers of a release: (2, 11, 0) for `2.11.0+cu130`."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def torch_kernels() -> list[str]:
    """Architectures that the installed torch has kernels for.  Imports torch."""
    try:
        import torch
    except ImportError:
        return []
    return list(torch.cuda.get_arch_list())


def device_checks(
    machine: Machine, gpus: CudaDevices, compiled: Callable[[], Sequence[str]] = torch_kernels
) -> list[Check]:
    """Check the CUDA devices, the driver's version, and that torch has kernels for the devices."""
    name = "CUDA devices"
    if f"+{ROCM_BUILD}" in (package_version("torch") or ""):
        remedy = "set device: cpu, or install torch with CUDA where there are NVIDIA GPUs"
        return [_check(name, AMD_REFUSED, remedy=remedy, worst=State.NOTE)]
    if not gpus.devices:
        text = f"none: {gpus.reason}; trials run on the CPU"
        remedy = "install NVIDIA's driver, or give the container its devices (--gpus all)"
        return [_check(name, text, remedy=remedy, worst=State.NOTE)]
    if machine.device_count == 0:
        text = f"none of {len(gpus.devices)} can be used; trials run on the CPU"
        remedy = "look at CUDA_VISIBLE_DEVICES, and install torch with CUDA"
        return [_check(name, text, remedy=remedy, worst=State.NOTE)]
    text = f"{machine.device_count}: {', '.join(machine.device_names)}"
    checks = [_check(name, text, remedy=None), _driver_check(gpus)]
    usable = [device for device in visible_cuda_devices(gpus) if device.capability is not None]
    kernels = compiled() if usable else ()
    for device in usable:
        reason = without_kernels(device.name, device.capability or (0, 0), kernels)
        if reason is not None:
            checks.append(_check("GPU kernels", reason, remedy=KERNELS_REMEDY))
    return checks


def _driver_check(gpus: CudaDevices) -> Check:
    name, text = "NVIDIA driver", f"{gpus.driver_version}, up to CUDA {gpus.cuda_version}"
    runtime = package_version("nvidia-cuda-runtime") or package_version("nvidia-cuda-runtime-cu12")
    if runtime and gpus.cuda_version and _numbers(runtime)[0] > _numbers(gpus.cuda_version)[0]:
        remedy = "install a newer driver, or torch for this CUDA version"
        return _check(name, f"{text}; torch was built for CUDA {runtime}", remedy=remedy)
    return _check(name, text, remedy=None)


def host_checks(machine: Machine) -> list[Check]:
    """Check operating system, cores, memory, shared memory and the limit of open files."""
    import resource  # Windows has none

    total = psutil.virtual_memory().total
    memory = min(total, cgroup_limits().memory_bytes or total)
    shared = shared_memory_bytes() or 0
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = files == resource.RLIM_INFINITY
    use_linux = "use Linux: the system metrics are read from /proc"
    more_shared = "data-loader workers need it: docker run --shm-size=2g or --ipc=host"
    enough_files = unlimited or files >= MINIMUM_OPEN_FILES
    return [
        _check(
            "operating system",
            platform.platform(),
            remedy=None if sys.platform == "linux" else use_linux,
        ),
        _check("CPU cores", str(machine.cores), remedy=None),
        _check("memory", _gibibytes(memory), remedy=None),
        _check(
            "shared memory",
            f"/dev/shm has {_gibibytes(shared)}",
            remedy=None if shared >= MINIMUM_SHARED_MEMORY_BYTES else more_shared,
            worst=State.NOTE,
        ),
        _check(
            "open files",
            "unlimited" if unlimited else f"at most {files} a process",
            remedy=None if enough_files else f"ulimit -n {MINIMUM_OPEN_FILES}",
            worst=State.NOTE,
        ),
    ]


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
