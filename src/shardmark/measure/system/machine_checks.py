"""What `shardmark doctor` looks at: software, devices and limits.  Imports no torch."""

from __future__ import annotations

import platform
import re
import resource
import shutil
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import psutil

from shardmark.measure.system.cgroup import cgroup_limits
from shardmark.measure.system.environment import package_version, shared_memory_bytes

if TYPE_CHECKING:
    from shardmark.core.machine import Machine
    from shardmark.measure.system.gpus import CudaDevices

MINIMUM_PYTHON = "3.11"
MINIMUM_VERSIONS = {"torch": "2.11", "torchvision": "0.26", "deepspeed": "0.19"}
ESSENTIAL = ("operating system", "python", "torch", "torchvision")
"""Without one of them nothing can be measured."""
OPTIONAL = {"timm": "its models", "triton": "compiled kernels on CUDA devices"}

MINIMUM_SHARED_MEMORY_BYTES = 2**30
MINIMUM_OPEN_FILES = 4096


class State(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Not needed by all, or smaller than it should be."""
    MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding; a `remedy` unless it is `ok`."""

    name: str
    state: State
    found: str
    remedy: str | None = None


def software_checks() -> list[Check]:
    """Python, libraries (installed versions, nothing is imported) and the compiler."""
    checks = [_version_check("python", platform.python_version(), MINIMUM_PYTHON)]
    for name, minimum in MINIMUM_VERSIONS.items():
        checks.append(_version_check(name, package_version(name), minimum))
    for name, use in OPTIONAL.items():
        version = package_version(name)
        checks.append(
            Check(name=name, state=State.OK, found=version)
            if version
            else Check(
                name=name,
                state=State.NOTE,
                found=f"not installed; only for {use}",
                remedy=f"pip install {name}",
            )
        )
    return [
        *checks,
        _tool_check("C++ compiler", "g++", "apt-get install g++"),
        _tool_check("ninja", "ninja", "pip install ninja"),
    ]


def _version_check(name: str, version: str | None, minimum: str) -> Check:
    remedy = (
        f"install Python {minimum} or newer"
        if name == "python"
        else f'pip install "{name}>={minimum}"'
    )
    if version is None:
        return Check(name=name, state=State.MISSING, found="not installed", remedy=remedy)
    if _numbers(version) < _numbers(minimum):
        found = f"{version}, older than {minimum}"
        return Check(name=name, state=State.MISSING, found=found, remedy=remedy)
    return Check(name=name, state=State.OK, found=version)


def _numbers(version: str) -> tuple[int, ...]:
    """The release's numbers: (2, 11, 0) for `2.11.0+cu130`."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _tool_check(name: str, command: str, remedy: str) -> Check:
    path = shutil.which(command)
    if path is not None:
        return Check(name=name, state=State.OK, found=path)
    return Check(
        name=name,
        state=State.MISSING,
        found=f"no {command}; DeepSpeed compiles an operator with it",
        remedy=remedy,
    )


def device_checks(here: Machine, found: CudaDevices) -> list[Check]:
    """CUDA devices, and whether the driver is new enough for torch's CUDA."""
    name = "CUDA devices"
    if not found.devices:
        text = f"none: {found.reason}; trials run on the CPU"
        remedy = "install NVIDIA's driver, or give the container its devices (--gpus all)"
        return [Check(name=name, state=State.NOTE, found=text, remedy=remedy)]
    if here.device_count == 0:
        text = f"none of {len(found.devices)} can be used; trials run on the CPU"
        remedy = "look at CUDA_VISIBLE_DEVICES, and install torch with CUDA"
        return [Check(name=name, state=State.NOTE, found=text, remedy=remedy)]
    text = f"{here.device_count}: {', '.join(here.device_names)}"
    return [Check(name=name, state=State.OK, found=text), _driver_check(found)]


def _driver_check(found: CudaDevices) -> Check:
    text = f"{found.driver_version}, up to CUDA {found.cuda_version}"
    runtime = package_version("nvidia-cuda-runtime") or package_version("nvidia-cuda-runtime-cu12")
    if runtime and found.cuda_version and _numbers(runtime)[0] > _numbers(found.cuda_version)[0]:
        return Check(
            name="NVIDIA driver",
            state=State.MISSING,
            found=f"{text}; torch was built for CUDA {runtime}",
            remedy="install a newer driver, or torch for this CUDA version",
        )
    return Check(name="NVIDIA driver", state=State.OK, found=text)


def host_checks(here: Machine) -> list[Check]:
    """Cores, memory, shared memory and open files."""
    total = psutil.virtual_memory().total
    memory = min(total, cgroup_limits().memory_bytes or total)
    shared = shared_memory_bytes() or 0
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = files == resource.RLIM_INFINITY
    linux = sys.platform == "linux"
    return [
        Check(
            name="operating system",
            state=State.OK if linux else State.MISSING,
            found=platform.platform(),
            remedy=None if linux else "use Linux: the system metrics are read from /proc",
        ),
        Check(name="CPU cores", state=State.OK, found=str(here.cores)),
        Check(name="memory", state=State.OK, found=_gibibytes(memory)),
        _size_check(
            "shared memory",
            f"/dev/shm has {_gibibytes(shared)}",
            enough=shared >= MINIMUM_SHARED_MEMORY_BYTES,
            remedy="data-loader workers need it: docker run --shm-size=2g or --ipc=host",
        ),
        _size_check(
            "open files",
            "unlimited" if unlimited else f"at most {files} a process",
            enough=unlimited or files >= MINIMUM_OPEN_FILES,
            remedy=f"ulimit -n {MINIMUM_OPEN_FILES}",
        ),
    ]


def _size_check(name: str, found: str, *, enough: bool, remedy: str) -> Check:
    state = State.OK if enough else State.NOTE
    return Check(name=name, state=state, found=found, remedy=None if enough else remedy)


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
