"""On a real GPU: memory from the allocator, times from events, precisions, out of memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardmark.config.load import from_mapping
from shardmark.launch.controller import run_experiment
from shardmark.measure.system.gpus import all_cuda_devices, visible_cuda_devices
from shardmark.results.schema import Outcome, TrialResult
from shardmark.results.store import load_run
from shardmark.results.verification import read_verification

FOUND = all_cuda_devices()
if not visible_cuda_devices(FOUND):
    REASON = FOUND.reason or "CUDA_VISIBLE_DEVICES shows none"
    pytest.skip(f"needs a CUDA device: {REASON}", allow_module_level=True)


def run(out: Path, **changes: Any) -> list[TrialResult]:
    mapping: dict[str, Any] = {
        "name": "cuda",
        "workload": {"name": "classification", "model": "resnet18", "dataset": "digits"},
        "recipe": {"global_batch": 64, "steps": 8, "optimizer": {"lr": 0.01, "momentum": 0.9}},
        "matrix": {"strategy": ["single"]},
        "measure": {"warmup_steps": 3, "evaluate": "end"},
        "limits": {"trial_seconds": 240},
        "device": "cuda",
    }
    run_experiment(from_mapping(mapping | changes), out)
    return list(load_run(out, verify=True).trials)


def value(result: TrialResult, name: str) -> float:
    summary = result.metrics[name]
    assert summary is not None, f"{name}: {result.missing.get(name)}"
    return summary.value


@pytest.mark.timeout(600)
def test_precisions_on_one_device(tmp_path: Path) -> None:
    matrix = {"strategy": ["single"], "recipe.precision": ["fp32", "bf16", "fp16"]}
    results = {result.precision: result for result in run(tmp_path / "run", matrix=matrix)}
    assert set(results) == {"fp32", "bf16", "fp16"}
    for precision, result in results.items():
        assert result.outcome is Outcome.OK, (precision, result.failure)
        assert result.ranks[0].device != "cpu"
        assert result.ranks[0].device_uuid
        # The model and its momentum at least; the allocator keeps no less than it hands out.
        held = value(result, "parameter_bytes") + value(result, "optimizer_state_bytes")
        assert value(result, "peak_memory_bytes") > held
        assert value(result, "peak_reserved_bytes") >= value(result, "peak_memory_bytes")
        assert 0 < value(result, "train_loss") < 10
    verification = read_verification(tmp_path / "run")
    assert verification is not None
    verdicts = {verdict.precision: verdict for verdict in verification.verdicts}
    assert {name: v.equivalent for name, v in verdicts.items()} == dict.fromkeys(results, True), [
        (verdict.cause, [check for check in verdict.checks if not check.holds])
        for verdict in verdicts.values()
    ]
    start = {result.ranks[0].initial_weights_sha256 for result in results.values()}
    assert len(start) == 1
    skipped = {name: result.ranks[0].skipped_steps for name, result in results.items()}
    assert (skipped["fp32"], skipped["bf16"]) == (0, 0)


@pytest.mark.timeout(300)
def test_spans_come_from_events(tmp_path: Path) -> None:
    """Parts of a step on the device add up to the step, and the steps to the window."""
    (result,) = run(tmp_path / "run")
    assert result.outcome is Outcome.OK, result.failure
    file = tmp_path / "run" / "trials" / result.id / "steps.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    measured = [line for line in lines if line["measured"]]
    assert len(measured) == 5
    for line in measured:
        parts = [line[f"{name}_seconds"] for name in ("data", "forward", "backward", "optimizer")]
        assert all(part >= 0 for part in parts)
        assert sum(parts) <= line["step_seconds"] * 1.01
    (window,) = result.ranks[0].windows
    steps = sum(line["step_seconds"] for line in measured)
    assert steps == pytest.approx(window.window_seconds, rel=0.2)


@pytest.mark.timeout(300)
def test_checkpointing_and_accumulation_need_less_memory(tmp_path: Path) -> None:
    matrix = {"strategy": ["single", {"name": "single", "gradient_accumulation": 4},
                           {"name": "single", "activation_checkpointing": True}]}  # fmt: skip
    recipe = {"global_batch": 512, "steps": 5}
    results = run(tmp_path / "run", matrix=matrix, recipe=recipe)
    assert [result.outcome for result in results] == [Outcome.OK] * 3
    peaks = {
        (r.trial["recipe"]["gradient_accumulation"], r.trial["recipe"]["activation_checkpointing"]):
        value(r, "activation_peak_bytes") if r.metrics.get("activation_peak_bytes")
        else value(r, "peak_memory_bytes")
        for r in results
    }  # fmt: skip
    assert peaks[4, False] < peaks[1, False]
    assert peaks[1, True] < peaks[1, False]


@pytest.mark.timeout(300)
def test_huge_batch_is_out_of_memory(tmp_path: Path) -> None:
    """Some 500 GB of activations; the same pictures fit the host easily."""
    workload = {
        "name": "classification",
        "model": "vgg16",
        "dataset": "random",
        "image_size": 256,
        "training_samples": 4096,
    }
    recipe = {"global_batch": 4096, "steps": 4}
    (result,) = run(tmp_path / "run", workload=workload, recipe=recipe)
    assert result.outcome is Outcome.OUT_OF_MEMORY, result.failure
    assert result.failure is not None
    assert "out of memory" in result.failure.reason
    assert result.failure.remedy
    assert not result.metrics


@pytest.mark.timeout(300)
def test_more_ranks_than_devices_are_unavailable(tmp_path: Path) -> None:
    matrix = {"strategy": ["ddp", "dp", "fsdp", "zero-2"], "world_size": [512]}
    recipe = {"global_batch": 512, "steps": 4}
    results = run(tmp_path / "run", matrix=matrix, recipe=recipe)
    assert {result.outcome for result in results} == {Outcome.UNAVAILABLE}


@pytest.mark.skipif(len(visible_cuda_devices(FOUND)) < 2, reason="needs two CUDA devices")
@pytest.mark.timeout(300)
def test_data_parallel_in_bf16_with_dropout(tmp_path: Path) -> None:
    """torch's threads autocast to fp16 and share one seed unless told otherwise."""
    workload = {"name": "classification", "model": "tests.distributed.models:small"}
    matrix = {"strategy": ["dp"], "world_size": [2], "recipe.precision": ["fp32", "bf16"]}
    results = run(tmp_path / "run", workload=workload | {"dataset": "digits"}, matrix=matrix)
    assert [result.outcome for result in results] == [Outcome.OK] * 2
    verification = read_verification(tmp_path / "run")
    assert verification is not None
    assert [verdict.equivalent for verdict in verification.verdicts] == [True] * 2
