"""GPUs are read by UUID, and whatever cannot be read has a reason."""

from __future__ import annotations

import sys

import pytest

from shardmark.measure.system.gpus import (
    CudaDevice,
    CudaDevices,
    GpuReader,
    all_cuda_devices,
    visible_cuda_devices,
)
from tests.unit.measure_outside.fake_nvml import FakeNvml


def install(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> FakeNvml:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


def test_reads_base_units(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, FakeNvml("GPU-a", "GPU-b"))
    reader = GpuReader(["b"])  # as torch spells it
    assert reader.read({}) == [
        {
            "uuid": "GPU-b",
            "utilization_percent": 75,
            "power_watts": 350.5,
            "energy_joules": 2.5,
            "temperature_celsius": 61,
            "memory_used_bytes": 1024,
            "clock_limits": 4,
            "other_processes": 0,
        }
    ]
    reader.close()
    reader.close()
    assert nvml.open == 0
    assert reader.read({}) == []


def test_both_spellings_are_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml("GPU-a"))
    assert len(GpuReader(["a", "GPU-a"]).read({})) == 1


def test_unsupported_value_is_none_and_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, FakeNvml("GPU-a", energy=False))
    reader = GpuReader(["a"])
    for _ in range(3):
        (found,) = reader.read({})
        assert found["energy_joules"] is None
        assert found["power_watts"] == 350.5
    assert nvml.energy_queries == 1


def test_an_unknown_device_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml("GPU-a"))
    assert GpuReader(["x"]).read({}) == []


def test_mig_slice_without_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml("MIG-a"))
    assert [one["uuid"] for one in GpuReader(["a"]).read({})] == ["GPU-a"]


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml(library=False))
    reader = GpuReader(["a"])
    assert reader.read({}) == []
    reader.close()
    assert all_cuda_devices().reason == "NVML: Library Not Found"


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuReader(["a"]).read({}) == []
    assert all_cuda_devices().reason == "the package nvidia-ml-py is not installed"


def test_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, FakeNvml("GPU-a", "GPU-b"))
    found = all_cuda_devices()
    assert (found.driver_version, found.cuda_version, found.reason) == ("580.1", "13.2", None)
    assert [one.uuid for one in found.devices] == ["GPU-a", "GPU-b"]
    assert found.devices[0].memory_bytes == 4096
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ["GPU-aa", "GPU-ab", "GPU-b"]),
        ("", []),
        ("-1", []),
        ("2,0", ["GPU-b", "GPU-aa"]),
        ("1,9,0", ["GPU-ab"]),  # CUDA stops at the first bad entry
        ("GPU-b", ["GPU-b"]),
        ("GPU-a", []),  # not unique
        ("0,0", []),
        ("MIG-1", ["MIG-1"]),
    ],
)
def test_visible_devices(value: str | None, expected: list[str]) -> None:
    found = CudaDevices(
        driver_version="1",
        cuda_version="13.0",
        devices=tuple(
            CudaDevice(uuid=uuid, name="NVIDIA H200", memory_bytes=1)
            for uuid in ("GPU-aa", "GPU-ab", "GPU-b")
        ),
        reason=None,
    )
    variables = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert [one.uuid for one in visible_cuda_devices(found, variables)] == expected


@pytest.mark.parametrize(
    ("listed", "others"),
    [((11, 21, 99), 1), ((11,), 0), ((501, 502), 0), ((501, 502, 503), 1)],
    ids=["another one", "ours", "ours by numbers of the host", "another by number alone"],
)
def test_other_processes_of_a_device(
    monkeypatch: pytest.MonkeyPatch, listed: tuple[int, ...], others: int
) -> None:
    install(monkeypatch, FakeNvml("GPU-a")).pids = listed
    (device,) = GpuReader(["a"]).read({0: (10, 11), 1: (20, 21)})
    assert device["other_processes"] == others
