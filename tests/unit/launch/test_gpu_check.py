"""`doctor --gpu` with fake probes and a fake verification; and the probe itself, on the CPU."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmark.cli import main
from shardmark.config.experiment import Experiment
from shardmark.core.errors import ShardmarkError
from shardmark.launch import gpu_check
from shardmark.launch.gpu_check import impersonal
from shardmark.launch.local import fork_server
from shardmark.measure.system import environment, gpu_probe, machine_checks
from shardmark.measure.system.gpu_probe import Copy, GpuProbe, Kernel
from shardmark.measure.system.machine_checks import Check, State
from shardmark.results.network import NetworkRecord
from shardmark.results.verification import Verification
from shardmark.trials.matrix import expand
from tests.golden.test_golden import GOLDEN
from tests.unit.measure_outside.fake_nvml import FakeNvml
from tests.unit.verification.verdicts import BAD, GOOD, PROMISED, UNAVAILABLE

LINKS = NetworkRecord.model_validate_json((GOLDEN / "network.json").read_bytes())
WORKS = "all that was tried works"


def kernel(device: int, **changes: Any) -> Kernel:
    name, speed = "NVIDIA H200", 494.75e12
    made = Kernel(device=device, name=name, precision="bf16", flops_per_second=speed)
    return replace(made, **changes)


def probed(gpus: int) -> GpuProbe:
    ends = (None, *range(gpus))
    return GpuProbe(
        libraries=(("CUDA", "13.2"), ("cuDNN", "91900"), ("NCCL", "2.28.9")),
        architectures=("sm_80", "sm_90"),
        kernels=tuple(kernel(device) for device in range(gpus)),
        copies=tuple(
            Copy(source=one, target=other, bytes_per_second=25e9 * (1 + len(f"{one}{other}")))
            for one in ends
            for other in ends
            if one != other
        ),
    )


class World:
    """A machine with so many GPUs: what its probes answer, and what they were asked."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gpus: int
    ) -> None:
        self._capsys = capsys
        self.probe: GpuProbe | ShardmarkError = probed(gpus)
        self.links: NetworkRecord | ShardmarkError = LINKS
        alone = GOOD.model_copy(update={"strategy": "single"})
        self.verdicts = (UNAVAILABLE, PROMISED, GOOD, alone) if gpus > 1 else (alone,)
        self.nvml = FakeNvml(*(f"GPU-{index}" for index in range(gpus)), nvlinks=18)
        self.versions = {"torch": "2.15.0", "torchvision": "0.30.0", "deepspeed": "0.19.8"}
        self.collectives: list[int] = []
        self.experiments: list[Experiment] = []
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("NCCL_DEBUG", "WARN")
        monkeypatch.setitem(sys.modules, "pynvml", self.nvml)
        for module in (environment, machine_checks):
            monkeypatch.setattr(module, "package_version", self.versions.get)
        monkeypatch.setattr(gpu_check, "probe_gpus", self._probe)
        monkeypatch.setattr(gpu_check, "probe_network", self._network)
        monkeypatch.setattr(gpu_check, "verify_experiment", self._verify)

    def doctor(self, *options: str, code: int = 0) -> tuple[str, str]:
        """The report, and what was told before."""
        assert main(["doctor", "--gpu", *options]) == code
        said = self._capsys.readouterr()
        return said.out, said.err

    def _probe(self) -> GpuProbe:
        if isinstance(self.probe, ShardmarkError):
            raise self.probe
        return self.probe

    def _network(self, ranks: int, **options: Any) -> NetworkRecord:
        assert options["device"] == "cuda"
        self.collectives.append(ranks)
        if isinstance(self.links, ShardmarkError):
            raise self.links
        return self.links

    def _verify(self, experiment: Experiment, scratch: Path, **_: Any) -> Verification:
        assert scratch.parent.is_dir()
        self.experiments.append(experiment)
        return Verification(reference="one process", steps=3, verdicts=self.verdicts)


@pytest.fixture
def world(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[int], World]:
    return partial(World, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("gpus", "cells"),
    [
        (1, {("single", 1), ("ps-sync", 1), ("ps-async", 1), ("ps-bounded", 1)}),
        (2, {("single", 1), ("ddp", 2), ("fsdp", 2), ("zero-3", 2), ("dp", 2), ("ps-sync", 2)}),
        (4, {("single", 1), ("ddp", 2), ("fsdp-hybrid", 4), ("zero-1", 2)}),
    ],
)
def test_everything_that_the_gpus_can_run_is_tried(
    world: Callable[[int], World], gpus: int, cells: set[tuple[str, int]]
) -> None:
    there = world(gpus)
    text, progress = there.doctor()
    assert text.startswith(WORKS)
    facts = ["torch", "driver", "cuDNN 91900", "NCCL 2.28.9", "sm_90", "power limit 500 W"]
    facts += ["495 TFLOP/s", "50 % of the peak", "host to GPU", "NCCL_DEBUG=WARN", "equivalent"]
    assert [fact for fact in facts if fact not in text] == []
    assert ("NVLink, peer access: 0-1" in text) == ("GPU to GPU" in text) == (gpus > 1)
    assert text.splitlines()[-1].startswith("ok       single") == (gpus == 1), "in their order"
    assert "an all-reduce" in progress, "what takes long is told meanwhile"
    assert there.collectives == [gpus]
    (experiment,) = there.experiments
    assert experiment.device == "cuda"
    trials = expand(experiment, "cuda").trials
    tried = {(trial.strategy.name, trial.world_size) for trial in trials}
    assert tried >= cells
    assert gpus > 1 or tried == cells


