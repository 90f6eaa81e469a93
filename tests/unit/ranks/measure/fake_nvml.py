"""A stand-in for the module pynvml."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return {3: "Not Supported", 6: "Not Found", 12: "Library Not Found"}[self.value]


ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetName": "NVIDIA H200",
    "nvmlSystemGetDriverVersion": "580.1",
    "nvmlSystemGetCudaDriverVersion_v2": 13020,
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=75, memory=10),
    "nvmlDeviceGetPowerUsage": 350_500,
    "nvmlDeviceGetTotalEnergyConsumption": 2_500,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=1024, total=4096),
    "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
    "nvmlDeviceGetEnforcedPowerLimit": 500_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
    "nvmlDeviceGetClockInfo": 345,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetCudaComputeCapability": (9, 0),
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetPciInfo": NVMLError(3),
}
"""Answers of functions to any question: a value, or an error that they raise."""


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
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139

    def __init__(self, *uuids: str, nvlinks: int = 0, library: bool = True, **answers: Any) -> None:
        """`nvlinks` of each device, all to all; `answers` are others than usual."""
        self.uuids = uuids
        self.nvlinks = nvlinks
        self.library = library
        self.answers = ANSWERS | answers
        self.open = 0
        self.pids: tuple[int, ...] = ()
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def told(*_: object) -> Any:
            self.asked.append(name)
            answer = self.answers[name]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return told

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

    def nvmlDeviceGetComputeRunningProcesses(self, _: str) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetFieldValues(  # noqa: N802
        self, _: str, fields: list[tuple[int, int]]
    ) -> list[SimpleNamespace]:
        """Answer as NVML does: the error is in the reading, and the counters are KiB."""
        assert [scope for _, scope in fields] == [2**32 - 1], "all links together"
        if not self.nvlinks:
            return [SimpleNamespace(nvmlReturn=self.NVML_ERROR_NOT_SUPPORTED)]
        return [
            SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=field))
            for field, _ in fields
        ]

    def nvmlDeviceGetNvLinkState(self, _: str, link: int) -> int:  # noqa: N802
        if link >= self.nvlinks:
            raise NVMLError(3)
        return self.NVML_FEATURE_ENABLED

    def nvmlDeviceGetP2PStatus(self, one: str, other: str, capability: int) -> int:  # noqa: N802
        assert one != other
        return self.NVML_P2P_STATUS_OK if capability == 0 or self.nvlinks else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, one: str, other: str) -> int:  # noqa: N802
        return 10 if {one, other} == {"GPU-a", "GPU-b"} else 50
