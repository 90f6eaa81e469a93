"""On a real GPU: memory from the allocator, times from events, precisions, out of memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.results.schema import Outcome, TrialResult
from shardmark.base.results.store import load_run
from shardmark.base.results.verification import read_verification
from shardmark.bench.launch.session import run_experiment
from shardmark.experiment.load import from_mapping
from shardmark.ranks.measure.system.environment import machine
from shardmark.ranks.measure.system.gpus import (
    RELEASED_BYTES,
    all_cuda_devices,
    used_memory,
    visible_cuda_devices,
)
from tests import present

FOUND = all_cuda_devices()
if not visible_cuda_devices(FOUND):
    REASON = FOUND.reason or "CUDA_VISIBLE_DEVICES shows none"
    pytest.skip(f"needs a CUDA device: {REASON}", allow_module_level=True)


def run(out: Path, measure: dict[str, Any] | None = None, **changes: Any) -> list[TrialResult]:
    mapping: dict[str, Any] = {
        "name": "cuda",
        "workload": {"name": "classification", "model": "resnet18", "dataset": "digits"},
        "recipe": {"global_batch": 64, "steps": 8, "optimizer": {"lr": 0.01, "momentum": 0.9}},
        "matrix": {"strategy": ["single"]},
        "measure": {
            "repeats": 1,
            **{"warmup_steps": 3, "warmup_seconds": 0, "window_seconds": 0},
            **{"evaluate": "end", **(measure or {})},
        },
        "limits": {"trial_seconds": 240},
        "device": "cuda",
    }
    run_experiment(from_mapping(mapping | changes), out)
    return list(load_run(out, verify=True).trials)


def value(result: TrialResult, name: str) -> float:
    summary = result.metrics[name]
    assert summary is not None, f"{name}: {result.missing.get(name)}"
    return summary.value


@pytest.mark.skipif(not machine().has_bf16, reason="needs bf16 in hardware")
def test_precisions_on_one_device(tmp_path: Path) -> None:
    matrix = {"strategy": ["single"], "recipe.precision": ["fp32", "bf16", "fp16"]}
    results = {result.precision: result for result in run(tmp_path / "run", matrix=matrix)}
    assert set(results) == {"fp32", "bf16", "fp16"}
    for precision, result in results.items():
        assert result.outcome is Outcome.OK, (precision, result.failure)
        assert result.ranks[0].device != "cpu"
        assert len(result.ranks[0].device_uuids) == 1
        # The model and its momentum at least; the allocator keeps no less than it hands out.
        held = value(result, "parameter_bytes") + value(result, "optimizer_state_bytes")
        assert value(result, "peak_memory_bytes") > held
        assert value(result, "peak_reserved_bytes") >= value(result, "peak_memory_bytes")
        assert 0 < value(result, "train_loss") < 10
    verification = present(read_verification(tmp_path / "run"))
    verdicts = {verdict.precision: verdict for verdict in verification.verdicts}
    assert {name: v.equivalent for name, v in verdicts.items()} == dict.fromkeys(results, True), [
        (verdict.cause, [check for check in verdict.checks if not check.holds])
        for verdict in verdicts.values()
    ]
    start = {result.ranks[0].initial_weights_sha256 for result in results.values()}
    assert len(start) == 1
    skipped = {name: result.ranks[0].skipped_steps for name, result in results.items()}
    assert (skipped["fp32"], skipped["bf16"]) == (0, 0)


def test_spans_come_from_events(tmp_path: Path) -> None:
    """Parts of a step on the device add up to the step, and the steps to the window."""
    (result,) = run(tmp_path / "run")
    assert result.outcome is Outcome.OK, result.failure
    file = tmp_path / "run" / "trials" / result.id / "steps.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    measured = [line for line in lines if line["measured"]]
    assert len(measured) == 5, "no step is added"
    for line in measured:
        parts = [line[f"{name}_seconds"] for name in ("data", "forward", "backward", "optimizer")]
        assert all(part >= 0 for part in parts)
        assert sum(parts) <= line["step_seconds"] * 1.01
    (window,) = result.ranks[0].windows
    steps = sum(line["step_seconds"] for line in measured)
    assert steps == pytest.approx(window.window_seconds, rel=0.2)


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


def test_more_ranks_than_devices_are_unavailable(tmp_path: Path) -> None:
    matrix = {"strategy": ["ddp", "dp", "fsdp", "zero-2"], "world_size": [512]}
    recipe = {"global_batch": 512, "steps": 4}
    results = run(tmp_path / "run", matrix=matrix, recipe=recipe)
    assert {result.outcome for result in results} == {Outcome.UNAVAILABLE}


@pytest.mark.skipif(len(visible_cuda_devices(FOUND)) < 2, reason="needs two CUDA devices")
def test_data_parallel_in_bf16_with_dropout(tmp_path: Path) -> None:
    """torch's threads autocast to fp16 and share one seed unless told otherwise."""
    workload = {"name": "classification", "model": "tests.distributed.models:small"}
    matrix = {"strategy": ["dp"], "world_size": [2], "recipe.precision": ["fp32", "bf16"]}
    results = run(tmp_path / "run", workload=workload | {"dataset": "digits"}, matrix=matrix)
    assert [result.outcome for result in results] == [Outcome.OK] * 2
    verification = present(read_verification(tmp_path / "run"))
    assert [verdict.equivalent for verdict in verification.verdicts] == [True] * 2


