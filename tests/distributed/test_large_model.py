"""Models that no rank could hold whole are trained by those strategies that shard parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardmark.base.results.schema import Outcome, TrialResult
from shardmark.base.results.store import load_run
from shardmark.bench.launch.session import run_experiment
from shardmark.experiment.load import from_mapping
from shardmark.ranks.strategies.casting import lossless_copy, narrow_weights
from shardmark.ranks.train.record import weights_sha256
from shardmark.ranks.workloads import build_workload
from tests.kept_engine import KeptEngine

ZERO_3: dict[str, Any] = {"name": "zero-3", "max_live_parameters": 0, "max_reuse_distance": 0}
IN_BF16 = {"precision": "bf16"}
BF16_WEIGHTS = {"weights": "bf16"}
FSDP: dict[str, Any] = {"name": "fsdp"}
CHANGES: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": IN_BF16, "bf16 weights": BF16_WEIGHTS}
EXPERIMENT = {
    "name": "large",
    "workload": {"name": "own", "task": "tests.distributed.large_task:Task"},
    "recipe": {"global_batch": 8, "steps": 1, "threads_per_rank": 1, "seed": 2}
    | {"optimizer": {"name": "adamw", "lr": 0.001}},
    "matrix": {
        "strategy": [
            "ddp",
            *(strategy | changes for strategy in (FSDP, ZERO_3) for changes in CHANGES.values()),
        ],
        "world_size": [4],
    },
    "measure": {
        "repeats": 1,
        "warmup_steps": 0,
        "verify": False,
        "probe": False,
        "max_remeasure": 0,
    },
    "device": "cpu",
}


def change_of(trial: TrialResult) -> str:
    return "bf16 weights" if trial.varied["recipe.weights"] == "bf16" else trial.precision


def validation_loss(result: TrialResult) -> float:
    loss = result.metrics["validation_loss"]
    assert loss is not None
    return loss.value


def test_sharding_trains_a_model_that_exceeds_a_ranks_memory(
    tmp_path: Path, kept_engine: KeptEngine
) -> None:
    """The sharded model begins with the weights that it has where there is room for all of it."""
    experiment = from_mapping(EXPERIMENT)
    run = load_run(run_experiment(experiment, tmp_path / "run", engine=kept_engine))
    ended = {(trial.strategy, change_of(trial)): trial for trial in run.trials}
    told = {name: (trial.outcome, trial.failure) for name, trial in ended.items()}
    assert ended.pop(("ddp", "fp32")).outcome is Outcome.OUT_OF_MEMORY, told
    assert {trial.outcome for trial in ended.values()} == {Outcome.OK}, told
    whole = build_workload(experiment.workload, experiment.recipe.seed).build_model()
    expected = dict.fromkeys(CHANGES, weights_sha256(sorted(whole.named_parameters())))
    narrow_weights(whole)
    named = ((name, lossless_copy(p)) for name, p in sorted(whole.named_parameters()))
    expected["bf16 weights"] = weights_sha256(named)
    for (_, change), trial in ended.items():
        assert trial.ranks[0].initial_weights_sha256 == expected[change]
    for change, tolerance in (("fp32", 1e-5), ("bf16", 1e-2), ("bf16 weights", 1e-2)):
        quality = [validation_loss(ended[name, change]) for name in ("fsdp", "zero-3")]
        assert quality[0] == pytest.approx(quality[1], rel=tolerance)
