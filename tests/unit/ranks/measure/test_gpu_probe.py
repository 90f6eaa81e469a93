"""GPU checks of `doctor`: the checks themselves run on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardmark.base.errors import ShardmarkError
from shardmark.bench.launch.local import fork_server
from shardmark.ranks.measure.system import gpu_probe
from shardmark.ranks.measure.system.machine_checks import State


@pytest.fixture
def cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A CPU device that takes the GPU's place, with small matrices and copies."""
    monkeypatch.setattr(gpu_probe, "FAST_SIDE", 8)
    monkeypatch.setattr(gpu_probe, "COPY_BYTES", 4096)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    return torch.device("cpu", 0)


def test_matrix_product_is_checked_and_timed(
    cpu_as_gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = gpu_probe._product_check(cpu_as_gpu)
    assert check.state is State.OK
    assert "a matrix product is correct" in check.found
    assert "TFLOP/s in bf16" in check.found
    to_device = torch.Tensor.to

    def inexact(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        moved: torch.Tensor = to_device(tensor, *args)
        return moved.mul(1 + 1e-2 * (args[0] == cpu_as_gpu))

    monkeypatch.setattr(torch.Tensor, "to", inexact)
    assert "relative error of 0.02" in gpu_probe._product_check(cpu_as_gpu).found

    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error: no kernel image\nmore of it")

    monkeypatch.setattr(torch.Tensor, "to", fails)
    check = gpu_probe._product_check(cpu_as_gpu)
    assert (check.state, check.found) == (State.FAILED, "CUDA error: no kernel image")


def test_copies_are_compared_and_timed(
    cpu_as_gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [(cpu_as_gpu, cpu_as_gpu)]
    check = gpu_probe._copy_check("GPU to GPU", pairs)
    assert check.state is State.OK
    assert "GB/s (host to host)" in check.found
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *_, **__: self)
    check = gpu_probe._copy_check("GPU to GPU", pairs)
    assert check.state is State.FAILED
    assert "host to host: the copy differs" in check.found
    assert "NCCL_P2P_DISABLE" in (check.remedy or "")


def test_process_that_fails_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ShardmarkError("kernels and copies failed: no")

    monkeypatch.setattr(gpu_probe, "run_module", fails)
    (check,) = gpu_probe.gpu_checks()
    assert (check.state, check.found) == (State.FAILED, "kernels and copies failed: no")


def test_gpu_without_kernels_in_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trial on such a GPU, for example a V100, would fail in its first kernel."""
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_name": lambda index: ("NVIDIA H200", "Tesla V100-SXM2-16GB")[index],
        "get_device_capability": lambda index: ((9, 0), (7, 0))[index],
        "get_arch_list": lambda: ["sm_75", "sm_90", "compute_90"],
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(fork_server, "cuda_libraries", tuple)
    assert fork_server._machine("cpu").device_type == "cpu"
    for device in ("auto", "cuda"):
        with pytest.raises(ShardmarkError, match=r"V100-SXM2-16GB \(sm_70\).*CUDA_VISIBLE_DEVICES"):
            fork_server._machine(device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert fork_server._machine("auto").device_count == 2
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert fork_server._machine("cpu").device_count == 0
    for device in ("auto", "cuda"):
        with pytest.raises(ShardmarkError, match="AMD"):
            fork_server._machine(device)
