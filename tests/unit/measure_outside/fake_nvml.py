"""A stand-in for the module pynvml."""

from __future__ import annotations

from types import SimpleNamespace


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return {1: "Uninitialized", 3: "Not Supported", 6: "Not Found", 12: "Library Not Found"}[
            self.value
        ]


class FakeNvml:
    """Devices are named by UUID; a handle is the UUID itself."""

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_TEMPERATURE_GPU = 0
    NVML_SUCCESS = 0
    NVML_FEATURE_ENABLED = 1
    NVML_CLOCK_SM = 1
    NVML_NVLINK_MAX_LINKS = 36
    NVML_P2P_STATUS_OK = 0
    NVML_P2P_CAPS_INDEX_READ = (0,)  # sic
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139

    def __init__(
        self, *uuids: str, library: bool = True, energy: bool = True, nvlinks: int = 0
    ) -> None:
        self.uuids = uuids
        self.library = library
        self.energy = energy
        self.nvlinks = nvlinks
        """Of each device; all to all."""
        self.open = 0
        self.pids: tuple[int, ...] = ()
        self.energy_queries = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.library:
            raise NVMLError(12)
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return self.uuids[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in self.uuids:
            raise NVMLError(6)
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return handle

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: ARG002, N802
        return "NVIDIA H200"

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.1"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        return 13020

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: ARG002, N802
        return SimpleNamespace(gpu=75, memory=10)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: ARG002, N802
        return 350_500

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: ARG002, N802
        self.energy_queries += 1
        if not self.energy:
            raise NVMLError(3)
        return 2_500

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: ARG002, N802
        return 61

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: ARG002, N802
        return SimpleNamespace(used=1024, total=4096)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: ARG002, N802
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:  # noqa: ARG002, N802
        return 0x4

    def nvmlDeviceGetFieldValues(  # noqa: N802
        self,
        handle: str,  # noqa: ARG002
        fields: list[tuple[int, int]],
    ) -> list[SimpleNamespace]:
        """As the real one: the error is in the reading, and the counters are KiB."""
        assert [scope for _, scope in fields] == [2**32 - 1], "all links together"
        if not self.nvlinks:
            return [SimpleNamespace(nvmlReturn=self.NVML_ERROR_NOT_SUPPORTED)]
        return [
            SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=field))
            for field, _ in fields
        ]

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:  # noqa: ARG002, N802
        if link >= self.nvlinks:
            raise NVMLError(3)
        return self.NVML_FEATURE_ENABLED

    def nvmlDeviceGetP2PStatus(self, one: str, other: str, capability: int) -> int:  # noqa: N802
        assert one != other
        allowed = capability == 0 or self.nvlinks
        return self.NVML_P2P_STATUS_OK if allowed else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, one: str, other: str) -> int:  # noqa: N802
        return 10 if {one, other} == {"GPU-a", "GPU-b"} else 50

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:  # noqa: ARG002, N802
        return 500_000

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: str) -> int:  # noqa: ARG002, N802
        return 700_000

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:  # noqa: ARG002, N802
        return 345

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:  # noqa: ARG002, N802
        return 1980

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:  # noqa: ARG002, N802
        return (9, 0)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: str) -> int:  # noqa: ARG002, N802
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: str) -> int:  # noqa: ARG002, N802
        return 16

    def nvmlDeviceGetPciInfo(self, handle: str) -> SimpleNamespace:  # noqa: ARG002, N802
        raise NVMLError(3)