@pytest.mark.skipif(len(visible_cuda_devices(FOUND)) < 2, reason="needs two CUDA devices")
def test_two_devices_end_together(tmp_path: Path) -> None:
    """An error on one device ends the other device's rank within seconds."""
    matrix = {"strategy": ["ddp"], "world_size": [2]}

    def of_model(name: str, **changes: Any) -> TrialResult:
        workload = {"name": "classification", "model": name, "dataset": "digits"}
        measure = {"verify": False, "evaluate": "never"}
        (result,) = run(
            tmp_path / name.partition(":")[2], measure, workload=workload, matrix=matrix, **changes
        )
        return result

    fine = of_model("tests.distributed.models:small")
    assert fine.outcome is Outcome.OK, fine.failure
    assert value(fine, "exposed_communication_seconds") > 0
    full = of_model("tests.distributed.misbehaving:outgrows_its_gpu")
    assert full.outcome is Outcome.OUT_OF_MEMORY, full.failure
    assert full.total_seconds < 60


def test_a_short_recipe_is_measured_for_long_enough(tmp_path: Path) -> None:
    """Eight steps take milliseconds: the warm-up and the window last as long as asked for."""
    least = {"warmup_seconds": 2.0, "window_seconds": 6.0, "verify": False}
    (longer,) = run(tmp_path / "longer", least)
    (plain,) = run(tmp_path / "plain", {"verify": False})
    assert longer.outcome is plain.outcome is Outcome.OK, (longer.failure, plain.failure)
    rank = longer.ranks[0]
    assert sum(window.window_seconds for window in rank.windows) >= 6
    assert all(window.end_step - window.first_step <= 1000 for window in rank.windows)
    assert rank.windows[0].started_at_seconds - present(rank.first_step_at_seconds) >= 2
    # What was trained is the same: the added steps belong to no epoch, no order and no loss.
    assert [(epoch.first_step, epoch.end_step) for epoch in rank.epochs] == [(0, 8)]
    for name in ("initial_weights_sha256", "sample_order_sha256", "samples_total"):
        assert getattr(rank, name) == getattr(plain.ranks[0], name)
    assert value(longer, "train_loss") == pytest.approx(value(plain, "train_loss"), rel=0.01)
    assert value(longer, "exposed_communication_seconds") == 0
    # Of a part of a GPU nobody tells the power; of a card that is in no table, not the peak.
    if longer.metrics.get("energy_joules") and longer.metrics.get("power_watts"):
        seconds = sum(window.window_seconds for window in rank.windows)
        drawn = value(longer, "power_watts") * seconds
        assert value(longer, "energy_joules") == pytest.approx(drawn, rel=0.5)
    else:
        assert "energy_joules" in longer.missing or "power_watts" in longer.missing
    if longer.metrics.get("mfu"):
        assert 0 < value(longer, "mfu") < 1
    else:
        assert "table" in longer.missing["mfu"]


def test_evaluation_is_not_in_the_memory_of_training(tmp_path: Path) -> None:
    """A second model and its batches lie on the device between the windows alone."""
    recipe = {"global_batch": 64, "epochs": 3, "optimizer": {"lr": 0.01}}
    reserved = {}
    for when in ("never", "epoch"):
        measure = {"evaluate": when, "verify": False}
        (result,) = run(tmp_path / when, measure, recipe=recipe)
        assert result.outcome is Outcome.OK, result.failure
        reserved[when] = value(result, "peak_reserved_bytes")
    assert reserved["epoch"] <= 1.02 * reserved["never"] + 2**21


def test_a_server_on_the_host_takes_nothing_of_the_gpu(tmp_path: Path) -> None:
    matrix = {"strategy": ["ps-sync"], "world_size": [1]}
    (result,) = run(tmp_path / "run", matrix=matrix)
    assert result.outcome is Outcome.OK, result.failure
    worker, server = result.ranks
    assert (worker.role, server.role, server.device) == ("worker", "server", "cpu")
    assert value(result, "optimizer_state_bytes") == 0
    assert value(result, "host_state_bytes") > value(result, "parameter_bytes")
    # Nothing is computed while parameters come back.
    assert value(result, "exposed_communication_seconds") > 0


def test_after_a_timeout_the_gpu_is_free(tmp_path: Path) -> None:
    before = used_memory()
    recipe = {"global_batch": 64, "steps": 10**6}
    measure = {"verify": False, "evaluate": "never"}
    (result,) = run(tmp_path / "run", measure, recipe=recipe, limits={"trial_seconds": 25})
    assert result.outcome is Outcome.TIMED_OUT
    assert "had taken" in (result.failure.reason if result.failure else "")
    left = {uuid: used - before.get(uuid, used) for uuid, used in used_memory().items()}
    assert max(left.values(), default=0) <= RELEASED_BYTES
