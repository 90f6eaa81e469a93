"""`doctor` on the GPUs of this machine."""

from __future__ import annotations

import json
import re

import pytest

from shardmark.cli import main
from shardmark.ranks.measure.system.gpus import all_cuda_devices, visible_cuda_devices

FOUND = all_cuda_devices()
GPUS = len(visible_cuda_devices(FOUND))
if not GPUS:
    REASON = FOUND.reason or "CUDA_VISIBLE_DEVICES shows none"
    pytest.skip(f"needs a CUDA device: {REASON}", allow_module_level=True)


def test_gpus_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    text = capsys.readouterr().out
    assert code == 0, text
    assert len(re.findall(r"^ok +GPU \d.*product is correct", text, re.MULTILINE)) == GPUS
    assert re.search(r"^ok +host to GPU .* GB/s", text, re.MULTILINE)
    assert ("GPU to GPU" in text) == ("the sum is correct" in text) == (GPUS > 1)


def test_run_stores_the_environment(tmp_path_factory: pytest.TempPathFactory) -> None:
    from shardmark.bench.launch.session import run_experiment
    from shardmark.experiment.load import from_mapping

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
