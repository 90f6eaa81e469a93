"""The environment is JSON, holds no secret, and is read without torch."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Literal

import pytest

from shardmark.base.system.environment_variables import ALLOCATOR
from shardmark.ranks.measure.kernel_files import CgroupLimits, cgroup_limits
from shardmark.ranks.measure.system import environment as module
from shardmark.ranks.measure.system.environment import (
    cpu_model,
    environment,
    git_state,
    machine,
    relevant_variables,
    usable_cores,
)
from shardmark.ranks.measure.system.gpus import CudaDevice, CudaDevices


def no_sleep(seconds: float) -> None:
    assert seconds > 0


def test_environment_is_json_with_the_machines_facts(tmp_path: Path) -> None:
    found = environment(tmp_path, sleep=no_sleep)
    assert json.loads(json.dumps(found)) == found
    assert found["date"].endswith("+00:00")
    assert found["cpu"]["usable_cores"] >= 1
    assert found["memory"]["total_bytes"] > 2**20
    assert found["packages"]["psutil"]
    assert found["git"] is None
    assert len(found["load"]["average"]) == 3
    assert {**ALLOCATOR, **os.environ}["MALLOC_TRIM_THRESHOLD_"] == (
        found["variables"]["MALLOC_TRIM_THRESHOLD_"]
    ), "as ranks have it"


def test_no_secret_is_stored() -> None:
    stored = {"NCCL_DEBUG": "INFO", "CUDA_PATH": "/cuda", "TORCH_LOGS": "http://***@proxy:80"}
    masked = {"TORCH_PROXY": "***", "DS_ANYTHING": "***"}
    secret = {"TORCH_API_TOKEN": "x", "DS_PAT": "x", "DS_PAT_2": "x", "HOME": "/root"}
    login = "http://ann:p@ss@proxy:80"
    given = stored | secret | dict.fromkeys(("TORCH_LOGS", *masked), login)
    assert relevant_variables(given) == stored | masked


def test_git_state_has_commit_and_uncommitted_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(("git", "-C", str(tmp_path), *identity, *arguments), check=True)

    git("init", "--quiet")
    assert git_state(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "--quiet", "--message", "one")
    found = git_state(tmp_path)
    assert found is not None
    assert len(found["commit"]) == 40
    assert found["dirty"] is False
    (tmp_path / "file").write_text("two")
    assert git_state(tmp_path) == {**found, "dirty": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None, "without git"


@pytest.mark.parametrize(
    ("text", "model"),
    [("processor\t: 0\nmodel name\t: A: B\n", "A: B"), ("processor\t: 0\n", None), (None, None)],
)
def test_cpu_model_is_read(tmp_path: Path, text: str | None, model: str | None) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert cpu_model(tmp_path / "cpuinfo") == model


@pytest.mark.parametrize(
    ("quota", "expected"), [(None, 4), (0.5, 1), (1.0, 1), (2.5, 2), (4096.0, 4)]
)
def test_quota_limits_cores(
    quota: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert usable_cores(CgroupLimits(cpu_cores=quota, memory_bytes=None)) == expected


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        (
            {  # version 2: the tightest of the group and those around it
                "proc/self/cgroup": "0::/outer/inner",
                "sys/fs/cgroup/outer/inner/cpu.max": "max 100000",
                "sys/fs/cgroup/outer/inner/memory.max": "max",
                "sys/fs/cgroup/outer/cpu.max": "150000 100000",
                "sys/fs/cgroup/outer/memory.max": "1024",
                "sys/fs/cgroup/memory.max": "4096",
            },
            1.5,
            1024,
        ),
        (
            {  # version 1
                "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/b\n1:name=systemd:/",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/memory/b/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "2048",
            },
            2.0,
            2048,
        ),
        ({}, None, None),
    ],
)
def test_limits_of_a_container_are_read(
    tmp_path: Path, files: dict[str, str], cores: float | None, memory: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert cgroup_limits(tmp_path) == CgroupLimits(cpu_cores=cores, memory_bytes=memory)


def with_devices(monkeypatch: pytest.MonkeyPatch, number: int, torch: str) -> None:
    devices = tuple(
        CudaDevice(uuid=f"GPU-{i}", name="NVIDIA H200", memory_bytes=1, capability=(9 - 2 * i, 0))
        for i in range(number)
    )
    found = CudaDevices(driver_version="1", cuda_version="13.0", devices=devices, reason=None)
    monkeypatch.setattr(module, "all_cuda_devices", lambda: found)
    monkeypatch.setattr(module, "package_version", lambda name: torch if name == "torch" else None)


@pytest.mark.parametrize(
    ("devices", "torch", "asked", "expected"),
    [
        (2, "2.15.0", "auto", ("cuda", 2)),
        (2, "2.15.0", "cpu", ("cpu", 0)),
        (2, "2.15.0+cpu", "auto", ("cpu", 0)),
        (2, "2.15.0+rocm7.1", "auto", ("cpu", 0)),
        (0, "2.15.0", "auto", ("cpu", 0)),
        (0, "2.15.0", "cuda", ("cuda", 0)),
    ],
)
def test_machine_has_the_visible_devices(
    monkeypatch: pytest.MonkeyPatch,
    devices: int,
    torch: str,
    asked: Literal["auto", "cuda", "cpu"],
    expected: tuple[str, int],
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with_devices(monkeypatch, devices, torch)
    found = machine(asked)
    assert (found.device_type, found.device_count) == expected
    assert found.device_names == ("NVIDIA H200",) * found.device_count
    assert found.has_bf16 is (found.device_count < 2), "the second is of before Ampere"
