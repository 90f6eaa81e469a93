"""The first experiment of a new user says the same of every strategy's quality."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from shardmark.base.results.store import load_run
from shardmark.bench.launch.session import run_experiment
from shardmark.experiment.load import load_experiment
from tests.distributed.test_script import value
from tests.kept_engine import KeptEngine

SEEDS = 3
POINT = 0.01
CHANGES = [
    f"measure.seeds={SEEDS}", f"measure.repeats={SEEDS}", "measure.verify=false",
    "measure.max_remeasure=0", "measure.window_seconds=0", "device=cpu",
]  # fmt: skip


@pytest.mark.slow
def test_all_strategies_end_with_one_quality(kept_engine: KeptEngine, tmp_path: Path) -> None:
    experiment = load_experiment("quickstart", CHANGES)
    run = load_run(run_experiment(experiment, tmp_path / "run", engine=kept_engine))
    by_seed: dict[int, dict[str, float]] = defaultdict(dict)
    for trial in run.trials:
        by_seed[trial.trial["recipe"]["seed"]][trial.strategy] = value(trial, "accuracy_top1")
    assert len(by_seed) == SEEDS
    for qualities in by_seed.values():
        assert qualities.keys() == {"single", "ddp", "fsdp"}
        assert max(qualities.values()) - min(qualities.values()) <= POINT
        assert min(qualities.values()) > 0.8
