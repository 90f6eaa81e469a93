"""Describes the machine and software of a run, as `environment.json`.  Imports no torch."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

from shardmark.base.machine import Machine
from shardmark.base.masking import LOGIN, MASK
from shardmark.base.system.environment_variables import ALLOCATOR
from shardmark.base.version import __version__
from shardmark.ranks.measure.kernel_files import CgroupLimits, cgroup_limits, read_kernel_file
from shardmark.ranks.measure.system.gpus import (
    BF16_CAPABILITY,
    all_cuda_devices,
    occupation,
    visible_cuda_devices,
)

PACKAGES = (
    *("torch", "torchvision", "deepspeed", "triton", "numpy", "scipy", "pandas", "pydantic"),
    *("psutil", "nvidia-ml-py", "timm", "faster-coco-eval", "transformers"),
)
"""Packages whose version can change what is measured."""

_STEERING = re.compile(
    r"(CUBLAS|CUDA|DS|GLOO|GOMP|KMP|MALLOC|MKL|NCCL|NVIDIA|OMP|OPENBLAS|PYTORCH|TORCH|TORCHINDUCTOR)_"
)
"""Prefixes of environment variables that control threads, devices or communication."""
_SETTINGS = re.compile(
    r"(CUBLAS|GLOO|GOMP|KMP|MALLOC|MKL|NCCL|OMP|OPENBLAS|DS_BUILD|TORCH_CUDNN|TORCH_NCCL"
    r"|TORCHINDUCTOR)_\w+"
    r"|CUDA_(CACHE_\w+|DEVICE_\w+|HOME|LAUNCH_BLOCKING|MODULE_LOADING|PATH|VISIBLE_DEVICES)"
    r"|DS_(ACCELERATOR|SKIP_CUDA_CHECK)|NVIDIA_(TF32_OVERRIDE|VISIBLE_DEVICES)"
    r"|PYTORCH_(\w*ALLOC_CONF|JIT|NO_CUDA_MEMORY_CACHING)"
    r"|TORCH_(ALLOW_TF32_CUBLAS_OVERRIDE|COMPILE_DISABLE|CUDA_ARCH_LIST|DISTRIBUTED_DEBUG|LOGS)"
)
"""Variables whose values are stored.  For the others, only the name is stored."""
_SECRET_NAME = re.compile(r"AUTH|CREDENTIAL|KEY|PASSW|SECRET|TOKEN|(?<![A-Z])PAT(?![A-Z])")
"""Names of variables that may be secret.  PAT is a personal access token; PATH is not."""
ROCM_BUILD = "rocm"
"""Prefix of the build in torch's version, after `+`, if it was built for AMD GPUs."""
_GIT_SECONDS = 10

BUSY_PERCENT = 5.0
BUSY_SECONDS = 0.2
"""Time for which the other processes are observed."""


def environment(
    folder: Path | None = None, *, sleep: Callable[[float], None] = time.sleep
) -> dict[str, Any]:
    """Return machine, versions, settings and present load as JSON values.

    It observes other processes for `BUSY_SECONDS`.  The commit is that of the repository at
    `folder`, by default the current one.
    """
    limits = cgroup_limits()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "os": _operating_system(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "python_executable": sys.executable,
        "cpu": _cpu(limits),
        "memory": _memory(limits),
        "cuda": _cuda(),
        "shardmark": __version__,
        "packages": {name: package_version(name) for name in PACKAGES},
        "variables": relevant_variables({**ALLOCATOR, **os.environ}),  # as ranks get them
        "git": git_state(folder or Path.cwd()),
        "load": {"average": list(os.getloadavg()), "busy_processes": busy_processes(sleep=sleep)},
    }


def machine(device: Literal["auto", "cuda", "cpu"] = "auto") -> Machine:
    """Describe this machine for strategies.  `device` is auto, cuda or cpu, as in an experiment."""
    _, _, build = (package_version("torch") or "").partition("+")
    without_cuda = device == "cpu" or build.startswith(("cpu", ROCM_BUILD))
    devices = () if without_cuda else visible_cuda_devices(all_cuda_devices())
    return Machine(
        device_type=("cuda" if devices else "cpu") if device == "auto" else device,
        device_count=len(devices),
        cores=usable_cores(cgroup_limits()),
        device_names=tuple(gpu.name for gpu in devices),
        has_bf16=all(
            gpu.capability is None or gpu.capability >= BF16_CAPABILITY for gpu in devices
        ),
    )


