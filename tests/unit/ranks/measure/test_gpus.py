"""GPUs are read by UUID, and whatever cannot be read has a reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardmark.ranks.measure.system.gpus import (
    CudaDevice,
    CudaDevices,
    GpuReader,
    all_cuda_devices,
    await_memory,
    numa_node,
    occupation,
    used_memory,
    visible_cuda_devices,
    without_kernels,
)
from tests.unit.ranks.measure.fake_nvml import FakeNvml, NVMLError


def install(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> FakeNvml:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


def test_readings_are_in_base_units(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, FakeNvml("GPU-a", "GPU-b", nvlinks=18))
    reader = GpuReader(["b", "GPU-b", "x"])  # torch leaves the prefix out; nobody has an x
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
            "nvlink_sent_bytes": 138 * 1024,
            "nvlink_received_bytes": 139 * 1024,
        }
    ]
    reader.close()
    reader.close()
    assert nvml.open == 0
    assert reader.read({}) == []


def test_uuid_without_prefix_finds_a_gpu_or_mig_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml("MIG-a"))
    assert [device["uuid"] for device in GpuReader(["a"]).read({})] == ["GPU-a"]


def test_unsupported_value_is_none_and_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    energy = "nvmlDeviceGetTotalEnergyConsumption"
    nvml = install(monkeypatch, FakeNvml("GPU-a", nvmlDeviceGetTotalEnergyConsumption=NVMLError(3)))
    reader = GpuReader(["a"])
    for _ in range(3):
        (device,) = reader.read({})
        assert device["energy_joules"] is device["nvlink_sent_bytes"] is None
        assert device["power_watts"] == 350.5
    assert nvml.asked.count(energy) == 1


def test_missing_nvml_gives_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for nvml, reason in (
        (FakeNvml(library=False), "NVML: Library Not Found"),
        (None, "the package nvidia-ml-py is not installed"),
    ):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        reader = GpuReader(["a"])
        assert reader.read({}) == []
        reader.close()
        assert all_cuda_devices().reason == reason
        assert used_memory() == {}


def test_all_devices_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, FakeNvml("GPU-a", "GPU-b"))
    found = all_cuda_devices()
    assert (found.driver_version, found.cuda_version, found.reason) == ("580.1", "13.2", None)
    assert [device.uuid for device in found.devices] == ["GPU-a", "GPU-b"]
    assert found.devices[0] == CudaDevice(
        uuid="GPU-a",
        name="NVIDIA H200",
        memory_bytes=4096,
        memory_used_bytes=1024,
        processes=0,
        power_limit_watts=500,
        default_power_limit_watts=700,
        sm_clock_hertz=345e6,
        highest_sm_clock_hertz=1980e6,
        capability=(9, 0),
        pcie="generation 5, 16 lanes",
        numa_node=None,
        nvlinks=0,
    )
    assert nvml.open == 0
    assert used_memory() == {"GPU-a": 1024, "GPU-b": 1024}
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("nvlinks", "expected"),
    [
        (
            0,
            {
                "one PCIe switch, peer access": ("0-1",),
                "between NUMA nodes, peer access": ("0-2", "1-2"),
            },
        ),
        (18, {"NVLink, peer access": ("0-1", "0-2", "1-2")}),
    ],
)
def test_links_between_devices_are_described(
    monkeypatch: pytest.MonkeyPatch, nvlinks: int, expected: dict[str, tuple[str, ...]]
) -> None:
    install(monkeypatch, FakeNvml("GPU-a", "GPU-b", "GPU-c", nvlinks=nvlinks))
    found = all_cuda_devices()
    assert found.links == expected
    assert found.devices[0].nvlinks == nvlinks


def test_numa_node_is_read_from_the_pci_address(tmp_path: Path) -> None:
    for name, text in (("0000:3b:00.0", "1\n"), ("0000:5e:00.0", "-1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "numa_node").write_text(text)
    assert numa_node("00000000:3B:00.0", tmp_path) == 1
    assert numa_node("00000000:5E:00.0", tmp_path) is None, "the kernel does not know"
    assert numa_node("00000000:AF:00.0", tmp_path) is None


@pytest.mark.parametrize(
    ("processes", "used_bytes", "words"),
    [
        (0, 600 * 2**20, []),
        (None, None, []),
        (2, 600 * 2**20, ["2 processes", "0.6 GiB"]),
        (0, 12 * 2**30, ["does not list", "12.0 GiB"]),
    ],
)
def test_use_by_others_is_described(
    processes: int | None, used_bytes: int | None, words: list[str]
) -> None:
    told = occupation(processes, used_bytes)
    assert (told is None) == (not words)
    assert all(word in (told or "") for word in words)


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
def test_variable_selects_visible_devices(value: str | None, expected: list[str]) -> None:
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
def test_processes_of_others_are_counted(
    monkeypatch: pytest.MonkeyPatch, listed: tuple[int, ...], others: int
) -> None:
    install(monkeypatch, FakeNvml("GPU-a")).pids = listed
    (device,) = GpuReader(["a"]).read({0: (10, 11), 1: (20, 21)})
    assert device["other_processes"] == others


WHEELS = ["sm_75", "sm_80", "sm_86", "sm_90a", "sm_100", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "compiled", "runs"),
    [
        ((7, 0), WHEELS, False),  # V100
        ((7, 5), WHEELS, True),
        ((8, 9), WHEELS, True),  # RTX 4090, by sm_86
        ((9, 0), WHEELS, True),
        ((10, 3), WHEELS, True),
        ((11, 0), WHEELS, False),
        ((12, 1), WHEELS, True),  # translated
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["gfx942"], True),  # nothing is known of another vendor's
        ((9, 0), [], True),
    ],
)
def test_gpu_without_kernels_of_torch_gives_a_reason(
    capability: tuple[int, int], compiled: list[str], runs: bool
) -> None:
    reason = without_kernels("Tesla V100", capability, compiled)
    assert (reason is None) == runs
    if reason is not None:
        assert f"Tesla V100 (sm_{capability[0]}{capability[1]})" in reason
        assert compiled[0] in reason


@pytest.mark.parametrize(
    ("readings", "looks"),
    [
        ([0], 1),
        ([9 * 10**9, 5 * 10**9, 10**6], 3),
        ([9 * 10**9] * 99, 20),  # somebody else has taken it: it is not waited for for ever
    ],
)
def test_the_next_trial_waits_for_the_memory_of_a_killed_one(
    readings: list[int], looks: int
) -> None:
    left, slept = list(readings), list[float]()
    before = {"GPU-a": 2**20}
    await_memory(
        before,
        read=lambda: {"GPU-a": left.pop(0), "GPU-new": 10**12},
        patience_seconds=2.0,
        sleep=slept.append,
    )
    assert len(readings) - len(left) == looks
    assert len(slept) == looks - (looks < 20)
