"""Models that no rank could hold whole are trained by those strategies that shard parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardmark.config.load import from_mapping
from shardmark.launch.controller import run_experiment
from shardmark.results.schema import Outcome, TrialResult
from shardmark.results.store import load_run
from tests.kept_engine import KeptEngine

pytestmark = pytest.mark.timeout(300)


def trained(
    folder: Path, engine: KeptEngine, limited: bool, *strategies: Any
) -> dict[str, TrialResult]:
    task = {"name": "own", "task": "tests.distributed.large_task:Task", "evaluation_batch": 24}
    mapping = {
        "name": "large",
        "workload": task | {"options": {"limited": limited}},
        "recipe": {"global_batch": 8, "steps": 2, "threads_per_rank": 1}
        | {"optimizer": {"name": "adamw", "lr": 0.001}},
        "matrix": {
            "strategy": list(strategies),
            "world_size": [1 if strategies == ("single",) else 4],
        },
        "measure": {"warmup_steps": 1, "verify": False, "probe": False, "max_remeasure": 0},
        "device": "cpu",
    }
    run = load_run(run_experiment(from_mapping(mapping), folder, engine=engine))
    return {trial.strategy: trial for trial in run.trials}


def value(result: TrialResult) -> float:
    loss = result.metrics["validation_loss"]
    assert loss is not None
    return loss.value


def test_memory_for_no_whole_model(tmp_path: Path, kept_engine: KeptEngine) -> None:
    """With the same weights, losses and quality as where there is room for it."""
    lean = {"name": "zero-3", "max_live_parameters": 0, "max_reuse_distance": 0}
    small = trained(tmp_path / "limited", kept_engine, True, "ddp", "fsdp", lean)
    told = {name: (trial.outcome, trial.failure) for name, trial in small.items()}
    assert small["ddp"].outcome is Outcome.OUT_OF_MEMORY, told
    assert small["fsdp"].outcome is small["zero-3"].outcome is Outcome.OK, told
    roomy = trained(tmp_path / "free", kept_engine, False, "single")["single"]
    for name in ("fsdp", "zero-3"):
        same = [trial.ranks[0].initial_weights_sha256 for trial in (small[name], roomy)]
        assert same[0] == same[1]
        losses = [value(trial) for trial in (small[name], roomy)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
