"""Layers that are divided over two nodes, one of which is slow: the same training."""

from __future__ import annotations

from pathlib import Path

from shardmark.base.results.schema import Outcome
from shardmark.base.results.store import load_run
from shardmark.bench.launch.session import run_experiment
from shardmark.experiment.load import from_mapping
from tests.cluster.one_machine import losses
from tests.distributed.experiments import experiment
from tests.distributed.strategy_table import VISION
from tests.kept_engine import KeptEngine

TWO_NODES = {"name": "torchrun", "hosts": ["127.0.0.1"] * 2, "remote": "{command}"}


def test_layers_over_two_nodes_with_a_slow_rank_train_the_same(
    tmp_path: Path, kept_engine: KeptEngine
) -> None:
    content = experiment(
        workload=VISION.model_dump(mode="json"),
        matrix={"strategy": ["tp", "pp"]},
        measure={"probe": False, "link_seconds": 0, "repeats": 1},
    )
    slow = {"placement": {"nodes": 2}, "engine": TWO_NODES, "slow_ranks": {1: 2.0}}
    run_experiment(from_mapping(content), tmp_path / "one", engine=kept_engine)
    run_experiment(from_mapping(content | slow), tmp_path / "two")
    one, two = (load_run(tmp_path / name) for name in ("one", "two"))
    assert [trial.outcome for trial in (*one.trials, *two.trials)] == [Outcome.OK] * 4
    of_strategy = {trial.strategy: losses(one, trial) for trial in one.trials}
    for trial in two.trials:
        assert losses(two, trial) == of_strategy[trial.strategy]
        assert [rank.node for rank in trial.ranks] == [0, 1]
