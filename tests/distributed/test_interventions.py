"""Interventions change one thing on real ranks, and the script runs on."""

from __future__ import annotations

from pathlib import Path

from shardmark.base.results.schema import Outcome, TrialResult
from shardmark.scripts.interventions import COSTS
from tests.distributed.test_script import STEPS, WARMUP_STEPS, timed
from tests.kept_engine import KeptEngine

SCRIPT = Path(__file__).with_name("slow_script.py")


def seen(trial: TrialResult, intervention: str) -> dict[str, object]:
    facts: dict[str, object] = trial.ranks[0].settings["seen"][intervention]
    return facts


def test_each_intervention_takes_its_thing_away(kept_engine: KeptEngine, tmp_path: Path) -> None:
    """The script fails under an intervention if the thing is still there."""
    variants = {
        "look": "%look --functions",
        "same": f"%same_batch --loads-at-most {WARMUP_STEPS + 1}",
        "functions": f"%same_batch=get_batch --functions --loads-at-most {WARMUP_STEPS + 1}",
        "rows": f"%rows_of=next --loads-at-most {WARMUP_STEPS + 1}",
        "update": f"%no_update --updates-at-most {WARMUP_STEPS}",
        "evaluation": f"%no_evaluation --evaluates-at-most {WARMUP_STEPS}",
        "checkpoint": "%no_checkpoint --saves",
        "logging": "%no_logging --prints",
        "places": "%swap_places --pin",
        "peers": "%no_peers --alone",
        "sharded": "%no_peers --alone --fsdp",
    }
    run = timed(
        kept_engine, tmp_path / "run", variants, workload={"command": str(SCRIPT)}, ranks=[2]
    )
    trials = {trial.strategy: trial for trial in run.trials}
    failures = {name: trial.failure for name, trial in trials.items() if trial.failure}
    assert not failures
    look = seen(trials["look"], "Look")
    assert look["functions"] == ["get_batch", "batches"]
    assert look["trained_tensors"] == 4
    assert seen(trials["places"], "SwapPlaces") == {"swapped": True}
    assert trials["peers"].ranks[0].samples == 4 * (STEPS - WARMUP_STEPS)


def test_an_unknown_intervention_is_named(kept_engine: KeptEngine, tmp_path: Path) -> None:
    run = timed(
        kept_engine, tmp_path / "run", {"other": "%nothing"}, workload={"command": str(SCRIPT)}
    )
    (trial,) = run.trials
    assert trial.outcome is Outcome.FAILED
    assert trial.failure is not None
    assert all(name in trial.failure.reason for name in ("nothing", *COSTS))
