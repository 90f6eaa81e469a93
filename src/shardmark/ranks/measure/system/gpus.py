"""Reads CUDA devices through NVML, by UUID: an index may mean another device in each process."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from shardmark.ranks.measure.kernel_files import read_kernel_file

_ALL_LINKS = 2**32 - 1
"""Scope of NVML's NVLink fields that asks for the sum over the device's links."""
_QUERIES: dict[str, Callable[[Any, Any], Any]] = {
    "utilization_percent": lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
    "power_watts": lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
    "energy_joules": lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
    "temperature_celsius": lambda nvml, handle: nvml.nvmlDeviceGetTemperature(
        handle, nvml.NVML_TEMPERATURE_GPU
    ),
    "memory_used_bytes": lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle).used,
    "clock_limits": lambda nvml, handle: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
    "other_processes": lambda nvml, handle: {
        process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    },
    "nvlink_sent_bytes": lambda nvml, handle: _nvlink_bytes(
        nvml, handle, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
    ),
    "nvlink_received_bytes": lambda nvml, handle: _nvlink_bytes(
        nvml, handle, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
    ),
}

FIELDS = tuple(_QUERIES)
OCCUPIED_BYTES = 2**30
"""A device with more memory in use than this is occupied: the driver uses less for itself."""

KERNELS_REMEDY = "install a torch that was built for it, or hide it by CUDA_VISIBLE_DEVICES"
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)[a-z]?")

RELEASED_BYTES = 2**24
"""A device is released when its memory use is within this of what it was before."""
RELEASE_SECONDS = 0.1
"""Time between two readings."""


class GpuReader:
    """Reads the devices with these UUIDs until closed.  A value that cannot be read is None."""

    def __init__(self, uuids: Iterable[str]) -> None:
        self._handles: dict[str, Any] = {}
        self._unsupported: set[tuple[str, str]] = set()
        """UUID and field of values that the driver does not support; they are asked for once."""
        self._nvml, _ = _open_nvml()
        if self._nvml is not None:
            # NVML spells UUIDs with a prefix, which torch leaves out.
            prefixed = {u if u.startswith(("GPU-", "MIG-")) else f"GPU-{u}" for u in uuids}
            for uuid in sorted(prefixed):
                # torch writes the UUID of a MIG slice without its prefix, too.
                for name in (uuid.replace("GPU-", "MIG-", 1), uuid):
                    with contextlib.suppress(self._nvml.NVMLError):
                        self._handles[uuid] = self._nvml.nvmlDeviceGetHandleByUUID(name)

    def read(self, pids: Mapping[int, Collection[int]]) -> list[dict[str, object]]:
        """Return the values of `samples.jsonl` by device.  `pids` are the processes by rank."""
        trial_pids = {pid for of_rank in pids.values() for pid in of_rank}
        devices = []
        for uuid, handle in self._handles.items():
            values = {field: self._value(uuid, handle, field) for field in FIELDS}
            if (listed := values["other_processes"]) is not None:
                # NVML may list pids of another namespace than the container's: then only count.
                same_namespace = bool(listed & trial_pids)
                values["other_processes"] = (
                    len(listed - trial_pids) if same_namespace else max(0, len(listed) - len(pids))
                )
            devices.append({"uuid": uuid, **values})
        return devices

    def _value(self, uuid: str, handle: Any, field: str) -> Any:
        if (uuid, field) in self._unsupported:
            return None
        try:
            return _QUERIES[field](self._nvml, handle)
        except self._nvml.NVMLError as error:
            names = ("NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND")
            if error.value in [getattr(self._nvml, f"NVML_ERROR_{name}") for name in names]:
                self._unsupported.add((uuid, field))  # other errors may be temporary
            return None

    def close(self) -> None:
        if self._nvml is not None:
            _shut(self._nvml)
            self._nvml = None
            self._handles = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """Present state of one device; None for what the driver does not report."""

    uuid: str
    name: str
    memory_bytes: int | None
    memory_used_bytes: int | None = None
    """Memory in use, including the driver's own."""
    processes: int | None = None
    """Number of processes that compute on it.  A container may not see those outside of it."""
    power_limit_watts: float | None = None
    default_power_limit_watts: float | None = None
    sm_clock_hertz: float | None = None
    highest_sm_clock_hertz: float | None = None
    capability: tuple[int, int] | None = None
    """Compute capability, major and minor."""
    pcie: str | None = None
    """Highest PCIe generation and width that device and slot support."""
    numa_node: int | None = None
    nvlinks: int = 0
    """Number of active NVLinks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevices:
    """Driver and devices of the machine, as NVML reports them."""

    driver_version: str | None
    cuda_version: str | None
    """The newest CUDA version that the driver supports."""
    devices: tuple[CudaDevice, ...]
    reason: str | None
    """The reason why there is no device; else None."""
    links: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Pairs of devices by type of their connection; a pair is two indices, such as `0-1`."""


