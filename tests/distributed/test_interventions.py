"""Interventions change one thing on real ranks, and the script runs on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardmark.base.results.schema import Outcome, TrialResult
from shardmark.scripts.interventions import COSTS
from tests.distributed.test_script import STEPS, WARMUP_STEPS, timed
from tests.kept_engine import KeptEngine

SCRIPT = Path(__file__).with_name("slow_script.py")
SAVING_SCRIPT = Path(__file__).with_name("saving_script.py")
CALLS = {
    "Workers": "DataLoader(",
    "Fused": "AdamW(",
    "Foreach": "AdamW(",
    "SetToNone": "zero_grad(",
    "BucketView": "DistributedDataParallel(",
    "BucketMb": "DistributedDataParallel(",
    "KeepUnsharded": "fully_shard(",
    "Prefetch": "DataLoader(",
}
"""Calls of the script that get arguments."""


def seen(trial: TrialResult, intervention: str) -> dict[str, Any]:
    facts: dict[str, Any] = trial.ranks[0].settings["seen"][intervention]
    return facts


def test_each_intervention_takes_its_thing_away(kept_engine: KeptEngine, tmp_path: Path) -> None:
    """The script fails under an intervention if the thing is still there."""
    variants = {
        "look": "%look --functions",
        "validated": "%look --validates",
        "shown": "%look --shows",
        "same": f"%same_batch --loads-at-most {WARMUP_STEPS + 1}",
        "functions": f"%same_batch=get_batch --functions --loads-at-most {WARMUP_STEPS + 1}",
        "epochs": "%same_batch --epochs",
        "persistent": "%same_batch --epochs --stay",
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
    assert {*look["fits"]} == {
        *("workers", "prefetch", "pin_memory", "fused", "foreach", "bucket_view", "bucket_mb"),
    }
    validated = seen(trials["validated"], "Look")
    assert validated["rows"] == [32] * (STEPS - WARMUP_STEPS), "batches that train"
    assert validated["loader"]["batch"] == 4
    shares = seen(trials["shown"], "Look")["shares"]
    assert shares["logging"] > shares.get("own_code", 0.0), "tensors become text"
    assert seen(trials["places"], "SwapPlaces") == {"swapped": True}
    for name in ("peers", "epochs", "persistent"):
        assert trials[name].ranks[0].samples == 4 * (STEPS - WARMUP_STEPS)


def test_each_saving_makes_its_change_and_notes_the_line(
    kept_engine: KeptEngine, tmp_path: Path
) -> None:
    """The script fails if the change is not made."""
    values = {
        "workers": "=2",
        "no_sync": "=2",
        "prefetch": "=3",
        "bucket_mb": "=7",
        "threads": "=3",
        "compile": "=aot_eager",
    }
    names = (
        *("workers", "fused", "foreach", "set_to_none", "bucket_view", "keep_unsharded"),
        *("no_sync", "channels_last", "malloc", "prefetch", "bucket_mb", "threads"),
        "compile",
    )
    variants = {name: f"%{name}{values.get(name, '')} --expect {name}" for name in names}
    run = timed(
        kept_engine, tmp_path / "run", variants, workload={"command": str(SAVING_SCRIPT)}, ranks=[2]
    )
    failures = {trial.strategy: trial.failure for trial in run.trials if trial.failure}
    assert not failures
    facts = [trial.ranks[1].settings.get("seen", {}) for trial in run.trials]
    places = {kind: fact["places"] for one in facts for kind, fact in one.items()}
    lines = SAVING_SCRIPT.read_text().splitlines()
    assert places.keys() == CALLS.keys()
    for kind, found in places.items():
        for at, added in found.items():
            place, _, library = at.partition("<")
            file, _, line = place.rpartition(":")
            assert not library
            assert Path(file).name == SAVING_SCRIPT.name
            assert CALLS[kind] in lines[int(line) - 1]
            assert added.keys() == {CALLS[kind].rstrip("(")}


def test_an_unknown_intervention_is_named(kept_engine: KeptEngine, tmp_path: Path) -> None:
    run = timed(
        kept_engine, tmp_path / "run", {"other": "%nothing"}, workload={"command": str(SCRIPT)}
    )
    (trial,) = run.trials
    assert trial.outcome is Outcome.FAILED
    assert trial.failure is not None
    assert all(name in trial.failure.reason for name in ("nothing", *COSTS))
