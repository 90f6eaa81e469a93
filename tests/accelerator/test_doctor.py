"""`doctor --gpu` on the GPUs of this machine."""

from __future__ import annotations

import json
import platform
import re
import time

import pytest

from shardmark.cli import main
from shardmark.measure.system.gpus import all_cuda_devices, visible_cuda_devices

FOUND = all_cuda_devices()
GPUS = len(visible_cuda_devices(FOUND))
if not GPUS:
    REASON = FOUND.reason or "CUDA_VISIBLE_DEVICES shows none"
    pytest.skip(f"needs a CUDA device: {REASON}", allow_module_level=True)


@pytest.mark.timeout(900)
def test_a_new_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """In two minutes with one GPU; the report is printed, to be sent back."""
    began = time.monotonic()
    code = main(["doctor", "--gpu"])
    elapsed_seconds = time.monotonic() - began
    report = capsys.readouterr().out
    with capsys.disabled():
        print(f"\n{report}")
    assert code == 0, report
    assert elapsed_seconds < 120 if GPUS == 1 else elapsed_seconds < 600
    sections = report.split("\n\n")
    assert len(sections) == 5
    measured, strategies = sections[3:]
    assert len(re.findall(r"^ok +kernel, GPU \d", measured, re.MULTILINE)) == GPUS
    assert re.search(r"^ok +host to GPU .* GB/s", measured, re.MULTILINE)
    assert re.search(r"^ok +NCCL.*the sum is right", measured, re.MULTILINE)
    assert ("GPU to GPU" in measured) == (GPUS > 1)
    assert re.search(r"^ok +single .*equivalent", strategies, re.MULTILINE)
    assert re.search(r"^ok +ps-sync .*equivalent", strategies, re.MULTILINE)
    assert ("ddp" in strategies) == (GPUS > 1)
    assert not re.search(rf"\b{re.escape(platform.node())}\b", report)


@pytest.mark.timeout(300)
def test_what_a_run_says_of_the_machine(tmp_path_factory: pytest.TempPathFactory) -> None:
    from shardmark.config.load import from_mapping
    from shardmark.launch.controller import run_experiment

    out = tmp_path_factory.mktemp("run")
    mapping = {
        "name": "machine",
        "workload": {"name": "classification", "model": "resnet18", "dataset": "digits"},
        "recipe": {"global_batch": 64, "steps": 8, "optimizer": {"lr": 0.01}},
        "matrix": {"strategy": ["single"]},
        "measure": {"repeats": 1, "warmup_seconds": 0, "window_seconds": 0, "verify": False},
        "device": "cuda",
    }
    run_experiment(from_mapping(mapping), out)
    found = json.loads((out / "environment.json").read_text())
    assert {"CUDA", "cuDNN", "NCCL"} <= set(found["libraries"])
    visible = found["cuda"]["visible"]
    device = next(each for each in found["cuda"]["devices"] if each["uuid"] in visible)
    assert device["power_limit_watts"] is None or device["power_limit_watts"] > 10
    assert len(device["capability"]) == 2
    count = len(FOUND.devices)  # hidden ones have links, too
    assert sum(map(len, found["cuda"]["links"].values())) == count * (count - 1) // 2
