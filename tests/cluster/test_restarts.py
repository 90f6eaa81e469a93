"""Ranks that die on one of two nodes: the launchers of both start theirs anew."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardmark.config.load import from_mapping
from shardmark.launch.controller import run_experiment
from shardmark.results.schema import Outcome
from shardmark.results.store import load_run
from tests.cluster.needs import why_no_bench
from tests.cluster.one_machine import EXPERIMENT, by_strategy, losses, wait_for
from tests.cluster.test_torchrun import command, steps, written
from tests.distributed.dying import Death, plan
from tests.kept_engine import DEATHS, KeptEngine

if TYPE_CHECKING:
    from benchmarks.cluster.bench import Bench

pytestmark = [
    pytest.mark.skipif(why_no_bench() is not None, reason=why_no_bench() or ""),
    pytest.mark.timeout(900),
]

PORT = 29431
CHANGES: dict[str, Any] = {
    "workload": EXPERIMENT["workload"] | {"model": "tests.distributed.dying:dying"},
    "recipe": {"global_batch": 16, "steps": 8, "threads_per_rank": 1},
    "matrix": {"strategy": ["ddp", "fsdp"], "world_size": [4]},
    "measure": {"warmup_steps": 1, "evaluate": "end", "verify": False, "probe": False},
}


def test_all_ranks_of_a_node_die_and_training_goes_on(
    nodes: Bench, tmp_path: Path, kept_engine: KeptEngine
) -> None:
    """Ranks 2 and 3, which are node 1's, in their sixth step; the checkpoint is the fifth's."""
    shared = tmp_path / "checkpoints"
    limits = {"max_restarts": 1, "checkpoint_steps": 5, "checkpoint_dir": str(shared)}
    file = written(tmp_path, **CHANGES, limits=limits)
    deaths = [Death(rank=r, processes=4, victim=r, at_pass=6) for r in (2, 3)]
    out = tmp_path / "two"
    words = command(file, out, f"engine.rendezvous={nodes.nodes[0].address}:{PORT}")
    codes = nodes.run_everywhere(
        lambda _: words,
        seconds=600,
        logs=tmp_path,
        environment={DEATHS: plan(tmp_path / "deaths.txt", tmp_path, *deaths)},
    )
    assert codes == [0, 0], (tmp_path / "node0.log").read_text()[-2000:]
    two = load_run(out, verify=True)
    one = load_run(
        run_experiment(from_mapping(EXPERIMENT | CHANGES), tmp_path / "one", engine=kept_engine)
    )
    for strategy, trial in by_strategy(two).items():
        assert trial.outcome is Outcome.OK, trial.failure
        told = [[loss for *_, loss in losses(run, strategy)] for run in (one, two)]
        # DDP lays out its buckets anew after a process's first step: four ranks then add in
        # another order.
        assert told[1] == pytest.approx(told[0], rel=1e-6 if strategy == "ddp" else 0)
        (restart,) = trial.restarts
        assert restart.reason in [
            f"rank {rank} was ended by SIGKILL (rank {rank} is on node 1, node1)" for rank in (2, 3)
        ]
        assert [one.step for rank in trial.ranks for one in rank.resumes] == [5] * 4
        written_bytes = [rank.checkpoints[0].written_bytes for rank in trial.ranks]
        writers = [r for r in range(4) if written_bytes[r] > 2 * min(written_bytes)]
        assert writers == ([0, 2] if strategy == "ddp" else []), "one of each node"
    assert not list(shared.iterdir()), "checkpoints are gone with their trial"


def test_a_node_that_comes_back_takes_up_its_part(nodes: Bench, tmp_path: Path) -> None:
    """Node 1 is killed with all that it has started; the same command is run there again."""
    total, every = 160, 20
    limits = {"max_restarts": 1, "checkpoint_steps": every, "node_return_seconds": 200}
    recipe = CHANGES["recipe"] | {"steps": total}
    matrix = {"strategy": ["ddp"], "world_size": [2]}
    file = written(tmp_path, **CHANGES | {"recipe": recipe, "matrix": matrix}, limits=limits)
    out = tmp_path / "run"
    words = command(file, out, f"engine.rendezvous={nodes.nodes[0].address}:{PORT}")
    first, second = (nodes.start(node, words, log=tmp_path / f"{node}.txt") for node in (0, 1))
    wait_for(lambda: min(steps(out, 0), steps(out, 1)) > every + 5, 300)
    nodes.kill(1)
    second.wait(timeout=10)
    third = nodes.start(1, words, log=tmp_path / "again.txt")
    assert first.wait(timeout=400) == 0, (tmp_path / "0.txt").read_text()[-2000:]
    assert third.wait(timeout=60) == 0
    (trial,) = load_run(out).trials
    assert trial.outcome is Outcome.OK, trial.failure
    (restart,) = trial.restarts
    assert restart.reason.startswith("node 1 (node1) was lost: its connection")
    resumed = {one.step for rank in trial.ranks for one in rank.resumes}
    assert len(resumed) == 1
    assert resumed.pop() % every == 0
    taken = [(rank, step) for rank, step, _ in losses(load_run(out), "ddp")]
    assert taken == [(rank, step) for rank in (0, 1) for step in range(total)]
    lost = trial.metrics["lost_seconds"]
    assert lost is not None
    assert 0 < lost.value < trial.total_seconds
    assert not list(Path(tempfile.gettempdir()).glob(f"shardmark-{trial.id}-*"))
