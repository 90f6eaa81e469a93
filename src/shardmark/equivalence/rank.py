"""What a rank does for `verify`: a few steps, written down."""

from __future__ import annotations

from pathlib import Path

from shardmark.core.run_files import JOINED_FILE
from shardmark.equivalence.capture import testify
from shardmark.equivalence.evidence import EVIDENCE
from shardmark.strategies.base import Server
from shardmark.train.epochs import Training
from shardmark.train.rank import Settled, serve
from shardmark.train.record import RankReport
from shardmark.trials.trial import Trial


def capture_rank(trial: Trial, directory: Path, place: Settled, report: RankReport) -> None:
    """Take the few steps that `verify` judges, and leave what they gave."""
    process = place.process
    strategy = trial.built_strategy
    workload = trial.workload.build(trial.recipe.seed)
    report.settings = dict(strategy.settings(trial.recipe))
    shard = trial.layout.ranks[process.rank].share
    role = strategy.start(workload, trial.recipe, process)
    (directory / JOINED_FILE.format(process.rank)).touch()
    training = Training.of(trial, workload)
    if isinstance(role, Server):
        serve(role, report)
        return
    assert shard is not None, "a rank without a share is a server"
    evidence = testify(
        role,
        workload,
        trial.recipe,
        plan=training.plan,
        shard=shard,
        steps=training.total_steps,
        device=process.device,
    )
    evidence.save(directory / EVIDENCE.format(process.rank))
    report.exchange = role.exchange()
    role.close()