def occupation(processes: int | None, memory_used_bytes: int | None) -> str | None:
    """Describe what other processes hold on a device; None if it is free."""
    used_bytes = memory_used_bytes or 0
    if not processes and used_bytes <= OCCUPIED_BYTES:
        return None
    holders = f"{processes} processes" if processes else "processes that NVML does not list"
    return f"is not free: {holders} hold {used_bytes / 2**30:.1f} GiB of its memory"


def all_cuda_devices() -> CudaDevices:
    """Return every device of the machine, also those that this process must not use."""
    nvml, reason = _open_nvml()
    if nvml is None:
        return CudaDevices(driver_version=None, cuda_version=None, devices=(), reason=reason)
    try:
        handles = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        return CudaDevices(
            driver_version=str(nvml.nvmlSystemGetDriverVersion()),
            cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}",
            devices=tuple(_describe(nvml, handle) for handle in handles),
            reason=None if handles else "the driver reports no device",
            links=_links(nvml, handles),
        )
    except nvml.NVMLError as error:
        return CudaDevices(
            driver_version=None, cuda_version=None, devices=(), reason=f"NVML: {error}"
        )
    finally:
        _shut(nvml)


def visible_cuda_devices(
    gpus: CudaDevices, environment: Mapping[str, str] = os.environ
) -> tuple[CudaDevice, ...]:
    """Devices that CUDA_VISIBLE_DEVICES allows; as in CUDA, the list ends at the first bad entry.

    An index counts in NVML's order (that of the PCI bus).  CUDA puts the fastest device first
    unless CUDA_DEVICE_ORDER is set: with unlike devices names may be wrong, not the number.
    """
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return gpus.devices
    visible: list[CudaDevice] = []
    for entry in (part.strip() for part in wanted.split(",")):
        if entry.isdecimal() and int(entry) < len(gpus.devices):
            device = gpus.devices[int(entry)]
        elif entry.startswith("MIG-"):
            return (CudaDevice(uuid=entry, name="MIG", memory_bytes=None),)  # CUDA uses one slice
        else:
            matches = [device for device in gpus.devices if entry and device.uuid.startswith(entry)]
            if len(matches) != 1:
                break
            device = matches[0]
        if device in visible:
            return ()  # CUDA refuses a list that names a device twice
        visible.append(device)
    return tuple(visible)


BF16_CAPABILITY = (8, 0)
"""The first compute capability with bf16 in hardware, that of Ampere."""


def without_kernels(name: str, capability: tuple[int, int], compiled: Iterable[str]) -> str | None:
    """Return the reason why torch cannot compute on that GPU, or None if it can.

    `compiled` is `torch.cuda.get_arch_list()`: `sm_86` runs on 8.6 and later 8.x, and `compute_90`
    is translated on any GPU from 9.0 on.
    """
    architectures = [match for arch in compiled if (match := _ARCHITECTURE.fullmatch(arch))]
    for code, major, minor in (match.groups() for match in architectures):
        version = int(major), int(minor)
        if version <= capability and (code == "compute" or version[0] == capability[0]):
            return None
    if not architectures:
        return None  # a build for another vendor, or one that has no list
    return (
        f"torch has no kernels for the {name} (sm_{capability[0]}{capability[1]}), only for"
        f" {', '.join(match[0] for match in architectures)}"
    )


def used_memory() -> dict[str, int]:
    """Return the bytes in use on each device of the machine, by UUID; empty without NVML."""
    used = {device.uuid: device.memory_used_bytes for device in all_cuda_devices().devices}
    return {uuid: count for uuid, count in used.items() if count is not None}


