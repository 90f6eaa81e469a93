"""`doctor` says what is missing and how to get it, and exits with 1 where nothing can run."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from shardmark.cli.doctor import doctor, strategy_availability
from shardmark.core.machine import Machine
from shardmark.measure.system import machine_checks
from shardmark.measure.system.gpus import CudaDevice, CudaDevices
from shardmark.measure.system.machine_checks import (
    State,
    device_checks,
    host_checks,
    software_checks,
)
from shardmark.strategies import STRATEGIES

CPU = Machine(device_type="cpu", device_count=0, cores=2)
ONE_GPU = Machine(device_type="cuda", device_count=1, cores=8, device_names=("NVIDIA H200",))
NO_CUDA = CudaDevices(driver_version=None, cuda_version=None, devices=(), reason="NVML: none")
H200 = CudaDevices(
    driver_version="535.1",
    cuda_version="12.2",
    devices=(CudaDevice(uuid="GPU-0", name="NVIDIA H200", memory_bytes=1),),
    reason=None,
)


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(doctor)
    return made


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    found = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(machine_checks, "package_version", found.get)


def test_text(app: typer.Typer) -> None:
    answer = CliRunner().invoke(app, [])
    assert answer.exit_code == 0, answer.output
    for name in ("python", "torch", "shared memory", *STRATEGIES):
        assert name in answer.output


def test_json(app: typer.Typer) -> None:
    answer = CliRunner().invoke(app, ["--format", "json"])
    found = json.loads(answer.output)
    assert set(found) == {"machine", "checks", "strategies"}
    assert [one["strategy"] for one in found["strategies"]] == list(STRATEGIES)
    for check in found["checks"]:
        assert (check["state"] == "ok") == (check["remedy"] is None)
    for one in found["strategies"]:
        assert one["available"] == (one["reason"] is None)


@pytest.mark.parametrize(
    ("versions", "exit_code", "remedy"),
    [
        ({"torchvision": "0.26.1", "deepspeed": "0.19"}, 1, 'pip install "torch>=2.11"'),
        ({"torch": "2.11.0+cu130", "torchvision": "0.26.0"}, 0, 'pip install "deepspeed>=0.19"'),
    ],
)
def test_what_is_not_installed(
    app: typer.Typer,
    monkeypatch: pytest.MonkeyPatch,
    versions: dict[str, str],
    exit_code: int,
    remedy: str,
) -> None:
    """Without torch nothing can be measured, without DeepSpeed the rest runs."""
    installed(monkeypatch, **versions)
    answer = CliRunner().invoke(app, [])
    assert answer.exit_code == exit_code
    assert remedy in answer.output


def test_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, torch="2.9.1", torchvision="0.26.0", deepspeed="0.20rc1")
    found = {check.name: check for check in software_checks()}
    assert found["torch"].state is State.MISSING
    assert found["torch"].found == "2.9.1, older than 2.11"
    assert found["torchvision"].state is found["deepspeed"].state is State.OK
    assert found["timm"].state is State.NOTE


def test_without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    found = {check.name: check for check in software_checks()}
    assert found["C++ compiler"].state is found["ninja"].state is State.MISSING
    assert found["ninja"].remedy == "pip install ninja"


@pytest.mark.parametrize(
    ("devices", "fact"), [(NO_CUDA, "NVML: none"), (H200, "CUDA_VISIBLE_DEVICES")]
)
def test_no_or_hidden_devices(devices: CudaDevices, fact: str) -> None:
    (check,) = device_checks(CPU, devices)
    assert check.state is State.NOTE
    assert fact in f"{check.found} {check.remedy}"


def test_driver_older_than_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, nvidia_cuda_runtime="13.2.86")
    _, driver = device_checks(ONE_GPU, H200)
    assert driver.state is State.MISSING
    assert "torch was built for CUDA 13.2.86" in driver.found
    installed(monkeypatch, nvidia_cuda_runtime_cu12="12.8.90")  # minor versions are compatible
    devices, driver = device_checks(ONE_GPU, H200)
    assert devices.state is driver.state is State.OK


def test_small_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "shared_memory_bytes", lambda: 64 * 2**20)
    found = {check.name: check for check in host_checks(CPU)}
    assert found["shared memory"].state is State.NOTE
    assert "--shm-size" in (found["shared memory"].remedy or "")


@pytest.mark.parametrize(
    ("here", "strategy", "ranks", "available"),
    [
        (ONE_GPU, "single", 1, True),
        (ONE_GPU, "ddp", 2, False),
        (CPU, "ddp", 2, True),
        (CPU, "fsdp-hybrid", 4, True),
    ],
)
def test_strategies(here: Machine, strategy: str, ranks: int, available: bool) -> None:
    answers = {answer.strategy: answer for answer in strategy_availability(here)}
    answer = answers[strategy]
    assert (answer.ranks, answer.available) == (ranks, available)
    assert available or answer.remedy
    assert here is ONE_GPU or not answers["dp"].available
