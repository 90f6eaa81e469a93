"""Models that no rank could hold whole are trained by those strategies that shard parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmark.config.load import from_mapping
from shardmark.launch.controller import run_experiment
from shardmark.results.schema import Outcome, TrialResult
from shardmark.results.store import load_run
from shardmark.train.record import weights_sha256
from shardmark.workloads import build_workload
from tests.kept_engine import KeptEngine

EXPERIMENT = {
    "name": "large",
    "workload": {"name": "own", "task": "tests.distributed.large_task:Task"},
    "recipe": {"global_batch": 8, "steps": 1, "threads_per_rank": 1, "seed": 2}
    | {"optimizer": {"name": "adamw", "lr": 0.001}},
    "matrix": {
        "strategy": [
            *("ddp", "fsdp"),
            {"name": "zero-3", "max_live_parameters": 0, "max_reuse_distance": 0},
        ],
        "world_size": [4],
    },
    "measure": {"warmup_steps": 0, "verify": False, "probe": False, "max_remeasure": 0},
    "device": "cpu",
}


def validation_loss(result: TrialResult) -> float:
    loss = result.metrics["validation_loss"]
    assert loss is not None
    return loss.value


@pytest.mark.timeout(300)
def test_memory_for_no_whole_model(tmp_path: Path, kept_engine: KeptEngine) -> None:
    """What can train it begins with the weights that the model has where there is room for it."""
    experiment = from_mapping(EXPERIMENT)
    run = load_run(run_experiment(experiment, tmp_path / "run", engine=kept_engine))
    ended = {trial.strategy: trial for trial in run.trials}
    told = {name: (trial.outcome, trial.failure) for name, trial in ended.items()}
    assert ended["ddp"].outcome is Outcome.OUT_OF_MEMORY, told
    assert ended["fsdp"].outcome is ended["zero-3"].outcome is Outcome.OK, told
    whole = build_workload(experiment.workload, experiment.recipe.seed).build_model()
    first = {ended[name].ranks[0].initial_weights_sha256 for name in ("fsdp", "zero-3")}
    assert first == {weights_sha256(sorted(whole.named_parameters()))}
    quality = [validation_loss(ended[name]) for name in ("fsdp", "zero-3")]
    assert quality[0] == pytest.approx(quality[1], rel=1e-5)
