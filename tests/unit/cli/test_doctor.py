"""`doctor` says what is missing and how to get it; with `--network` it measures links."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from shardmark.base.errors import ShardmarkError
from shardmark.base.machine import Machine
from shardmark.base.results.network import NetworkRecord
from shardmark.cli import main
from shardmark.cli.doctor import strategy_availability
from shardmark.ranks.measure.network import probe as network_probe
from shardmark.ranks.measure.system import environment, gpu_probe, machine_checks
from shardmark.ranks.measure.system.gpus import CudaDevice, CudaDevices
from shardmark.ranks.measure.system.machine_checks import (
    Check,
    State,
    device_checks,
    host_checks,
    software_checks,
)
from shardmark.ranks.strategies import STRATEGIES
from tests.golden.test_golden import GOLDEN
from tests.json_fields import problems_of

CPU = Machine(device_type="cpu", device_count=0, cores=2)
ONE_GPU = Machine(device_type="cuda", device_count=1, cores=8, device_names=("NVIDIA H200",))
NO_CUDA = CudaDevices(driver_version=None, cuda_version=None, devices=(), reason="NVML: none")
H200 = CudaDevices(
    driver_version="535.1",
    cuda_version="12.2",
    devices=(CudaDevice(uuid="GPU-0", name="NVIDIA H200", memory_bytes=1),),
    reason=None,
)
STORED = NetworkRecord.model_validate_json((GOLDEN / "network.json").read_bytes())
LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
Captured = pytest.CaptureFixture[str]


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    found = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(machine_checks, "package_version", found.get)


def test_text_and_json_have_every_finding(capsys: Captured) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert [n for n in ("python", "torch", "shared memory", *STRATEGIES) if n not in text] == []
    assert main(["doctor", "--format", "json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert set(findings) == {"machine", "checks", "strategies"}
    assert [offer["strategy"] for offer in findings["strategies"]] == list(STRATEGIES)
    for check in findings["checks"]:
        assert (check["state"] == "ok") == (check["remedy"] is None)
    for offer in findings["strategies"]:
        assert offer["available"] == (offer["reason"] is None)


@pytest.mark.parametrize(
    ("versions", "exit_code", "remedy"),
    [
        ({"torchvision": "0.26.1", "deepspeed": "0.19"}, 1, 'pip install "torch>=2.11"'),
        (
            {"torch": "2.11.0+cu130", "torchvision": "0.26.0"},
            0,
            "pip install 'shardmark[deepspeed]'",
        ),
    ],
)
def test_missing_package_has_an_install_command(
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    versions: dict[str, str],
    exit_code: int,
    remedy: str,
) -> None:
    """Without torch nothing can be measured, without DeepSpeed the rest runs."""
    installed(monkeypatch, **versions)
    assert main(["doctor"]) == exit_code
    assert remedy in capsys.readouterr().out


def test_old_torch_is_a_missing_requirement(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, torch="2.9.1", torchvision="0.26.0", deepspeed="0.20rc1")
    checks = {check.name: check for check in software_checks()}
    assert checks["torch"].found == "2.9.1, older than 2.11"
    assert checks["torch"].state is State.MISSING
    assert checks["torchvision"].state is checks["deepspeed"].state is State.OK
    assert checks["timm"].state is State.NOTE
    assert checks["transformers"].remedy == "pip install 'shardmark[language]'"
    assert "Parquet and Arrow files" in checks["pyarrow"].found


@pytest.mark.parametrize(
    ("devices", "fact"), [(NO_CUDA, "NVML: none"), (H200, "CUDA_VISIBLE_DEVICES")]
)
def test_no_or_hidden_devices_have_a_note(devices: CudaDevices, fact: str) -> None:
    (check,) = device_checks(CPU, devices)
    assert check.state is State.NOTE
    assert fact in f"{check.found} {check.remedy}"


def test_driver_older_than_torch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, nvidia_cuda_runtime="13.2.86")
    _, driver = device_checks(ONE_GPU, H200)
    assert driver.state is State.MISSING
    assert "torch was built for CUDA 13.2.86" in driver.found
    installed(monkeypatch, nvidia_cuda_runtime_cu12="12.8.90")  # minor versions are compatible
    devices, driver = device_checks(ONE_GPU, H200)
    assert devices.state is driver.state is State.OK


def test_gpu_without_kernels_of_torch_is_reported() -> None:
    (device,) = H200.devices
    old = replace(device, name="Tesla V100-SXM2-16GB", capability=(7, 0))
    found = replace(H200, devices=(old,))
    checks = {c.name: c for c in device_checks(ONE_GPU, found, lambda: ["sm_75", "sm_90"])}
    kernels = checks["GPU kernels"]
    assert kernels.state is State.MISSING
    assert "Tesla V100-SXM2-16GB (sm_70)" in kernels.found
    new = replace(H200, devices=(replace(device, capability=(9, 0)),))
    assert "GPU kernels" not in {c.name for c in device_checks(ONE_GPU, new, lambda: ["sm_90"])}


@pytest.mark.parametrize(
    ("gpus", "works", "answer"),
    [(1, True, None), (2, True, "the sum is correct"), (2, False, "NCCL error")],
)
def test_gpus_are_checked(
    *, gpus: int, works: bool, answer: str | None, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    installed(monkeypatch, torch="2.11.0", torchvision="0.26.0")
    here = replace(ONE_GPU, device_count=gpus)
    check = Check(name="GPU 0", state=State.OK, found="a matrix product is correct")

    def probe(ranks: int, **_: Any) -> NetworkRecord:
        assert ranks == gpus
        if not works:
            raise ShardmarkError("the ranks failed: NCCL error")
        return STORED

    monkeypatch.setattr(environment, "machine", lambda: here)
    monkeypatch.setattr(gpu_probe, "gpu_checks", lambda: [check])
    monkeypatch.setattr(network_probe, "probe_network", probe)
    assert main(["doctor"]) == (0 if works else 1)
    text = capsys.readouterr().out
    assert check.found in text
    assert (f"NCCL, {gpus} GPUs" in text) == (answer is not None)
    assert answer is None or answer in text


def test_small_shared_memory_has_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "shared_memory_bytes", lambda: 64 * 2**20)
    check = {check.name: check for check in host_checks(CPU)}["shared memory"]
    assert check.state is State.NOTE
    assert "--shm-size" in (check.remedy or "")


@pytest.mark.parametrize(
    ("here", "strategy", "ranks", "available"),
    [
        (ONE_GPU, "single", 1, True),
        (ONE_GPU, "ddp", 2, False),
        (ONE_GPU, "ps-sync", 1, True),
        (CPU, "ps-sync", 2, True),
        (CPU, "ddp", 2, True),
        (CPU, "dp", 2, False),
        (CPU, "local-sgd", 2, True),
        (CPU, "diloco", 2, True),
        (CPU, "fsdp-hybrid", 4, True),
    ],
)
def test_available_strategies_are_listed(
    here: Machine, strategy: str, ranks: int, available: bool
) -> None:
    offer = {offer.strategy: offer for offer in strategy_availability(here)}[strategy]
    assert (offer.ranks, offer.available) == (ranks, available)
    assert available or offer.remedy


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the requests to the probe, which answers with the stored record without its fits."""
    calls: list[dict[str, Any]] = []
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)

    def probe(ranks: int, **options: Any) -> NetworkRecord:
        calls.append({"ranks": ranks, **options})
        bare = tuple(each.model_copy(update={"fit": None}) for each in STORED.operations)
        return STORED.model_copy(update={"operations": bare})

    monkeypatch.setattr(network_probe, "probe_network", probe)
    return calls