def await_memory(
    before: Mapping[str, int],
    *,
    read: Callable[[], Mapping[str, int]] = used_memory,
    patience_seconds: float = 30.0,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Wait until no device has more memory in use than before, at most `patience_seconds`.

    Another program may have taken the memory meanwhile.
    """
    most = {uuid: used + RELEASED_BYTES for uuid, used in before.items()}
    for _ in range(int(patience_seconds / RELEASE_SECONDS)):
        if all(used <= most.get(uuid, used) for uuid, used in read().items()):
            return
        sleep(RELEASE_SECONDS)


def _describe(nvml: Any, handle: Any) -> CudaDevice:
    facts = {name: _supported(nvml, fact, nvml, handle) for name, fact in _FACTS.items()}
    # The driver raises an error for link numbers that the device does not have.
    states = [
        _supported(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)
        for link in range(nvml.NVML_NVLINK_MAX_LINKS)
    ]
    return CudaDevice(
        uuid=str(nvml.nvmlDeviceGetUUID(handle)),
        name=str(nvml.nvmlDeviceGetName(handle)),
        nvlinks=states.count(nvml.NVML_FEATURE_ENABLED),
        **facts,
    )


_FACTS: dict[str, Callable[[Any, Any], Any]] = {
    # Boards that share the host's memory do not report any.
    "memory_bytes": lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
    "memory_used_bytes": lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).used),
    "processes": lambda nvml, handle: len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
    "power_limit_watts": lambda nvml, handle: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
    "default_power_limit_watts": lambda nvml, handle: (
        nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000
    ),
    "sm_clock_hertz": lambda nvml, handle: (
        1e6 * nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
    ),
    "highest_sm_clock_hertz": lambda nvml, handle: (
        1e6 * nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
    ),
    "capability": lambda nvml, handle: tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
    "pcie": lambda nvml, handle: (
        f"generation {nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)},"
        f" {nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)} lanes"
    ),
    "numa_node": lambda nvml, handle: numa_node(nvml.nvmlDeviceGetPciInfo(handle).busId),
}
_PATHS = {
    0: "one board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one PCIe host bridge",
    40: "one NUMA node",
    50: "between NUMA nodes",
}
"""Meaning of NVML's nvmlGpuTopologyLevel_t."""
_READ, _NVLINK = 0, 2
"""Values of NVML's nvmlGpuP2PCapsIndex_t; nvidia-ml-py defines the first wrongly, as a tuple."""


def numa_node(bus_id: str, pci: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """NUMA node of the device with a bus ID such as `00000000:3B:00.0`; None if not known."""
    text = read_kernel_file(pci / bus_id.lower()[-12:] / "numa_node")
    return int(text) if text.isdecimal() else None  # -1: the kernel does not know


def _supported(nvml: Any, query: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of an NVML query; None if the driver does not support it."""
    try:
        return query(*arguments)
    except nvml.NVMLError:
        return None


def _nvlink_bytes(nvml: Any, handle: Any, field_id: int) -> int:
    """Payload over all NVLinks of the device since the driver was loaded; NVML counts in KiB."""
    (reading,) = nvml.nvmlDeviceGetFieldValues(handle, [(field_id, _ALL_LINKS)])
    if reading.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(reading.nvmlReturn)
    return 1024 * int(reading.value.ullVal)


def _links(nvml: Any, handles: list[Any]) -> dict[str, tuple[str, ...]]:
    """Group the pairs of devices by the type of their connection."""
    links: dict[str, tuple[str, ...]] = {}
    for (first, handle), (second, other) in combinations(enumerate(handles), 2):
        connection = _connection(nvml, handle, other)
        links[connection] = (*links.get(connection, ()), f"{first}-{second}")
    return links


def _connection(nvml: Any, handle: Any, other: Any) -> str:
    def allowed(capability: int) -> bool | None:
        status = _supported(nvml, nvml.nvmlDeviceGetP2PStatus, handle, other, capability)
        return None if status is None else status == nvml.NVML_P2P_STATUS_OK

    level = _supported(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, handle, other)
    path = "NVLink" if allowed(_NVLINK) else _PATHS.get(level, "path not known")
    words = {True: "peer access", False: "no peer access", None: "peer access not known"}
    return f"{path}, {words[allowed(_READ)]}"


def _open_nvml() -> tuple[Any, str | None]:
    """Return the initialised library and None, or None and the reason."""
    try:
        import pynvml
    except ImportError:
        return None, "the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
    return pynvml, None


def _shut(nvml: Any) -> None:
    with contextlib.suppress(nvml.NVMLError):  # NVML counts its users: nothing is left to release
        nvml.nvmlShutdown()