def package_version(name: str) -> str | None:
    """Return the installed version without importing the package; None if not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def usable_cores(limits: CgroupLimits) -> int:
    """Logical cores that affinity and the container's quota allow this process, at least 1."""
    cores = len(os.sched_getaffinity(0))
    return cores if limits.cpu_cores is None else max(1, min(cores, int(limits.cpu_cores)))


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Name of the CPU; None where the kernel does not report it, as on some Arm machines."""
    named = re.search(r"^model name\s*:[ \t]*(.+)$", read_kernel_file(cpuinfo), re.MULTILINE)
    return named and named[1].strip()


def shared_memory_bytes() -> int | None:
    """Size of /dev/shm, through which data-loader workers send batches."""
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def relevant_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that control threads, devices or communication, without secrets."""
    return {
        name: LOGIN.sub(f"{MASK}@", value) if _SETTINGS.fullmatch(name) else MASK
        for name, value in sorted(variables.items())
        if _STEERING.match(name) and not _SECRET_NAME.search(name.upper())
    }


def is_stored(name: str) -> bool:
    """True for a variable whose value `relevant_variables` stores."""
    return bool(_SETTINGS.fullmatch(name)) and not _SECRET_NAME.search(name.upper())


def busy_processes(*, sleep: Callable[[float], None] = time.sleep) -> list[dict[str, Any]]:
    """Name and CPU use of at most five busy processes outside of this process tree."""
    this = psutil.Process()
    tree = {this.pid, *(child.pid for child in this.children(recursive=True))}
    # psutil returns the use since its last call, and None for what this user must not see.
    others = [p for p in psutil.process_iter(["name", "cpu_percent"]) if p.pid not in tree]
    sleep(BUSY_SECONDS)
    busy: list[tuple[float, str]] = []
    for process in others:
        with suppress(psutil.Error):  # the process has ended
            busy.append((process.cpu_percent(), process.info["name"] or "a process without a name"))
    busy = sorted((use for use in busy if use[0] >= BUSY_PERCENT), reverse=True)[:5]
    return [{"name": name, "cpu_percent": round(percent, 1)} for percent, name in busy]


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the repository at the folder, and whether files differ from it; else None."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain")
    return {"commit": commit.strip(), "dirty": None if changes is None else bool(changes.strip())}


def _cpu(limits: CgroupLimits) -> dict[str, Any]:
    return {
        "model": cpu_model(),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(logical=True),
        "usable_cores": usable_cores(limits),
        "affinity": sorted(os.sched_getaffinity(0)),
        "quota_cores": limits.cpu_cores,
    }


def _memory(limits: CgroupLimits) -> dict[str, Any]:
    memory = psutil.virtual_memory()
    return {
        "total_bytes": memory.total,
        "available_bytes": memory.available,
        "limit_bytes": limits.memory_bytes,
        "shared_memory_bytes": shared_memory_bytes(),
    }


def _operating_system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _cuda() -> dict[str, Any]:
    gpus = all_cuda_devices()
    visible = [device.uuid for device in visible_cuda_devices(gpus)]
    facts: dict[str, Any] = json.loads(json.dumps(asdict(gpus)))
    return facts | {"visible": visible}


def occupied_devices(environment: Mapping[str, Any]) -> list[str]:
    """Messages about devices of the trials that other processes occupy, for before the start."""
    cuda = environment["cuda"]
    return [
        f"GPU {index} ({device['name']}) {description}: trials may be slower, or lack memory"
        for index, device in enumerate(cuda["devices"])
        if device["uuid"] in cuda["visible"]
        and (description := occupation(device["processes"], device["memory_used_bytes"]))
    ]


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ("git", "-C", str(folder), *arguments),
            capture_output=True,
            text=True,
            check=True,
            timeout=_GIT_SECONDS,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # `status` would write the index
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