def test_links_are_fitted_and_printed(asked: list[dict[str, Any]], capsys: Captured) -> None:
    assert main(["doctor", "--network"]) == 0
    seconds = network_probe.DEFAULT_SECONDS
    assert asked == [{"ranks": 2, "device": "auto", "seconds": seconds, "threads": None}]
    text = capsys.readouterr().out
    assert "Links between 2 ranks, gloo" in text
    assert "fewer than 3 sizes were measured" in text, "why there is no fit"
    line = next(line for line in text.splitlines() if line.startswith("point to point"))
    assert "100 (" in line
    assert main(["doctor", "--network", "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert problems_of("Links", printed) == []
    assert printed["operations"][0]["fit"]["bytes_per_second"]["value"] == pytest.approx(1.2e8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--network --device tpu", "'tpu' is not one of 'auto', 'cuda', 'cpu'"),
        ("--network --seconds 0", "--seconds: found 0"),
        ("--network --ranks 0", "--ranks: found 0; allowed are 1 to 256"),
        ("--network --ranks 257", "--ranks: found 257; allowed are 1 to 256"),
        ("--ranks 3", "--ranks: found without --network; add --network"),
        ("--device cpu --seconds 0", "--device, --seconds: found without --network"),
    ],
)
def test_wrong_options_are_refused(options: str, message: str, capsys: Captured) -> None:
    assert main(["doctor", *options.split()]) == 2
    assert message in capsys.readouterr().err


def test_ranks_option_is_refused_under_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    for name in LAUNCHER:
        monkeypatch.setenv(name, "1")
    assert main(["doctor", "--network", "--ranks", "2"]) == 2
    assert "found under torchrun" in capsys.readouterr().err