NO_IMAGE = replace(probed(2), kernels=(kernel(0), kernel(1, error="no kernel image")))
NOT_SENT = replace(probed(2), copies=(Copy(source=1, target=0, error="not what was sent"),))


@pytest.mark.parametrize(
    ("answers", "facts"),
    [
        ({"probe": ShardmarkError("kernels and copies failed: no")}, ["kernel"]),
        ({"probe": NO_IMAGE}, ["kernel, GPU 1", "no kernel image"]),
        ({"probe": NOT_SENT}, ["GPU to GPU", "1 to 0: not what was sent", "NCCL_P2P_DISABLE"]),
        ({"links": ShardmarkError("the ranks failed: NCCL error")}, ["NCCL, 2 GPUs"]),
        ({"verdicts": (GOOD, BAD)}, ["zero-1", "clipped to norm 1"]),
    ],
)
def test_what_fails_is_named_first(
    world: Callable[[int], World], answers: dict[str, Any], facts: list[str]
) -> None:
    there = world(2)
    vars(there).update(answers)
    text, _ = there.doctor(code=1)
    assert facts[0] in text.splitlines()[0]
    assert [fact for fact in facts if fact not in text] == []
    assert bool(there.experiments) == ("verdicts" in answers), "else the GPUs failed before"


def test_devices_that_others_use(world: Callable[[int], World]) -> None:
    there = world(1)
    there.nvml.pids = (7, 8)
    text, _ = there.doctor()
    assert "2 processes" in text
    assert "CUDA_VISIBLE_DEVICES" in text


@pytest.mark.parametrize(
    ("torch_version", "library", "fact"),
    [("2.15.0", False, "Library Not Found"), ("2.15.0+rocm7.1", True, "AMD")],
)
def test_without_a_gpu_nothing_is_tried(
    world: Callable[[int], World], torch_version: str, library: bool, fact: str
) -> None:
    there = world(1)
    there.nvml.library = library
    there.versions["torch"] = torch_version
    text, progress = there.doctor(code=1)
    assert fact in text
    assert text.startswith("nothing to check: ")
    assert (there.collectives, there.experiments, progress) == ([], [], "")


def test_a_report_names_no_host_and_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setattr(platform, "node", lambda: "secret-7")
    words = (
        "on secret-7: /home/ann/code/task.py:12, CUDA_HOME=/home/ann, CACHE=/srv/bob/x/y,"
        " /dev/shm has 1.0 GiB, 25.0 GB/s, https://example.org/a/b"
    )
    check = impersonal(Check(name="x", state=State.FAILED, found=words, remedy=words))
    assert check.found == check.remedy
    private = ("secret-7", "ann", "bob", "code")
    assert [word for word in private if word in check.found] == []
    public = ("task.py:12", "/dev/shm has 1.0 GiB", "25.0 GB/s", "https://example.org/a/b")
    assert [word for word in public if word not in check.found] == []


@pytest.fixture
def cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """What the probe does, on the CPU and with small numbers."""
    monkeypatch.setattr(gpu_probe, "FAST_SIDE", 8)
    monkeypatch.setattr(gpu_probe, "COPY_BYTES", 4096)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    return torch.device("cpu", 0)


def test_a_kernel_is_right_or_told(
    cpu_as_gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = gpu_probe._kernel(cpu_as_gpu)
    assert (found.device, found.precision, found.error) == (0, "bf16", None)
    assert found.flops_per_second is not None
    to_device = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, *a: to_device(self, *a) * (1 + 1e-2 * (a[0] == cpu_as_gpu))
    )
    assert "off by" in (gpu_probe._kernel(cpu_as_gpu).error or "")

    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error: no kernel image\nmore of it")

    monkeypatch.setattr(torch.Tensor, "to", fails)
    assert gpu_probe._kernel(cpu_as_gpu).error == "CUDA error: no kernel image"


def test_a_copy_arrives_or_is_told(
    cpu_as_gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, back = gpu_probe._copies([cpu_as_gpu])
    assert [(there.source, there.target), (back.source, back.target)] == [(None, 0), (0, None)]
    assert there.error is back.error is None
    assert (there.bytes_per_second or 0) > 0
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *_, **__: self)
    assert [copy.error for copy in gpu_probe._copies([cpu_as_gpu])] == [
        "the copy differs from its source"
    ] * 2


def test_a_gpu_that_torch_cannot_use_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a V100 with wheels of today: each trial would fail in its first kernel."""
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
